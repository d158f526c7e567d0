"""Contest of adapter kernels: attempts on a machine whose times are known, the plug-in, and how it is judged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fingerprint.errors import EngineError
from fingerprint.measurements import MachineInfo
from tests.bench import accuracy_measure
from tests.bench import lora_contest as bench
from tests.bench import lora_contest_plugin as plugin
from tests.bench.variant_costs_vllm import Kept, Shapes
from tests.fingerprint.synthetic_machine import llama
from tests.fingerprint.variant_step_machine import StepMachine

MACHINE = MachineInfo(device="h200-sxm", num_devices=1, cores_per_device=8, cpu_model="", driver="", versions=())


class Target:
    def __init__(self, machine: StepMachine) -> None:
        self.machine = machine

    def open(self, *, tp: int, pp: int) -> Any:
        return self.machine.open()


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shapes:
    monkeypatch.setattr(bench, "write_random_variant", lambda base, target, kind, number: target.mkdir())
    found = Shapes(tmp_path / "models", bench.MODEL)
    found.whole = found.whole.rename(found.whole.with_name("36"))  # as the machine expects it
    return found


def machine(**facts: Any) -> StepMachine:
    return StepMachine(spec=llama(36, max_context_tokens=8192), **facts)


class TestMeasure:
    def test_an_attempt_runs_its_rounds_with_distinct_adapters(self, shapes: Shapes, tmp_path: Path) -> None:
        known, kept = machine(alone_first=lambda burst: bench.ROWS), Kept(tmp_path / "0-own.json", attempt="own")
        bench.measure_attempt("own", Target(known), shapes, kept)
        (loaded,) = [entry for entry in known.log if entry[0] == "variants"]
        assert len(set(loaded[1:])) == bench.SLOTS
        bursts = [entry[4] for entry in known.log if entry[0] == "burst"]
        assert len(bursts) == bench.ROUNDS * len(bench.ACTIVE)
        assert bursts[: len(bench.ACTIVE)] == list(bench.ACTIVE[::-1])
        attempt = bench.Attempt(tmp_path / "0-own.json")
        assert len(attempt.steps_s(32)) == bench.ROUNDS - 1
        assert attempt.step_s(0) < attempt.step_s(1) < attempt.step_s(32)

    def test_the_base_has_no_slots(self, shapes: Shapes, tmp_path: Path) -> None:
        known, kept = machine(), Kept(tmp_path / "0-base.json", attempt="base")
        bench.measure_attempt("base", Target(known), shapes, kept)
        assert [entry[2] for entry in known.log if entry[0] == "start"] == [0]
        assert {entry[4] for entry in known.log if entry[0] == "burst"} == {0}

    def test_a_worker_has_the_attempts_settings_and_the_plug_in(
        self, shapes: Shapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All but the worker's process: what it would have in its environment."""
        seen: list[dict[str, str]] = []

        class Bench:
            def __init__(self, **facts: Any) -> None:
                self.scratch = facts["scratch"]

            @contextmanager
            def target(self, directory: Path, spec: Any) -> Iterator[Target]:
                seen.append(dict(os.environ))
                (self.scratch / "worker").mkdir()
                said = "kernels of adapters are iServe's in steps of up to 64 rows"
                (self.scratch / "worker" / "log.txt").write_text(f"begun\n{said}\n")
                yield Target(machine(alone_first=lambda burst: bench.ROWS))

        monkeypatch.setattr(accuracy_measure, "machine_here", lambda gpus: MACHINE)
        monkeypatch.setattr(accuracy_measure, "total_bytes", lambda: 141 << 30)
        monkeypatch.setattr(accuracy_measure, "_Bench", Bench)
        monkeypatch.setattr(bench, "Shapes", lambda folder, model: shapes)
        monkeypatch.setenv("PYTHONPATH", "before")
        out = tmp_path / "out"
        assert bench.measure(out, ["own"], bench.run_on(0, out))
        (found,) = seen
        plug_in, rest = found["PYTHONPATH"].split(os.pathsep)
        assert (Path(plug_in).name, rest) == ("plug-in", "before")
        assert found[plugin.TOKENS] == str((out / "0-own.tokens.jsonl").resolve())
        assert found[bench.ADAPTER_KERNELS] == "1"  # so that the plug-in of deployments is found
        assert os.environ["PYTHONPATH"] == "before"
        assert plugin.TOKENS not in os.environ
        assert bench.Attempt(out / "0-own.json").error == ""  # its log shows our kernels

    def test_an_attempt_that_fails_leaves_the_next_ones(self, tmp_path: Path) -> None:
        def run(attempt: str, tokens: Path, kept: Kept) -> None:
            if attempt == "dual":
                raise EngineError("gone")
            tokens.write_text(json.dumps({"active": 0, "tokens": [[1]]}) + "\n")

        assert not bench.measure(tmp_path, ["base", "dual"], run)
        assert bench.measure(tmp_path, ["own"], run)
        assert [file.name for file in bench.kept_files(tmp_path)] == ["0-base.json", "1-dual.json", "2-own.json"]
        assert "gone" in bench.Attempt(tmp_path / "1-dual.json").error
        assert bench.Attempt(tmp_path / "2-own.json").tokens == {0: [[[1]]]}

    def test_no_attempt_begins_that_would_end_too_late(self, tmp_path: Path) -> None:
        now_s = [0.0]

        def run(attempt: str, tokens: Path, kept: Kept) -> None:
            now_s[0] += 100.0

        assert not bench.measure(tmp_path, ["base", "default", "own"], run, end_s=250.0, clock=lambda: now_s[0])
        assert [file.name for file in bench.kept_files(tmp_path)] == ["0-base.json", "1-default.json"]


