"""The command line's contract where nothing needs to run: plan and estimate, exit codes, one line on stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.main import get_command

from fingerprint.codec import to_json
from iserve.api_types import DeployBody, LaunchBody, PlanBody, PlanRequest, VerifyBody
from iserve.cli.app import COMMANDS, make_app
from iserve.cli.connection import folder_argument, model_argument
from iserve.cli.groups import request_of
from iserve.settings import load_settings
from iserve.state.store import Store
from planner.intent import IntentKind, Slo
from tests.golden_words import Golden
from tests.iserve.command_line import MODELS, Done, iserve, model
from tests.waiting import PATIENCE_S

__all__ = ["iserve", "model"]  # fixtures

INTENTS = {
    "min-latency": (),
    "min-cost": (),
    "min-memory": (),
    "min-gpu-hours": (),
    "max-throughput": (),
    "min-energy": (),
    "latency-slo": ("--slo", "ttft=5,tpot=0.5,e2e=60"),
    "cost-slo": ("--budget", "1e6"),
}


def test_the_plans_document_is_the_contracts(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    document = iserve("plan", model("Llama-2-70b"), "--gpus", "a6000:8", "--json").document
    assert {"model", "intent", "candidates", "chosen", "why_not"} <= document.keys()
    assert (document["model"], document["intent"]) == ("Llama-2-70b", "min-cost")
    assert len(document["candidates"]) == 180  # the paper's count for this model on 8 GPUs
    for candidate in document["candidates"]:
        assert {"config", "estimate", "objective", "feasible", "reason"} <= candidate.keys()
        assert candidate["config"].keys() == {"tp", "pp", "weights", "kv", "pruning", "engine", "draft_tokens"} | {
            "adapter_slots",
            "adapter_rank",
            "delta_mib",
            "delta_format",
            "expert_parallel",
        }
        assert candidate["feasible"] == (candidate["reason"] is None)
        estimate = candidate["estimate"]
        if estimate is None:
            assert not candidate["feasible"]
            continue
        assert estimate.keys() >= {
            "memory_bytes_per_gpu",
            "memory_bytes_total",
            "cost",
            "ttft_s",
            "tpot_s",
            "e2e_s",
        }
        assert estimate["memory_bytes_per_gpu"] <= estimate["memory_bytes_total"]
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            assert estimate[name].keys() == {"value", "low", "high", "source"}
            assert 0 < estimate[name]["low"] <= estimate[name]["value"] <= estimate[name]["high"]
            assert estimate[name]["source"] == "roofline"
    configs = [tuple(candidate["config"].values()) for candidate in document["candidates"]]
    assert len(set(configs)) == 180


@pytest.mark.parametrize("gpus", ["a6000:8", "h200:4"])
@pytest.mark.parametrize("intent", INTENTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_intent_gives_an_explained_answer(
    iserve: Callable[..., Done], model: Callable[[str], Path], name: str, intent: str, gpus: str
) -> None:
    document = iserve("plan", model(name), "--gpus", gpus, "--intent", intent, *INTENTS[intent], "--json").document
    candidates = document["candidates"]
    assert document["chosen"] == 0
    feasible = [candidate["feasible"] for candidate in candidates]
    assert feasible == sorted(feasible, reverse=True)  # best first within feasible, the refused behind
    objectives = [candidate["objective"] for candidate in candidates if candidate["feasible"]]
    if document["joint"] is not None:  # the first was chosen by the load, not by one batch
        objectives = objectives[1:]
    assert objectives == sorted(objectives, reverse=intent == "max-throughput")
    assert all(candidate["reason"] for candidate in candidates if not candidate["feasible"])
    assert {c["config"]["weights"] for c in candidates if c["feasible"]} <= {"16bit", "int8", "fp8"}
    assert all(better["reason"] for better in document["why_not"]["better"])


def test_nothing_feasible_is_an_answer_with_the_nearest(
    iserve: Callable[..., Done], model: Callable[[str], Path], golden: Golden
) -> None:
    def refused(name: str, *asked: str) -> Any:
        """The document; a script sees by the exit code that nothing is chosen."""
        done = iserve("plan", model(name), *asked, "--json")
        document = json.loads(done.out)
        assert (done.code, done.err, document["chosen"]) == (1, "", None)
        return document

    document = refused("Llama-2-70b", "--gpus", "a6000:1")
    assert not any(candidate["feasible"] for candidate in document["candidates"])
    slow = ("--intent", "latency-slo", "--slo", "ttft=1e-6,tpot=1e-9")
    document = refused("Llama-2-7b", "--gpus", "a6000:8", *slow)
    assert document["why_not"]["nearest"]["text"]
    one_limit = ("--intent", "latency-slo", "--slo", "tpot=0.001")
    document = refused("Llama-2-70b", "--gpus", "a6000:8", *one_limit)
    (relax,) = document["why_not"]["relaxations"]
    assert (relax["limit"], relax["allowed"]) == ("tpot", 0.001)
    assert relax["needed"] > 0.001
    text = iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *slow)
    assert text.code == 1
    golden("cli", text.out)


def test_the_plan_as_text_shows_the_ranking_and_the_refusals(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    asked = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8")
    text = iserve(*asked).out
    assert text.startswith("Llama-2-7b on ")
    refused = [c for c in iserve(*asked, "--json").document["candidates"] if not c["feasible"]]
    (counted,) = (line for line in text.splitlines() if line.endswith("; list them with --refused"))
    assert counted.startswith(f"{len(refused)} refused: ")
    listed = " ".join(iserve(*asked, "--refused").out.split())
    assert "list them with" not in listed
    for candidate in refused:
        config = candidate["config"]
        name = f"tp={config['tp']} pp={config['pp']} weights={config['weights']} kv={config['kv']}"
        assert name in listed
        assert f"on {config['engine']}: {candidate['reason']}" in listed


@pytest.mark.parametrize("more", [(), ("--batch", 8, "--engine", "vllm")], ids=["alone", "batched"])
def test_the_plan_as_text_says_how_probably_each_limit_is_missed(
    iserve: Callable[..., Done], model: Callable[[str], Path], more: tuple[object, ...]
) -> None:
    asked = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8", "--rate", 0.1, *more)
    limits = ("--slo", "ttft=1.5,e2e=20")
    served = iserve(*asked, *limits, "--json").document["load_forecast"]
    ttft, e2e = served["ttft"]["miss_probability"], served["e2e"]["miss_probability"]
    assert 0 < ttft < 1
    assert 0 <= e2e < 1
    text = " ".join(iserve(*asked, *limits).out.split())
    said = re.escape(f"probability of missing TTFT of 1.5 s: {ttft:.2g}, E2E of 20 s: {e2e:.2g} ")
    assert re.search(f"{said}(Serves|How sure)", text)
    assert "probability of missing" not in iserve(*asked).out  # no limit, nothing to miss


@pytest.mark.parametrize("name", ["a[bold]b", "a[", "[red]x[", "tada :tada: x"])
def test_a_folders_name_is_shown_as_it_is(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """The name may hold what the terminal library takes for markup."""
    shutil.copytree(model("Llama-2-7b"), tmp_path / name)
    assert iserve("plan", tmp_path / name, "--gpus", "a6000:2").out.startswith(f"{name} on 1 of 2 A6000")
    assert iserve("estimate", tmp_path / name, "--gpu", "a6000").out.startswith(f"{name} on 1 A6000")


def test_a_folder_whose_name_is_not_utf8_is_one_line(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"n\xff")
    shutil.copytree(model("Llama-2-7b"), folder)
    for arguments in (("plan", folder, "--gpus", "a6000:2", "--json"), ("plan", folder), ("deploy", folder)):
        assert "not UTF-8" in iserve(*arguments).line


def test_a_registered_name_comes_before_a_folder_everywhere(
    iserve: Callable[..., Done], model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is read from the state where nothing runs; a running controller is sent the name too."""
    store = Store.open(tmp_path / "home" / "state.db")
    store.put_model("known", str(model("Llama-2-13b")))
    store.close()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model("Llama-2-7b"), tmp_path / "known")
    for name, layers in (("known", 40), ("./known", 32)):
        assert iserve("estimate", name, "--gpu", "h200", "--json").document["memory"]["num_layers"] == layers
        assert iserve("report", name, "--gpus", "h200:1", "--json").document["spec"]["num_layers"] == layers
    assert iserve("report", "iserve-demo", "--gpus", "h200:1", "--json").document["spec"]["num_layers"] == 8
    settings = load_settings()
    assert model_argument("known", settings) == "known"
    assert model_argument("./known", settings) == str(tmp_path / "known")
    assert folder_argument("known") == str(tmp_path / "known")


