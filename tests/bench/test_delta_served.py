"""Files, comparisons and table of the bench of deltas in vLLM, which need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bench.delta_served import Kept, agreement, summary
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
