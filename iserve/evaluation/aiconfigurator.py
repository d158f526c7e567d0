"""AIConfigurator's recommendations as a contestant: questions put to it, answers recorded, replicas placed.

It is asked for one deployment at a time, on that deployment's part of the GPUs, and says nothing of models that
share GPUs: places and KV room are those of the strong rule. It is not run here; ``tests/bench`` has the scripts
that asked it.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, NotFoundError
from iserve.evaluation.rules import configs_by_tp, spread
from iserve.evaluation.situation import Asked, Decision, Situation
from iserve.evaluation.sizing import Spot, size_together
from placement.policies import LeastLoaded
from planner.intent import IntentKind

__all__ = [
    "ANSWERS",
    "Advice",
    "Answer",
    "Question",
    "Recommended",
    "RecordedAnswers",
    "gpu_parts",
    "questions",
    "read_answers",
]

ANSWERS = "aiconfigurator.json.gz"  # in the folder of a world that names no file
_ALIKE = 1.1  # limits and rates that differ by less are the same question


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Question put to AIConfigurator about one deployment.

    ``request_latency_ms``: limit on its mean request; None: AIConfigurator's own limits. ``tightest``: the
    tightest limit that can be kept is looked for, from that one down.
    """

    gpu: str
    model: str  # hash of its shape
    input_tokens: int
    output_tokens: int
    gpus: int
    request_latency_ms: float | None = None
    rate_per_s: float | None = None
    tightest: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Recommendation with AIConfigurator's own figures.

    ``gpus``: GPUs of all replicas; ``limit_ms``: the limit that it keeps by its figures.
    """

    gpus: int
    tp: int
    pp: int
    replicas: int
    batch: int
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    tokens_per_s_per_gpu: float
    limit_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer: advice, or the reason for none in AIConfigurator's words."""

    question: Question
    advice: Advice | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecordedAnswers:
    """All answers of one run. ``as_llama``: reasons of refusal of models that were asked for as a Llama."""

    aiconfigurator: str
    backend: str
    date: str
    machine: str
    seconds: float
    as_llama: Mapping[str, str]
    answers: tuple[Answer, ...]

    @cached_property
    def _by_lengths(self) -> dict[tuple[object, ...], list[Answer]]:
        found: dict[tuple[object, ...], list[Answer]] = {}
        for answer in self.answers:
            found.setdefault(_without_numbers(answer.question), []).append(answer)
        return found

    def answer(self, question: Question) -> Answer:
        """Return the answer to ``question``; one without advice where it was not asked."""
        for one in self._by_lengths.get(_without_numbers(question), ()):
            own = one.question
            if _alike(own.request_latency_ms, question.request_latency_ms) and _alike(
                own.rate_per_s, question.rate_per_s
            ):
                return one
        return Answer(question=question, reason="AIConfigurator was not asked for this model, load and GPU")


def _without_numbers(question: Question) -> tuple[object, ...]:
    of = question
    return (of.gpu, of.model, of.input_tokens, of.output_tokens, of.gpus, of.tightest)


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return max(one, other) <= _ALIKE * min(one, other)


