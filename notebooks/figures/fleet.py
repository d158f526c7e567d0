"""Figure 16 without load: 21 models deployed one after the other, until nothing of the next fits.

The real planner and placement on a cluster whose free memory shrinks with every deployment. Which 21 the paper
took is not given: here the six of its table 1 in turn, and, as the order may decide much, seeded shuffles of them.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from fingerprint.config import even_split
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from iserve.planning.pipeline import FitsOn, Hardware, PlanOptions, hypothetical_hardware, make_plan
from notebooks.figures.choices import METRICS, RULES, Rule
from notebooks.figures.figure import NOT_GIVEN, Chart, Figure, Finding, Table
from notebooks.figures.pairs import paired_estimator
from notebooks.figures.setting import GPU, INTENTS, NUM_GPUS, PAPER_ENGINE, WORKLOAD, estimator_of, spec_of
from placement.types import ClusterSnapshot, Placement
from planner.intent import Intent, IntentKind, Quality

__all__ = ["TWENTY_ONE", "Deployed", "Wish", "deploy_all", "figure_16", "order"]

GIB = 2**30
# The paper's table 1, from the top, in turn.
_TABLE_1 = ("falcon-7b", "falcon-40b", "gpt-j-6b", "Llama-2-7b-hf", "Llama-2-13b-hf", "Llama-2-70b-hf")
TWENTY_ONE = tuple(islice(cycle(_TABLE_1), 21))


@dataclass(frozen=True, slots=True)
class Deployed:
    """Model that found a place."""

    model: str
    estimate: Estimate
    placement: Placement

    @property
    def runtime_gib(self) -> float:
        """CUDA contexts and collectives' buffers on all its GPUs, which the roofline assumes."""
        return self.estimate.config.num_gpus * self.estimate.memory.runtime_bytes / GIB

    @property
    def is_uneven(self) -> bool:
        """True when its layers are split otherwise than as evenly as they can be."""
        layers = self.placement.layers_per_stage
        return sorted(layers) != sorted(even_split(sum(layers), len(layers)))


def order(seed: int) -> tuple[str, ...]:
    """The 21 in the order of table 1 (seed 0), or shuffled."""
    if seed == 0:
        return TWENTY_ONE
    return tuple(random.Random(seed).sample(TWENTY_ONE, len(TWENTY_ONE)))


Estimators = Callable[[str], RooflineEstimator]


@dataclass(frozen=True, slots=True)
class Wish:
    """Way in which one row deploys: by an intent, or by a rule; and what it believes of the models."""

    choose: IntentKind | Rule
    estimators: Estimators = estimator_of


def deploy_all(models: Sequence[str], wish: Wish) -> list[Deployed]:
    """Deploy models one after the other, each on what the ones before left; those for which nothing fits are
    skipped.
    """
    hardware = hypothetical_hardware(GPU, NUM_GPUS)
    found = []
    for model in models:
        deployed = _deploy(model, wish, hardware)
        if deployed is not None:
            found.append(deployed)
            hardware = _without(hardware, deployed.placement)
    return found


def _deploy(model: str, wish: Wish, hardware: Hardware) -> Deployed | None:
    estimator = wish.estimators(model)
    if isinstance(wish.choose, IntentKind):
        options = PlanOptions(
            intent=Intent(kind=wish.choose, quality=Quality.ANY), workload=WORKLOAD, policy="hybrid"
        )
        best = make_plan(spec_of(model), hardware, estimator, (PAPER_ENGINE,), options).best
        if best is None or best.estimate is None:
            return None
        assert isinstance(best.layout, Placement)
        return Deployed(model, best.estimate, best.layout)
    estimate = estimator.estimate(wish.choose(model), WORKLOAD)
    placed = FitsOn(hardware, PlanOptions(policy="hybrid"))(estimate)
    return Deployed(model, estimate, placed) if isinstance(placed, Placement) else None


def _without(hardware: Hardware, placement: Placement) -> Hardware:
    taken: Counter[str] = Counter()
    for stage in placement.stages:
        for device in stage.device_ids:
            taken[device] += stage.bytes_per_gpu
    gpus = tuple(replace(g, free_bytes=g.free_bytes - taken[g.device_id]) for g in hardware.snapshot.gpus)
    return replace(hardware, snapshot=ClusterSnapshot(gpus))


PAIRED = "min-latency, A100 pairs"  # with the all-reduces of ``pairs``
_PAPER_COUNTS = {
    IntentKind.MIN_LATENCY: 18,
    IntentKind.MIN_COST: 20,
    IntentKind.MIN_MEMORY: 21,
    IntentKind.MIN_GPU_HOURS: 21,
}


def figure_16(orders: int = 1) -> Figure:
    """Return how many of 21 models find a place, and their metrics, in table 1's order and ``orders - 1``
    shuffles.
    """
    wishes = {
        **{str(kind): Wish(kind) for kind in INTENTS},
        PAIRED: Wish(IntentKind.MIN_LATENCY, paired_estimator),
        **{name: Wish(rule) for name, rule in RULES.items()},
    }
    runs = {name: [deploy_all(order(seed), wish) for seed in range(orders)] for name, wish in wishes.items()}
    return Figure(
        number="16",
        title=f"21 models on 8 A6000, without load, {orders} order{'s' if orders > 1 else ''}",
        source="real planner and placement, roofline, the paper's engine and formats; table 1's six in turn",
        tables=(_deployed_table(runs), _configurations(runs), _left_out(runs)),
        charts=(
            Chart(
                "deployed of 21, mean over the orders",
                "models",
                tuple(runs),
                (("deployed", tuple(statistics.mean(len(run) for run in found) for found in runs.values())),),
            ),
        ),
        findings=_findings(runs),
    )