def test_the_installations_policy_holds_for_plans_too(
    iserve: Callable[..., Done], model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISERVE_POLICY", "no-such")
    assert "no-such" in iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:2").line
    monkeypatch.setenv("ISERVE_POLICY", "packing")
    assert iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:2", "--policy", "hybrid").code == 0


def test_doctor_looks_and_makes_nothing(
    iserve: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    assert f"home {tmp_path / 'home'}: " in iserve("doctor").out
    assert not (tmp_path / "home").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "file" / "home"))
    (problem,) = [line for line in iserve("doctor").out.splitlines() if "PROBLEM: home" in line]
    golden("cli", problem)


@pytest.mark.parametrize("kind", [PlanBody, LaunchBody, DeployBody, VerifyBody])
def test_what_the_command_line_posts_is_its_request_to_the_rest_api(kind: type[PlanRequest]) -> None:
    """Also where all is left out: the defaults are the same ones."""
    asked = {"slo": Slo(ttft_s=0.5, e2e_s=10), "rate_per_s": 2.0, "percentile": 99.0, "batch": 4}
    for values in (
        {},
        asked | {"relative_rates": (0.5, 1.5), "intent": IntentKind.LATENCY_SLO, "policy": "packing"},
    ):
        request = request_of(kind, **values)
        posted = json.loads(to_json(request.given()))
        assert posted.keys() == values.keys()
        assert TypeAdapter(kind).validate_python(posted) == request


