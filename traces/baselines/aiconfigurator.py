"""Choices of AIConfigurator, from answers recorded beforehand: it is not run here.

The answers are those of ``tests/bench/aiconfigurator_static.py`` (AIConfigurator 0.12.0, mode ``static``). Its
choice among the configurations that it answered for is made by iServe's own ranking from its own figures, memory
too, so that every kind of intent can be asked. Where the recording has no answer for just this model, GPU, engine
and workload, there is no choice: nothing is interpolated in AIConfigurator's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity, Source
from fingerprint.gpu_spec import GpuSpec
from planner.intent import Intent
from planner.plan import Candidate, NoRoom
from planner.rank import rank
from traces.baselines.model_info import Knowledge

__all__ = ["AIC_BACKENDS", "AIC_SYSTEMS", "Answer", "Point", "Recording", "read_recording"]

AIC_SYSTEMS: Mapping[str, str] = {
    "a100-40gb-sxm": "a100_sxm",  # the same chip; what fits is judged by the card's own memory
    "a100-80gb-sxm": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "l40s": "l40s",
}
AIC_BACKENDS: Mapping[str, str] = {"tensorrt-llm": "trtllm", "vllm": "vllm"}

_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Question put to AIConfigurator.

    Formats are iServe's names; ``mode`` is ``static`` (one batch at once) or ``agg``.
    """

    model: str
    system: str
    backend: str
    mode: str
    tp: int
    pp: int
    weights: str
    kv: str
    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """``reason``: why it predicted nothing. Memory is of one GPU, itemised, in GiB; ``fits`` its own verdict."""

    point: Point
    version: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens_per_s: float | None = None
    memory_gib: Mapping[str, float] | None = None
    fits: bool | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """All answers of one run."""

    aiconfigurator: str  # its version
    date: str
    python: str
    wall_s: float
    answers: tuple[Answer, ...]

    def order(self, model: Knowledge, label: str, gpu: GpuSpec, intent: Intent) -> tuple[DeploymentConfig, ...]:
        """Return the configurations that keep the intent's limits by its figures, its choice first; none: no
        answer.

        Args:
            label: the model's name as it was asked, or the last part of it.
        """
        seen = dict(self._estimates(model, label, gpu))
        candidates = [Candidate(config, estimate) for config, estimate in seen.items()]
        plan = rank(candidates, intent, fits=lambda estimate: _fits(estimate, gpu))
        return tuple(ranked.config for ranked in plan.candidates if ranked.feasible)

    def _estimates(
        self, model: Knowledge, label: str, gpu: GpuSpec
    ) -> Iterable[tuple[DeploymentConfig, Estimate]]:
        own = {
            answer.point: answer
            for answer in self.answers
            if answer.point.model.rpartition("/")[2].lower() == label.rpartition("/")[2].lower()
            and answer.point.mode == "static"
            and answer.point.system == AIC_SYSTEMS.get(gpu.name)
            and answer.fits
        }
        by_question = {_question(point): answer for point, answer in own.items()}
        workload = model.workload
        for config in model.configs:
            key = (
                AIC_BACKENDS.get(config.engine), config.tp, config.pp, config.weights, config.kv,
                workload.batch, workload.input_tokens, workload.output_tokens,
            )  # fmt: skip
            answer = by_question.get(key)
            if answer is not None and answer.ttft_s and answer.tpot_s and answer.memory_gib:
                yield config, _estimate(config, model, answer.ttft_s, answer.tpot_s, answer.memory_gib["total"])


def read_recording(data: bytes, what: str) -> Recording:
    """Return the recording in ``data``. Raises BadInputError: it is not such a recording."""
    return from_json(data, Recording, what=what)


def _question(point: Point) -> tuple[object, ...]:
    return (
        point.backend, point.tp, point.pp, point.weights, point.kv,
        point.batch, point.input_tokens, point.output_tokens,
    )  # fmt: skip


def _estimate(
    config: DeploymentConfig, model: Knowledge, ttft_s: float, tpot_s: float, total_gib: float
) -> Estimate:
    memory = MemoryEstimate(
        tp=config.tp,
        pp=config.pp,
        num_layers=model.spec.num_layers,
        layer_weight_bytes=0,
        layer_kv_bytes=0,
        first_stage_bytes=0,
        last_stage_bytes=0,
        activation_bytes=0,
        pp_buffer_bytes=0,
        runtime_bytes=int(total_gib * _GIB),  # of each GPU: its items are not divided further
        relative_error=0.0,
        source=Source.ROOFLINE,
    )
    ttft, tpot = (Quantity(value, value, value, Source.ROOFLINE) for value in (ttft_s, tpot_s))
    return Estimate(config=config, workload=model.workload, memory=memory, ttft_s=ttft, tpot_s=tpot)


@dataclass(frozen=True, slots=True)
class _Idle:
    """On idle GPUs, as it takes them to be; where there is room now is for the placer."""

    layers_per_stage: tuple[int, ...]


def _fits(estimate: Estimate, gpu: GpuSpec) -> _Idle | NoRoom:
    memory = estimate.memory
    layers = tuple(memory.num_layers // memory.pp for _ in range(memory.pp))
    over = memory.runtime_bytes - gpu.memory_bytes
    if over > 0:
        return NoRoom(f"it predicts {memory.runtime_bytes / _GIB:.2f} GiB on each GPU", over)
    return _Idle(layers)