def _findings(runs: _Runs) -> tuple[Finding, ...]:
    papers = dict.fromkeys(runs, NOT_GIVEN) | {str(k): str(count) for k, count in _PAPER_COUNTS.items()}
    papers[PAIRED] = str(_PAPER_COUNTS[IntentKind.MIN_LATENCY])
    counts = {name: [len(run) for run in found] for name, found in runs.items()}
    uneven = Counter(name for name, found in runs.items() for run in found for d in run if d.is_uneven)
    return (
        *(Finding(f"{name}: deployed of 21", papers[name], _spread(counts[name])) for name in runs),
        Finding(
            "layers split unevenly to fit",
            "min-latency's last Falcon-7B: 10, 9, 7, 6 layers on 4 GPUs",
            _uneven(runs, uneven),
        ),
        *(
            Finding(
                f"least {METRICS[kind].name} over the models that all four intents deployed",
                str(kind),
                _best(runs, kind),
            )
            for kind in INTENTS
        ),
        Finding("cluster throughput", f"higher ({NOT_GIVEN})", "under load: figure 16-load"),
    )


_Runs = dict[str, list[list[Deployed]]]


def _spread(counts: Sequence[int]) -> str:
    """Return the first order's number, and between which numbers the orders lie."""
    return f"{counts[0]}" + (f" ({min(counts)} to {max(counts)} over {len(counts)} orders)" if counts[1:] else "")


def _mean(run: Sequence[Deployed], kind: IntentKind) -> float:
    return statistics.mean(METRICS[kind].of(d.estimate) for d in run)


def _deployed_table(runs: _Runs) -> Table:
    """Means over what was deployed; rows that deploy fewer leave out the last, and often the large, models."""
    rows: list[tuple[str | float, ...]] = [
        (
            name,
            statistics.mean(len(run) for run in all_runs),
            *(statistics.mean(_mean(run, kind) for run in all_runs) for kind in INTENTS),
            statistics.mean(sum(d.runtime_gib for d in run) for run in all_runs),
        )
        for name, all_runs in runs.items()
    ]
    columns = ("wish", "deployed", *(f"{METRICS[kind].name} a model" for kind in INTENTS), "runtimes GiB")
    return Table("means over the deployed models, then over the orders", columns, tuple(rows))


def _configurations(runs: _Runs) -> Table:
    """Return what was chosen in the first order."""
    rows = []
    for name, all_runs in runs.items():
        counts = Counter(
            (f"({d.estimate.config.tp},{d.estimate.config.pp})", str(d.estimate.config.weights))
            for d in all_runs[0]
        )
        rows += [(name, degree, weights, count) for (degree, weights), count in counts.most_common()]
    return Table("configurations, in table 1's order", ("wish", "(tp,pp)", "weights", "models"), tuple(rows))


def _left_out(runs: _Runs) -> Table:
    """Return which of the 21 found no place in the first order."""
    rows = []
    for name, all_runs in runs.items():
        missing = Counter(TWENTY_ONE) - Counter(d.model for d in all_runs[0])
        rows.append((name, ", ".join(f"{count} x {model}" for model, count in missing.items()) or "none"))
    return Table("found no place, in table 1's order", ("wish", "models"), tuple(rows))


def _uneven(runs: _Runs, uneven: Counter[str]) -> str:
    if not uneven:
        return "none"
    example = next(d for all_runs in runs.values() for run in all_runs for d in run if d.is_uneven)
    layers = ", ".join(map(str, example.placement.layers_per_stage))
    return ", ".join(f"{name} {count}" for name, count in uneven.items()) + f"; such as {example.model}: {layers}"


def _best(runs: _Runs, kind: IntentKind) -> str:
    """Return which intent is best in the metric of ``kind``, over each order's models that all four deployed."""
    winners: Counter[str] = Counter()
    for found in zip(*(runs[str(k)] for k in INTENTS), strict=True):
        placed = [dict(_indexed(run)) for run in found]
        shared = set.intersection(*(set(one) for one in placed))
        means = [statistics.mean(METRICS[kind].of(one[i].estimate) for i in sorted(shared)) for one in placed]
        own = means[INTENTS.index(kind)]
        winners[str(kind) if own <= min(means) * (1 + 1e-9) else str(INTENTS[means.index(min(means))])] += 1
    return (
        ", ".join(f"{name} in {count}" for name, count in winners.most_common()) + f" of {sum(winners.values())}"
    )


def _indexed(run: Sequence[Deployed]) -> list[tuple[tuple[str, int], Deployed]]:
    """Each deployment with its model and the how-manieth of it it is."""
    seen: Counter[str] = Counter()
    found = []
    for deployed in run:
        found.append(((deployed.model, seen[deployed.model]), deployed))
        seen[deployed.model] += 1
    return found