@pytest.mark.parametrize(("command", "kind"), [("plan", PlanBody), ("deploy", DeployBody), ("verify", VerifyBody)])
def test_every_field_of_a_request_is_an_option(command: str, kind: type[PlanRequest]) -> None:
    """Hold but for arguments, fields that --traffic-trace fills and groups of their own."""
    names = {parameter.name for parameter in get_command(make_app()).commands[command].params}  # type: ignore[attr-defined]
    without = {field.name for field in fields(kind)} - names
    assert without <= {"relative_rates", "rate_window_s", "deployment", "engine_args"}
    assert ({"arrivals"} <= names, "engine_arg" in names) == (True, command == "deploy")


@pytest.mark.process
def test_what_cannot_be_written_is_one_line(model: Callable[[str], Path], tmp_path: Path, golden: Golden) -> None:
    command = Path(sys.executable).with_name("iserve")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    for more in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [command, "plan", model("Llama-2-7b"), "--gpus", "a6000:2", *more],
                env=environment | {"ISERVE_HOME": str(tmp_path / "home")},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        golden("cli", done.stderr)
        assert done.returncode == 1


def test_every_module_registers_the_commands_it_is_imported_for() -> None:
    """Asked for by name a command is the one of the whole, and what is no command is looked for in the whole."""
    whole = get_command(make_app()).commands
    assert sorted(whole) == sorted(name for names in COMMANDS.values() for name in names)
    for names in COMMANDS.values():
        for name in names:
            assert set(get_command(make_app(name)).commands) == set(names)
    for word in ("", "--version", "plam"):
        assert list(get_command(make_app(word)).commands) == list(whole)


