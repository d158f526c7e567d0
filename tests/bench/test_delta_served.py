"""Files, comparisons and table of the bench of deltas in vLLM, which need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bench.delta_agreement import MARGIN, agreement, allowed_margin, random_batches
from tests.bench.delta_served import SMALL_VARIANTS, Answers, Kept, compare_batches, longest_steps, summary
from tests.bench.delta_served_files import LLAMA_8B, Files, write_delta, write_merged
from tests.bench.lora_adapters import write_checkpoint
from tests.daemon.variant_kernels import variant_module
from tests.golden_words import Golden

SMALL = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 192,
}


@pytest.mark.parametrize("whole", [True, False])
def test_a_written_delta_is_read_and_merged(tmp_path: Path, whole: bool) -> None:
    files = Files(root=tmp_path)
    files.small.mkdir()
    (files.small / "config.json").write_text(json.dumps(SMALL))
    write_checkpoint(files.small, SMALL)
    write_delta(files.delta(1), SMALL, 1, whole=whole)
    delta = variant_module("folder").read_folder(files.delta(1), pin=False)
    assert len(delta.matrices) == (9 if whole else 7)
    assert len(delta.exact) == (3 if whole else 0)
    write_merged(files.small, files.delta(1), files.merged)
    base, merged = (load_file(str(one / "model.safetensors")) for one in (files.small, files.merged))
    assert base.keys() == merged.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    change = merged[name].float() - base[name].float()
    assert 0.003 < float(change.std()) < 0.007
    for name, weight in base.items():
        assert torch.equal(merged[name], weight) != (name in delta.matrices or name in delta.exact), name


def test_deltas_of_another_seed_differ(tmp_path: Path) -> None:
    read = variant_module("folder").read_folder
    for seed in (1, 2):
        write_delta(tmp_path / str(seed), SMALL, seed, whole=False)
    one, two = (read(tmp_path / str(seed), pin=False).matrices for seed in (1, 2))
    assert all(not torch.equal(one[name].codes, two[name].codes) for name in one)


def test_answers_agree_up_to_a_close_token() -> None:
    answer = [(5, -0.1, 2.0), (6, -0.2, 0.05), (7, -0.3, 1.0)]
    same = agreement(answer, answer)
    assert (same["agreed"], same["margin_where_other"], same["passed"]) == (3, None, True)
    close = agreement(answer, [(5, -0.1, 2.0), (9, -0.2, 0.02), (1, -9.0, 9.0)])
    assert (close["agreed"], close["margin_where_other"], close["passed"]) == (1, 0.05, True)
    other = agreement(answer, [(8, -0.1, 0.01), (6, -0.2, 0.05), (7, -0.3, 1.0)])
    assert (other["agreed"], other["margin_where_other"], other["passed"]) == (0, 2.0, False)


def test_rounding_elsewhere_is_allowed_twice_what_batches_do() -> None:
    answer = [(5, -0.1, 2.0), (6, -0.2, 0.15), (7, -0.3, 1.0)]
    other = [(5, -0.2, 2.0), (9, -0.2, 0.02), (1, -9.0, 9.0)]
    compared = [
        agreement(answer, answer),
        agreement(answer, other),
        agreement(answer, [(8, -0.1, 0.1), *answer[1:]]),
    ]
    assert compared[2]["largest_logprob_error"] is None
    assert allowed_margin(compared) == pytest.approx(0.2)
    assert not agreement(answer, other)["passed"]
    assert agreement(answer, other, allowed_margin(compared))["passed"]
    assert allowed_margin(compared[:1]) == allowed_margin([]) == MARGIN


def test_batches_are_random_mixes_that_repeat() -> None:
    made = random_batches(3, batches=40, variants=SMALL_VARIANTS, prompts=5)
    assert made == random_batches(3, batches=40, variants=SMALL_VARIANTS, prompts=5)
    assert len(made) == 40
    assert made != random_batches(4, batches=40, variants=SMALL_VARIANTS, prompts=5)
    asked = {one for batch in made for one in batch}
    assert {variant for variant, _ in asked} == set(SMALL_VARIANTS)
    assert {prompt for _, prompt in asked} == set(range(5))
    assert len({len({variant for variant, _ in batch}) for batch in made}) > 3  # few and many variants at once


def test_longest_steps_are_placed_by_the_load() -> None:
    steps = [9.0, 1.0, 2.0, 5.0, 1.0, 7.0, 3.0]
    found = longest_steps(steps, 2, 5, count=3)
    assert found == [
        {"ms": 7000.0, "after_request": 3, "after_load": 0},
        {"ms": 5000.0, "after_request": 1, "after_load": -2},
        {"ms": 3000.0, "after_request": 4, "after_load": 1},
    ]
    assert [one["after_load"] for one in longest_steps(steps, 5, None)] == [None, None]


def test_what_was_recorded_is_still_a_table(golden: Golden) -> None:
    lines = summary(Path(__file__).parent / "results/delta_served_h200")
    golden("engines", [line for line in lines if line.startswith("specialized:")])
    assert any(line.startswith("deltas: load in ") for line in lines)


class _Served:
    """Stands in for vLLM's engine: answers by variant and prompt; delta 2 answers otherwise in a batch."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[int, int]] = {}
        self.batches, self.loaded, self.engine = (
            list[int](),
            list[int](),
            SimpleNamespace(remove_lora=self._remove),
        )
        self._removed: set[int] = set()

    def _remove(self, number: int) -> None:
        self._removed.add(number)

    def add(self, prompt: list[int], number: int, output: int, *, logprobs: int) -> str:
        assert number not in self._removed
        self.asked[name := str(len(self.asked) + 1000 * len(self.batches))] = number, sum(prompt)
        return name

    def finish(self, between: Callable[[int], None]) -> tuple[dict[str, Any], list[float]]:
        for step in range(4):
            between(step)
        found = {}
        for name, (number, prompt) in self.asked.items():
            token = prompt + number + (number == 2 and len(self.asked) > 1)
            found[name] = SimpleNamespace(
                token_ids=[token],
                logprobs=[{token: SimpleNamespace(logprob=-0.1), 0: SimpleNamespace(logprob=-2.0)}],
            )
        self.batches.append(len(self.asked))
        self.asked.clear()
        return found, []

    def load(self, number: int) -> bool:
        self._removed.discard(number)
        self.loaded.append(number)
        return len(self.loaded) % 3 == 0