class TestSettings:
    def test_what_changes_the_traced_model_has_a_cache_of_its_own(self, tmp_path: Path) -> None:
        """VLLM finds a compiled model by its own sources, which our patch does not change."""
        found = {attempt: bench.settings_of(attempt, tmp_path, tmp_path) for attempt in bench.ATTEMPTS}
        for attempt, values in found.items():
            assert ("VLLM_CACHE_ROOT" in values) == (bench.DUAL in values), attempt
        assert set(found["tuned"]) == {bench.TUNED}
        assert found["aligned"] == {plugin.ALIGN: "1"} | found["tuned"]
        (tmp_path / "aligned" / "tuned").mkdir(parents=True)
        again = bench.settings_of("aligned", tmp_path, tmp_path)
        assert again[bench.TUNED] == str(tmp_path / "aligned" / "tuned")
        assert found["base"] == found["default"] == {}
        assert found["own"] == {bench.ADAPTER_KERNELS: "1"}  # which vLLM hashes with its configuration

    def test_lines_that_name_a_setting_are_kept_of_a_long_log(self, tmp_path: Path) -> None:
        for name, said in bench.SHOWN.items():
            log = tmp_path / name / "worker" / "log.txt"
            log.parent.mkdir(parents=True)
            log.write_text("\n".join(["first", f"INFO {said}", *["step"] * 100]))
            assert f"INFO {said}" in bench.worth_keeping(tmp_path / name)

    def test_variables_are_put_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FIRST", "1")
        monkeypatch.delenv("SECOND", raising=False)
        with bench.variables({"FIRST": "2", "SECOND": "3"}):
            assert (os.environ["FIRST"], os.environ["SECOND"]) == ("2", "3")
        assert (os.environ["FIRST"], os.environ.get("SECOND")) == ("1", None)

    def test_an_interpreter_without_a_web_framework_or_triton_can_run_it(self) -> None:
        missing = ("fastapi", "starlette", "sqlalchemy", "uvicorn", "httpx", "typer", "rich", "triton")
        program = f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        program += "import tests.bench.lora_contest, tests.bench.accuracy_measure"
        subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