def read_answers(path: Path) -> RecordedAnswers:
    """Return the answers in a file.

    Raises:
        NotFoundError: it cannot be read.
        BadInputError: it holds no such answers.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"AIConfigurator's answers {path} cannot be read: {error.strerror}") from error
    try:
        text = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise BadInputError(f"AIConfigurator's answers {path} are no gzip file: {error}") from error
    return from_json(text, RecordedAnswers, what=str(path))


def gpu_parts(situation: Situation, there: int) -> dict[str, int]:
    """Return how many GPUs AIConfigurator is given for each deployment that is asked for.

    Each has an equal part, a power of two. The largest models have twice that while GPUs are left.

    Args:
        there: the number of deployments that run.
    """
    gpus, expected = len(situation.cluster.gpus), max(situation.expected, there + len(situation.asked))
    part = 2 ** int(math.log2(max(1, gpus // expected)))
    more = max(0, (gpus - part * expected) // part - there)
    by_size = sorted(situation.asked, key=lambda asked: -asked.model.spec.num_params)
    return {asked.name: part * (2 if place < more else 1) for place, asked in enumerate(by_size)}


def questions(situation: Situation, there: int) -> dict[str, Question]:
    """Return what AIConfigurator is asked for each deployment, by the intent and by what is known of the load.

    For least cost and fewest GPU hours: its own limits, and the rate where that is known. For an SLO: that of the
    mean request. For least latency: the tightest limit on it, where there are GPUs to choose among.
    """
    parts, found = gpu_parts(situation, there), {}
    for asked in situation.asked:
        load, part = asked.model.options.workload, parts[asked.name]
        limited = situation.intent in (IntentKind.MIN_LATENCY, IntentKind.LATENCY_SLO)
        tightest = situation.intent is IntentKind.MIN_LATENCY and part > 1
        rate = asked.rate_per_s if tightest or not limited else None
        assert asked.slo.e2e_s is not None, "a world's SLO is of the E2E"
        found[asked.name] = Question(
            gpu=situation.gpu.name,
            model=asked.model.spec.shape_hash,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            gpus=part,
            request_latency_ms=_rounded(1e3 * asked.slo.e2e_s) if limited else None,
            rate_per_s=None if rate is None else _rounded(rate),
            tightest=tightest,
        )
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, slots=True)
class Recommended:
    """Contestant that places what AIConfigurator recommends (implements ``Contestant``).

    One replica of each deployment, the largest first, then further ones in turn, on the least used GPUs that have
    room and no replica of the same deployment.
    """

    name: str
    answers: RecordedAnswers | None

    def __call__(self, situation: Situation) -> Decision:
        if self.answers is None:
            none = "there is no recording of AIConfigurator's answers"
            return Decision(reasons=tuple(f"{asked.name}: {none}" for asked in situation.asked))
        there = len({replica.deployment for replica in situation.running})
        later = situation.expected > there + len(situation.asked)
        wanted, counts, reasons = list[tuple[Asked, DeploymentConfig]](), dict[str, int](), list[str]()
        asked_for = questions(situation, there)
        for asked in situation.asked:
            answer = self.answers.answer(asked_for[asked.name])
            advice, configs = answer.advice, configs_by_tp(asked, situation)
            if advice is None:
                reasons.append(f"{asked.name}: {answer.reason}")
                continue
            config = configs.get(advice.tp)
            if config is None or advice.pp > 1 or config.weights is not asked.model.spec.as_given:
                reasons.append(f"{asked.name}: tp={advice.tp}, pp={advice.pp} as stored is not deployed here")
                continue
            wanted.append((asked, config))
            part = asked_for[asked.name].gpus  # which it keeps to where room is left to those expected
            counts[asked.name] = min(advice.replicas, max(1, part // advice.tp)) if later else advice.replicas
        spots, missing = spread(situation, wanted, None, LeastLoaded())
        reasons += [f"{name}: no GPU has room for it" for name in missing]
        there_now = [(asked, config) for asked, config in wanted if asked.name not in missing]
        spots = _with_more(situation, spots, there_now, counts)
        return Decision(replicas=size_together(situation, spots) or (), reasons=tuple(reasons))


def _with_more(
    situation: Situation,
    spots: list[Spot],
    wanted: list[tuple[Asked, DeploymentConfig]],
    counts: Mapping[str, int],
) -> list[Spot]:
    """Return ``spots`` with further replicas in turn, as many of ``counts`` as there is room for."""
    everywhere = frozenset((gpu.node_id, gpu.device_id) for gpu in situation.cluster.gpus)
    left = [(asked, config) for asked, config in wanted if counts[asked.name] > 1]
    while left:
        again = []
        for asked, config in left:
            own = {device for spot in spots if spot.asked is asked for device in spot.devices}
            spots, missing = spread(
                situation, [(asked, config)], None, LeastLoaded(), spots, only=everywhere - own
            )
            placed = sum(spot.asked is asked for spot in spots)
            if not missing and placed < counts[asked.name]:
                again.append((asked, config))
        left = again
    return spots
