"""Predictions and measurements: what counts as inside, what is not reported, and how it reads in a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.status import WorkerStats
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Correction, Estimate, MemoryEstimate, Quantity, Source
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.model_spec import LayerShape
from fingerprint.verification import Reading, SingleRequest, Verification
from iserve.cli.verify import print_verification
from iserve.verify.documents import MetricDocument, VerificationDocument, kv_room_tokens, verification_document
from tests.fingerprint.synthetic_machine import llama
from tests.golden_words import Golden

MIB = 2**20
WORK = Workload(batch=2, input_tokens=64, output_tokens=16)
CONFIG = DeploymentConfig()
SPEC = WorkerSpec(
    worker_id="verify-1",
    served_model="verify",
    checkpoint="/m",
    config=CONFIG,
    stages=(StageAssignment(device_ids=("GPU-a",), num_layers=4),),
    limits=WorkerLimits(
        max_batch=2, max_batched_tokens=128, max_context_tokens=80, kv_tokens=160, memory_bytes_per_device=MIB
    ),
)
PREDICTED = Estimate(
    config=CONFIG,
    workload=WORK,
    memory=MemoryEstimate(
        tp=1,
        pp=1,
        num_layers=4,
        layer_weight_bytes=20 * MIB,
        layer_kv_bytes=1 * MIB,
        first_stage_bytes=10 * MIB,
        last_stage_bytes=0,
        activation_bytes=2 * MIB,
        pp_buffer_bytes=0,
        runtime_bytes=4 * MIB,
        relative_error=0.1,
        source=Source.SCALED,
    ),  # 100 MiB
    ttft_s=Quantity(0.1, 0.08, 0.12, Source.EXTRAPOLATED),
    tpot_s=Quantity(0.01, 0.009, 0.011, Source.SCALED),
)
CHECK = Verification(
    config=CONFIG,
    workload=WORK,
    launch_workload=WORK,
    layers_per_stage=(4,),
    measured_at="2026-11-21T10:00:00+00:00",
    ttft_s=Reading(value=0.12, low=0.11, high=0.13, repeats=7),
    tpot_s=Reading(value=0.012, low=0.0119, high=0.0121, repeats=7),
    memory_bytes_per_gpu=105 * MIB,
    kv_tokens=176,
)
STATS = WorkerStats(
    model="verify",
    running=0,
    waiting=0,
    kv_tokens_total=176,
    kv_tokens_free=176,
    prompt_tokens=0,
    output_tokens=0,
    steps=0,
    busy=(),
    memory=(),
    kv_block_tokens=16,
)


class Uncorrected:
    """Predicts the same of everything: no check has corrected it."""

    name = "uncorrected"

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        return replace(PREDICTED, config=config, workload=workload)


def document(
    check: Verification = CHECK, predicted: Estimate = PREDICTED, stats: WorkerStats | None = STATS
) -> VerificationDocument:
    return verification_document(
        check,
        predicted,
        base=Uncorrected(),
        model="m",
        deployment=None,
        hardware="1 x h200",
        spec=SPEC,
        stats=stats,
        memory_how="counted",
        notes=("a note",),
    )


def figures(found: VerificationDocument) -> dict[str, MetricDocument]:
    return {metric.name: metric for metric in found.metrics}


def test_each_figure_is_measured_over_predicted_and_inside_or_not(golden: Golden) -> None:
    found = figures(document())
    errors = {name: metric.error for name, metric in found.items()}
    assert errors == {
        "ttft_s": pytest.approx(0.2),
        "tpot_s": pytest.approx(0.2),
        "memory_bytes_per_gpu": pytest.approx(0.05),
        "kv_tokens": pytest.approx(0.1),
    }
    inside = {name: metric.within_interval for name, metric in found.items()}
    assert inside == {"ttft_s": True, "tpot_s": False, "memory_bytes_per_gpu": True, "kv_tokens": True}
    memory = found["memory_bytes_per_gpu"]
    assert (memory.predicted, memory.low, memory.high) == (100 * MIB, 90 * MIB, pytest.approx(110 * MIB))
    golden("reports", found["kv_tokens"].method)


def test_a_worker_with_larger_graphs_teaches_as_any() -> None:
    """Graphs of a mixture on vLLM."""
    assert document(replace(CHECK, graph_tokens=4096)) == document()


def test_a_cache_smaller_than_was_ordered_is_outside() -> None:
    assert figures(document(replace(CHECK, kv_tokens=159)))["kv_tokens"].within_interval is False
    assert figures(document(replace(CHECK, kv_tokens=160)))["kv_tokens"].within_interval is True


def test_what_nobody_reports_is_not_made_up(golden: Golden) -> None:
    blind = replace(CHECK, memory_bytes_per_gpu=None, kv_tokens=None, tpot_s=None)
    found = figures(document(blind, stats=None))
    assert "tpot_s" not in found
    for name in ("memory_bytes_per_gpu", "kv_tokens"):
        metric = found[name]
        assert (metric.measured, metric.error, metric.within_interval, metric.repeats) == (None, None, None, 0)
    golden("reports", found["kv_tokens"].method)


def vague(reading: Reading | None) -> Reading:
    """The same with an interval that holds all that was predicted, and more."""
    assert reading is not None
    return replace(reading, low=reading.value / 10, high=reading.value * 10)


ALONE = SingleRequest(workload=replace(WORK, batch=1), ttft_s=CHECK.ttft_s, tpot_s=CHECK.tpot_s)
VAGUE_ALONE = replace(ALONE, ttft_s=vague(CHECK.ttft_s), tpot_s=vague(CHECK.tpot_s))
IN = "in `iserve plan` and `report` until `iserve verify ./m --forget`"
VAGUE = "not corrected, for what was read is less certain than what was predicted: "


@pytest.mark.parametrize(
    ("check", "told"),
    [
        pytest.param(CHECK, [f"kept: it corrects TTFT, TPOT, memory {IN}"], id="all"),
        pytest.param(
            replace(CHECK, ttft_s=vague(CHECK.ttft_s)),
            [f"kept: it corrects TPOT, memory {IN}", f"{VAGUE}TTFT"],
            id="a vague reading",
        ),
        pytest.param(
            replace(CHECK, ttft_s=vague(CHECK.ttft_s), tpot_s=vague(CHECK.tpot_s), memory_bytes_per_gpu=None),
            ["kept until `iserve verify ./m --forget`, but it corrects nothing", f"{VAGUE}TTFT, TPOT"],
            id="nothing",
        ),
        pytest.param(
            replace(CHECK, memory_bytes_per_gpu=None, single_request=ALONE),
            [f"kept: it corrects TTFT, TPOT {IN}"],
            id="one request alone too, no memory",
        ),
        pytest.param(
            replace(CHECK, single_request=VAGUE_ALONE),
            [
                f"kept: it corrects TTFT of the full batch, TPOT of the full batch, memory {IN}",
                f"{VAGUE}TTFT of one request alone, TPOT of one request alone",
            ],
            id="only the full batch",
        ),
        pytest.param(
            replace(CHECK, tpot_s=vague(CHECK.tpot_s), single_request=ALONE),
            [
                f"kept: it corrects TTFT, TPOT of one request alone, memory {IN}",
                f"{VAGUE}TPOT of the full batch",
            ],
            id="only one request alone",
        ),
        pytest.param(
            replace(CHECK, tpot_s=None, single_request=replace(ALONE, tpot_s=None)),
            [f"kept: it corrects TTFT, memory {IN}"],
            id="one output token",
        ),
    ],
)
def test_what_is_kept_says_what_it_corrects(
    check: Verification, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """And that is what the next estimate then does."""
    found = document(check)
    print_verification(found, "./m")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith(" ".join(told))
    after = CorrectedEstimator(Uncorrected(), (check,)).estimate(CONFIG, WORK)
    changed = {
        "ttft_s": after.ttft_s != PREDICTED.ttft_s,
        "tpot_s": after.tpot_s != PREDICTED.tpot_s,
        "memory_bytes_per_gpu": after.memory != PREDICTED.memory,
        "kv_tokens": False,
    }
    assert {name: metric.corrects for name, metric in figures(found).items()} == {
        name: changed[name] for name in figures(found)
    }


@pytest.mark.parametrize(("more", "corrects"), [(0, False), (1024, False), (-1024, False), (MIB // 10, True)])
def test_memory_that_is_as_predicted_is_not_named_as_corrected(
    more: int, corrects: bool, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    found = document(replace(CHECK, memory_bytes_per_gpu=100 * MIB + more))
    assert figures(found)["memory_bytes_per_gpu"].corrects is corrects
    print_verification(found, "./m")
    said = " ".join(capsys.readouterr().out.split())
    assert f"TTFT, TPOT{', memory' if corrects else ''} {IN}" in said
    golden("reports", said)


def test_it_reads_as_a_table(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    before = Correction(
        measured_at="2026-11-20T09:08:07+00:00",
        config=CONFIG,
        workload=WORK,
        exact=True,
        ttft_log_ratio=0.0,
        tpot_log_ratio=-0.6931471805599453,
        memory_bytes=-3 * MIB,
    )
    print_verification(
        document(replace(CHECK, kv_tokens=None), replace(PREDICTED, correction=before), None), "./m"
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    golden("reports", lines[0])
    golden("reports", " ".join(lines[2].split()))
    assert lines[3].split()[-2:] == ["+20.0%", "no"]
    golden("reports", " ".join(lines[4].split()))
    assert lines[5].split()[-2:] == ["not", "reported"]
    rest = " ".join(lines[6:])
    golden("reports", rest)


def test_blocks_of_states_are_no_room_for_tokens() -> None:
    """vLLM reports blocks of 16 tokens where each is the state of a sequence."""
    model = llama(4)
    state = LayerShape(mixer="mamba2", params=1, linear_params=1, kv_elements=0, state_bytes=2**20)
    alone = replace(model, layer_shapes=(state,), layer_shape_indexes=(0,) * 4)
    assert kv_room_tokens(STATS, model) == STATS.kv_tokens_total
    assert kv_room_tokens(STATS, alone) is None
    assert kv_room_tokens(None, model) is None