class TestTable:
    """Three requests of four tokens; the second start of the default differs in the last of one."""

    BASE = ((0, 0, 0, 0),) * 3
    FIRST = ((1, 2, 3, 4), (5, 6, 7, 8), (1, 1, 1, 1))
    SECOND = ((1, 2, 3, 9), *FIRST[1:])

    def keep(
        self,
        out: Path,
        number: int,
        attempt: str,
        step_s: float,
        tokens: Any,
        error: str = "",
        log: str | None = None,
    ) -> None:
        kept = Kept(out / f"{number}-{attempt}.json", attempt=attempt)
        kept.keep("log", ["begun", bench.SHOWN.get(attempt, "") if log is None else log])
        for active in bench.ACTIVE[:1] if attempt == "base" else bench.ACTIVE:
            for again in (9.0, step_s, step_s):  # the first warms up
                kept.add("burst", active=active, step_s=again)
        if error:
            kept.add("error", text=error)
        rows = [{"active": active, "tokens": tokens if active else self.BASE} for active in bench.ACTIVE]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{number}-{attempt}.tokens.jsonl").write_text(lines)

    def test_the_shortest_step_whose_tokens_agree_wins(self, tmp_path: Path) -> None:
        wrong = [[1, 9, 3, 4], [5, 9, 7, 8], [1, 9, 1, 1]]
        self.keep(tmp_path, 0, "base", 5.7e-3, self.BASE)
        self.keep(tmp_path, 1, "default", 18e-3, self.FIRST)
        self.keep(tmp_path, 2, "dual", 6e-3, wrong)
        self.keep(tmp_path, 3, "tuned", 8e-3, self.FIRST)
        self.keep(tmp_path, 4, "own", 7e-3, self.SECOND)
        self.keep(tmp_path, 5, "specialized", 5e-3, self.FIRST, error="RuntimeError: it ended")
        self.keep(tmp_path, 10, "default", 18e-3, self.SECOND)
        contest = bench.Contest(tmp_path)
        verdicts = [contest.verdict(attempt) for attempt in contest.attempts]
        assert verdicts[1:5] == ["yes", "no", "yes", "yes"]
        assert "ended" in verdicts[5]
        assert verdicts[6] == "yes"
        assert contest.winner().name == "own"
        assert contest.share(contest.winner()) == pytest.approx(5.7 / 7)
        lines = bench.table(tmp_path)
        (row,) = [line.split("|") for line in lines if line.startswith("| 3 tuned")]
        assert [cell.strip() for cell in row[6:8]] == ["8.00 (8.00 to 8.00)", "71%"]
        assert "0%" in lines[-2]  # of the base's tokens are those of adapters

    def test_an_attempt_whose_setting_was_not_taken_is_out(self, tmp_path: Path) -> None:
        self.keep(tmp_path, 0, "default", 18e-3, self.FIRST)
        self.keep(tmp_path, 1, "own", 7e-3, self.FIRST, log="Failed to load plugin lora_contest")
        contest = bench.Contest(tmp_path)
        assert "log" in contest.verdict(contest.attempts[1])
        assert contest.winner().name == "default"

    def test_without_a_second_default_all_tokens_have_to_agree(self, tmp_path: Path) -> None:
        self.keep(tmp_path, 0, "default", 18e-3, self.FIRST)
        self.keep(tmp_path, 1, "own", 7e-3, [[1, 2, 9, 9], [5, 6, 9, 9], [1, 1, 9, 9]])
        assert bench.Contest(tmp_path).winner().name == "default"

    def test_an_attempt_without_tokens_does_not_win(self, tmp_path: Path) -> None:
        self.keep(tmp_path, 0, "default", 18e-3, self.FIRST)
        self.keep(tmp_path, 1, "own", 7e-3, self.FIRST)
        (tmp_path / "1-own.tokens.jsonl").unlink()
        assert bench.Contest(tmp_path).winner().name == "default"

    def test_nothing_is_said_of_the_tokens_of_the_base(self, tmp_path: Path) -> None:
        """Without slots there are none of adapters to agree; an error of its start is said."""
        self.keep(tmp_path, 0, "base", 5.7e-3, self.BASE)
        self.keep(tmp_path, 1, "default", 18e-3, self.FIRST)
        self.keep(tmp_path, 2, "base", 5.7e-3, self.BASE, error="RuntimeError: it ended")
        (row, failed) = [line.split("|") for line in bench.table(tmp_path) if re.match(r"\| \d base", line)]
        assert row[-2].strip() == ""
        assert "it ended" in failed[-2]

    def test_agreement_is_the_share_before_the_first_difference(self) -> None:
        assert bench.agreement([self.FIRST], [self.FIRST]) == 1.0
        assert bench.agreement([self.SECOND], [self.FIRST]) == pytest.approx(11 / 12)
        assert bench.agreement([[[1, 7, 8, 9]]], [[[9, 2, 3, 4]]]) == 0.0


