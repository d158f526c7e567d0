"""Several ranks: real processes, over gloo on the CPU."""

from __future__ import annotations

import pytest
import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.config import DeploymentConfig, WeightFormat
from tests.daemon.tiny_models import rank_processes

pytestmark = pytest.mark.process

LAYERS = {
    "llama": 4,
    "llama-tied": 2,
    "llama-odd-vocab": 2,
    "gemma3_text": 3,
    "qwen3": 3,
    "mixtral": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
    "gpt_neox": 2,
    "gpt_oss": 3,
    "internlm3": 2,
    "iquestcoder": 2,
}
SPLIT = [family for family in LAYERS if family != "gpt_oss"]  # of which transformers has no plan
FIRST = StepPlan((StepItem(1, 0, (3, 80, 0, 41, 17, 5, 66)), StepItem(3, 0, (50, 1, 88))))
SECOND = StepPlan((StepItem(1, 7, (9, 90, 12)), StepItem(3, 3, (23,)), StepItem(0, 0, (61,))))
# Sums of at most 64 products in another order: some units in the last place of logits of size 10, over 4 layers.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def run(tiny_checkpoint, tiny_stages, tiny_limits):
    """``run("llama", tp=2)``: logits of two mixed steps and the runner's memory, in float32.

    Ranks are kept from one call to the next while (tp, pp) stay the same, as in a profile.
    """
    runner = LocalRunner(dtype=torch.float32)

    def steps(family: str, *, tp: int = 1, pp: int = 1, layers=None, weights=WeightFormat.BITS16):
        stages = tiny_stages(LAYERS[family], tp=tp, pp=pp, layers=layers)
        config = DeploymentConfig(tp=tp, pp=pp, weights=weights)
        runner.load(tiny_checkpoint(family), config, stages, tiny_limits)
        results = runner.step(FIRST), runner.step(SECOND)
        return [result.logits for result in results], results[1], runner.memory()

    yield steps
    runner.close()
    assert not rank_processes()


@pytest.fixture(scope="module")
def alone(run):
    """The logits of one rank."""
    cache = {}

    def logits(family: str, weights=WeightFormat.BITS16):
        if (family, weights) not in cache:
            cache[family, weights] = run(family, weights=weights)[0]
        return cache[family, weights]

    for family in LAYERS:  # first, so that the ranks of each (tp, pp) are started once
        logits(family)
    logits("llama", WeightFormat.INT8)
    return logits


def assert_close(got, expected, atol: float) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


class TestTensorParallel:
    @pytest.mark.parametrize("family", SPLIT)
    def test_logits_are_those_of_one_rank(self, family: str, alone, run) -> None:
        """The models have biases (llama), tied embeddings, a vocabulary that does not halve, and experts."""
        logits, result, _ = run(family, tp=2)
        assert_close(logits, alone(family), ROUNDING)
        assert len(result.busy_s) == 2
        assert result.device_s == max(result.busy_s)
        assert result.handover_s == 0

    def test_int8_is_as_close_to_16bit_as_on_one_rank(self, alone, run) -> None:
        """The error of int8 on two ranks is within twice that of one rank.

        It is not equal to one rank's int8: a row-parallel weight has a scale per row and rank, finer or the same.
        """
        logits, _, _ = run("llama", tp=2, weights=WeightFormat.INT8)
        exact, one = alone("llama"), alone("llama", WeightFormat.INT8)
        for mine, other, true in zip(logits, one, exact, strict=True):
            assert 0 < (mine - true).norm() < 2 * (other - true).norm()

    def test_each_rank_holds_half(self, run) -> None:
        """Each rank has half of the linears, embedding, head 96 x 32 and KV; norms, row-parallel biases,
        frequencies whole.
        """
        split = 2 * 96 * 32 + 4 * (2 * 32 * 32 + 2 * 16 * 32 + 64 + 3 * 64 * 32 + 128)
        whole = 4 * (32 + 32 + 2 * 32) + 32 + 2 * 4
        memory = run("llama", tp=2)[2]
        assert [rank.weights_bytes for rank in memory] == [4 * (split // 2 + whole)] * 2
        assert [rank.kv_bytes for rank in memory] == [4 * 2 * 4 * 1 * 64 * 8 * 4] * 2
        assert [(rank.rank, rank.stage) for rank in memory] == [(0, 0), (1, 0)]

    def test_a_tied_head_is_the_ranks_rows_of_the_embedding(self, run) -> None:
        layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
        memory = run("llama-tied", tp=2)[2]
        assert [rank.weights_bytes for rank in memory] == [4 * ((96 * 32 + 2 * layer) // 2 + 2 * 64 + 32 + 8)] * 2


class TestPipeline:
    @pytest.mark.parametrize(
        ("family", "layers"),
        [
            pytest.param("llama", (3, 1), id="uneven"),
            pytest.param("llama", (1, 3), id="uneven-other-way"),
            pytest.param("llama-tied", None, id="tied"),
            pytest.param("mixtral", None, id="experts"),
            pytest.param("qwen3_moe", None, id="experts-and-qk-norms"),
            pytest.param("gpt_neox", None, id="other-names"),
            pytest.param("gemma3_text", (2, 1), id="kinds-apart"),
            pytest.param("gpt_oss", (1, 2), id="kinds-mixed"),
            pytest.param("internlm3", None, id="no-row-of-its-own"),
            pytest.param("iquestcoder", None, id="no-row-either"),
        ],
    )
    def test_logits_are_those_of_one_rank_to_the_bit(self, family: str, layers, alone, run) -> None:
        """The same operators on the same numbers; only the place changes."""
        logits, result, _ = run(family, pp=2, layers=layers)
        assert_close(logits, alone(family), 0)
        assert 0 < result.handover_s < result.device_s
        assert result.device_s == pytest.approx(sum(result.busy_s) + result.handover_s)

    def test_each_stage_holds_its_layers_and_its_end(self, run) -> None:
        """The first has the embedding, the last the norm and the head and a buffer of 48 hidden states."""
        layer = 2 * 32 * 32 + 2 * 16 * 32 + 96 + 3 * 64 * 32 + 160 + 2 * 32
        first, last = run("llama", pp=2, layers=(3, 1))[2]
        assert first.weights_bytes == 4 * (96 * 32 + 3 * layer + 8)
        assert last.weights_bytes == 4 * (96 * 32 + 1 * layer + 32 + 8)
        assert (first.kv_bytes, last.kv_bytes) == (3 * 2 * 4 * 2 * 64 * 8 * 4, 1 * 2 * 4 * 2 * 64 * 8 * 4)
        assert (first.pp_buffer_bytes, last.pp_buffer_bytes) == (0, 48 * 32 * 4)

    def test_a_tied_head_on_another_stage_is_held_twice(self, run) -> None:
        layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32
        first, last = run("llama-tied", pp=2)[2]
        assert first.weights_bytes == 4 * (96 * 32 + layer + 8)
        assert last.weights_bytes == 4 * (96 * 32 + layer + 32 + 8)


@pytest.mark.long
def test_both_together(alone, run) -> None:
    logits, result, memory = run("llama", tp=2, pp=2, layers=(3, 1))
    assert_close(logits, alone("llama"), ROUNDING)
    assert len(result.busy_s) == len(memory) == 4
    assert [rank.stage for rank in memory] == [0, 0, 1, 1]