@pytest.mark.parametrize(
    "words",
    ["", "plan", "deploy", "simulate", "replay", "profile", "keys create"],
)
def test_help_loads_nothing_heavy(words: str) -> None:
    """The help is quick: no numbers, no engine, no server, no database; of the commands only its own."""
    code = (
        "import atexit, sys\nfrom iserve.cli import main\nsys.argv = ['iserve', *sys.argv[1:]]\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\nmain()"
    )
    argv = [sys.executable, "-c", code, *words.split(), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert f"Usage: iserve {words}" in done.stdout
    loaded = set(done.stderr.split())
    heavy = {"numpy", "torch", "transformers", "fastapi", "sqlalchemy", "aiohttp", "sklearn", "scipy", "rich"}
    heavy |= {"pydantic", "asyncio", "msgspec", "zstandard"}
    assert heavy.isdisjoint(loaded)
    of_commands = {name for name in COMMANDS if f"iserve.cli.{name}" in loaded}
    assert len(of_commands) == (1 if words else len(COMMANDS))


@pytest.mark.slow
def test_a_plan_of_a_folder_loads_no_engine_server_database_or_hub(model: Callable[[str], Path]) -> None:
    """The plan is ready within half a second of a core."""
    code = (
        "import atexit, sys\nfrom iserve.cli import main\nsys.argv = ['iserve', *sys.argv[1:]]\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\nmain()"
    )
    argv = [sys.executable, "-c", code, "plan", str(model("Llama-2-7b")), "--gpus", "h100:1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    heavy = {"torch", "transformers", "sklearn", "scipy", "fastapi", "aiohttp", "sqlalchemy", "huggingface_hub"}
    assert (heavy | {"asyncio"}).isdisjoint(done.stderr.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("intent", ["min-cost", "max-throughput", "min-latency"])
def test_a_narrow_terminal_shows_no_figure_cut_short(
    iserve: Callable[..., Done],
    model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    intent: str,
    width: int,
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    arguments: tuple[object, ...] = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8", "--intent", intent)
    if width != 80:  # with the pruned ones a row has more than 80 characters
        arguments += ("--quality", "any")
    document = iserve(*arguments, "--json").document
    lines = re.sub(r"\x1b\[[0-9;]*m", "", iserve(*arguments).out).splitlines()
    assert "…" not in "".join(lines)
    (start,) = [index for index, line in enumerate(lines) if line.startswith("#")]
    for number, candidate in enumerate(document["candidates"][:12]):
        row = lines[start + 1 + number].split()
        assert row[:3] == [str(number + 1), str(candidate["config"]["tp"]), str(candidate["config"]["pp"])]
        assert f"{candidate['objective']:.4g}" in row
        assert row[-1] == "r"
        tpot = candidate["estimate"]["tpot_s"]
        assert f"{tpot['value'] * 1e3:.3g}" in row
        if width >= 100:
            assert f"[{tpot['low'] * 1e3:.3g}-{tpot['high'] * 1e3:.3g}]" in row
    if width >= 80:
        assert all(len(line) <= width for line in lines)


def test_an_estimate_is_the_plans(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    folder, work = model("Llama-2-13b"), ("--batch", "8", "--input-tokens", "256", "--output-tokens", "64")
    config = "tp=2,pp=1,weights=16bit,kv=16bit,pruning=none"
    one = iserve("estimate", folder, "--gpu", "h200", "--config", config, *work, "--json").document
    assert one["runnable"] is True
    assert one["reason"] is None
    plan = iserve("plan", folder, "--gpus", "h200:2", *work, "--json").document
    (same,) = [
        c
        for c in plan["candidates"]
        if (c["config"]["tp"], c["config"]["pp"], c["config"]["weights"], c["config"]["kv"])
        == (2, 1, "16bit", "16bit")
        and c["config"]["pruning"] == "none"
    ]
    assert one["estimate"] == same["estimate"]
    assert "TPOT" in iserve("estimate", folder, "--gpu", "h200", "--config", config).out


def test_an_estimate_takes_the_checkpoint_s_own_weights(iserve: Callable[..., Done], tmp_path: Path) -> None:
    """The weights of a quantized checkpoint are taken too; other formats are refused with the reason."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    folder = tmp_path / "quantized"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-2-7b"] | {"quantization_config": quantization}))
    for config in ("tp=1", "kv=fp8", "tp=2,weights=stored"):
        found = iserve("estimate", folder, "--gpu", "h200", "--config", config, "--json").document
        assert (found["config"]["weights"], found["runnable"], found["reason"]) == ("stored", True, None)
    done = iserve("estimate", folder, "--gpu", "h200", "--config", "weights=16bit", "--json")
    told = json.loads(done.out)
    assert (done.code, told["runnable"]) == (1, False)
    assert "gptq" in told["reason"]
    assert told["memory"]["layer_weight_bytes"] > 3 * found["memory"]["layer_weight_bytes"]


def test_an_estimate_that_does_not_fit_says_so(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    done = iserve("estimate", model("Llama-2-70b"), "--gpu", "a6000", "--config", "tp=1", "--json")
    document = json.loads(done.out)
    assert (done.code, document["runnable"]) == (1, False)
    assert "GiB" in document["reason"]
    assert done.err == f"iserve: not runnable: {document['reason']}\n"


def test_an_estimate_that_no_engine_runs_says_so(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    done = iserve("estimate", model("Llama-2-7b"), "--gpu", "h200", "--config", "tp=3")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("iserve: not runnable: ")
    assert "tp=3" in done.err


@pytest.mark.parametrize(
    ("words", "offered"), [("iserve dep", "deploy"), ("iserve plan --int", "--intent"), ("iserve trace s", "show")]
)
@pytest.mark.process
def test_a_shell_completes_commands_and_options(words: str, offered: str, tmp_path: Path) -> None:
    asked = {"_ISERVE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = Path(sys.executable).with_name("iserve")
    done = subprocess.run(
        [command], env=kept | asked, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert offered in done.stdout.split()
    assert not list(tmp_path.iterdir())