def test_batches_are_compared_with_each_request_alone(tmp_path: Path) -> None:
    served = _Served()
    compare_batches(served, Kept(tmp_path / "same.json", {}), Answers(served), range(12))
    rows = json.loads((tmp_path / "same.json").read_text())["rows"]
    assert len(rows) == 12
    assert any(row["passed"] for row in rows)
    for row in rows:
        assert row["passed"] == all(variant != 2 for variant, _ in row["requests"])
        assert row["loaded"] not in {variant for variant, _ in row["requests"]}
    assert {row["loaded"] for row in rows} & set(served.loaded)
    alone = {tuple(one) for row in rows for one in row["requests"]}
    assert served.batches.count(1) == len(alone)  # each once


def test_batches_are_in_the_table(tmp_path: Path, golden: Golden) -> None:
    kept = Kept(tmp_path / "same_mixed.json", {})
    for number, margins in enumerate(([None, 0.03], [0.4, 0.06])):
        kept.add("batch", batch=number, margins_where_other=margins, largest_logprob_error=0.03 + number)
    golden("engines", summary(tmp_path))


def test_each_measurement_is_on_disk_and_in_the_table(tmp_path: Path, golden: Golden) -> None:
    plain, deltas = Kept(tmp_path / "plain.json", {}), Kept(tmp_path / "deltas.json", {})
    plain.add("step", of="deltas", active=0, median_ms=5.0, all_ms=[5.0])
    deltas.add("step", of="deltas", active=0, median_ms=5.1, all_ms=[5.1])
    deltas.add("step", of="deltas", active=8, median_ms=11.5, all_ms=[11.5])
    deltas.add("step", of="adapters", active=2, median_ms=7.0, all_ms=[7.0])
    deltas.add("load", delta=9, loaded_s=1.2, median_ms=6.0, longest_ms=8.0, longest_share=1.33)
    assert len(json.loads((tmp_path / "deltas.json").read_text())["rows"]) == 4
    golden("engines", summary(tmp_path))


@pytest.mark.slow
def test_no_web_framework_and_no_engine_is_imported() -> None:
    code = (
        "import sys, tests.bench.delta_served as bench; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'aiohttp', 'fastapi', 'vllm', 'daemon'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