class TestPlugIn:
    def test_vllm_finds_it(self, tmp_path: Path) -> None:
        bench.write_plug_in(tmp_path / "plug-in")
        (found,) = metadata.distributions(path=[str(tmp_path / "plug-in")])
        (entry,) = found.entry_points
        assert (entry.group, entry.value) == ("vllm.general_plugins", "lora_contest_plugin:register")
        assert (tmp_path / "plug-in" / "lora_contest_plugin.py").exists()

    def test_it_does_nothing_in_other_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(plugin.TOKENS, raising=False)
        monkeypatch.setattr(plugin, "keep_tokens", lambda file: pytest.fail("patched"))
        plugin.register()

    def test_tokens_of_each_call_are_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class LLM:
            def generate(self, prompts: list[Any], lora_request: Any = None) -> list[Any]:
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(prompt, 7))]) for prompt in prompts]

        module = ModuleType("vllm.entrypoints.llm")
        module.LLM = LLM
        monkeypatch.setitem(sys.modules, "vllm.entrypoints.llm", module)
        file = tmp_path / "0-own.tokens.jsonl"
        plugin.keep_tokens(file)
        plugin.keep_tokens(file)  # called in each process once more
        adapters = [SimpleNamespace(lora_int_id=number) for number in (1, 2, 1)]
        assert len(LLM().generate([4, 5, 6], lora_request=adapters)) == 3
        LLM().generate([4])
        assert bench.tokens_of(tmp_path / "0-own.json") == {2: [[[4, 7], [5, 7], [6, 7]]], 0: [[[4, 7]]]}

    def test_one_engine_argument_specializes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class EngineArgs:
            enable_lora, specialize_active_lora = True, False

            def create_engine_config(self) -> bool:
                return self.specialize_active_lora

        module = ModuleType("vllm.engine.arg_utils")
        module.EngineArgs = EngineArgs
        monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
        plugin.specialize()
        assert EngineArgs().create_engine_config()

    def test_pointers_of_slices_are_aligned_in_vllms_source(self) -> None:
        """Both ways in which 0.33.0 writes it; any other number of places is refused."""
        source = """
        cur_lora_ptr = tl.load(lora_ptr + slice_id).to(
            tl.pointer_type(out_ptr.dtype.element_ty)
        )
        cur_lora_ptr = lora_ptr
        cur_lora_ptr = tl.load(lora_ptr + slice_id).to(tl.pointer_type(input_ptr.dtype.element_ty))
        cur_slice_start = tl.load(slice_start_loc + slice_id)
        """
        aligned = plugin.aligned_source(source)
        assert aligned.count("tl.multiple_of(tl.load(lora_ptr + slice_id).to(") == 2
        assert aligned.count(", 16)") == 3
        with pytest.raises(RuntimeError):
            plugin.aligned_source(aligned)
