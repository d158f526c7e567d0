"""Times of variants predicted from fingerprints against whole models: embedded engine, on this machine's CPU.

    python -m tests.bench.variant_costs OUT.json.gz [--rounds 15] [--seconds 60] [--models NAMES] [--kinds NAMES]

Each model is profiled as a deployment with variants would be (one and two layers, up to 4 distinct variants in a
burst); then the whole model runs the requests of ``CASES`` with 8 variants loaded, in interleaved rounds. The
cases were written down before the first result. The file has all that was measured; ``--print`` predicts and
prints what one holds.

``--cpu-time``: all runs, those of profiles included, are counted in the worker's seconds of CPU in place of the
clock's. On a machine whose cores are shared with other work the clock tells how much of that there was.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daemon.server import find_devices
from fingerprint.codec import from_json, to_json
from fingerprint.config import ADAPTER_RANKS, DeploymentConfig, SlotFormat, WeightFormat, Workload
from fingerprint.estimates import Quantity
from fingerprint.estimators.measured_variants import measured_cost
from fingerprint.families import load_spec
from fingerprint.measurements import Profile, RunReading
from fingerprint.model_spec import ModelSpec
from fingerprint.random_variants import write_random_variant
from fingerprint.trimmed_mean import locate
from fingerprint.truncate import generate, generate_dummy
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_profile import measure_variants, variant_plan
from iserve.demo import demo_model_path
from iserve.planning.estimator_factory import estimator_for
from tests.bench.whole_models import Case, Options, full_checkpoint, note, plan_of, take_profile, worker_target

LOADED = 8  # variants of the whole model, its slots
RANDOM = {  # 6 layers of 3.4 million parameters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
KINDS = {"8": VariantKind(8), "64": VariantKind(64), "int2": VariantKind(delta_format=SlotFormat.INT2)}
PROFILED = Workload(batch=8, input_tokens=64, output_tokens=33)  # as given to `iserve profile`
# What is judged: requests, and how many distinct variants they are for. Profiles have batches of 1 and 8 with 1
# and 4 variants at 64 tokens.
CASES: tuple[tuple[Workload, tuple[int, ...]], ...] = (
    (Workload(batch=8, input_tokens=64, output_tokens=33), (0, 1, 4, 8)),
    (Workload(batch=3, input_tokens=100, output_tokens=33), (0, 1, 3)),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Time that is judged."""

    model: str
    kind: str
    batch: int
    input_tokens: int
    active: int
    quantity: str  # "step" or "prompts"
    measured_s: float
    measured_half_s: float  # half of its 90% interval
    base_s: float  # the whole model's time before any variant was loaded
    predicted_s: float  # base by its profile, and variants
    low_s: float
    high_s: float
    predicted_added_s: float
    added_low_s: float
    added_high_s: float


def models(folder: Path, wanted: Sequence[str]) -> Iterator[Case]:
    work: dict[str, Any] = {"input_tokens": PROFILED.input_tokens, "output_tokens": PROFILED.output_tokens}
    work |= {"degrees": ((1, 1),), "weights": (WeightFormat.BITS16,)}
    if "demo" in wanted:
        yield Case(name="iserve-demo", directory=demo_model_path(), has_weights=True, **work)
    if "random" in wanted:
        config = folder / "llama-6x7MB"
        config.mkdir()
        (config / "config.json").write_text(json.dumps(RANDOM))
        yield Case(name=config.name, directory=config, has_weights=False, **work)


@dataclass(frozen=True, kw_only=True)
class WholeRuns:
    """Runs of the whole model, in rounds with those of the other requests."""

    workload: Workload
    active: int
    loaded: bool  # whether the variants were loaded by then
    short_s: tuple[float, ...]  # with one output token
    long_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """All that was measured of a model with one kind of variants."""

    profile: Profile
    measurement: VariantMeasurement
    whole: tuple[WholeRuns, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """Results of a run."""

    machine: dict[str, str]
    rounds: int
    cpu_time: bool
    judged: tuple[Judged, ...]


class CpuTimed:
    """Target or session whose runs are counted in the worker's seconds of CPU."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, *, tp: int, pp: int) -> CpuTimed:
        return CpuTimed(self._inner.open(tp=tp, pp=pp))

    def run(self, **burst: int) -> RunReading:
        return self._timed(self._inner.run, burst)

    def run_variants(self, **burst: int) -> RunReading:
        return self._timed(self._inner.run_variants, burst)

    def _timed(self, run: Callable[..., RunReading], burst: dict[str, int]) -> RunReading:
        before_s = self._cpu_s()
        reading = run(**burst)
        took_s = self._cpu_s() - before_s
        return replace(reading, e2e_s=took_s, device_s=took_s, host_s=0.0)

    def _cpu_s(self) -> float:
        tasks = Path(f"/proc/{self._inner._handle.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def judge(
    case: Case, folder: Path, kinds: Sequence[str], options: Options, rounds: int, *, cpu_time: bool
) -> Iterator[Judged]:
    spec = load_spec(case.directory)
    with worker_target(case.directory, folder, options.devices) as clocked:
        target: Any = CpuTimed(clocked) if cpu_time else clocked
        taken = take_profile(case, spec, target, folder, plan_of(case, spec, options))
        for name in kinds:
            measured = measure_variants(
                spec,
                lambda: target.open(tp=1, pp=1),
                partial(cut, case, folder),
                partial(variant, case, folder),
                variant_plan(spec, PROFILED, KINDS[name], budget_s=options.profile_s),
                progress=lambda p: note(f"{case.name}: {p.done} {p.running}", end="\r"),
            )
            if measured.failure:
                raise RuntimeError(measured.failure)
            found = whole(case, spec, target, folder, KINDS[name], rounds)
            yield Judged(profile=taken, measurement=measured, whole=found)


def cut(case: Case, folder: Path, layers: Sequence[int]) -> Path:
    path = folder / f"fingerprint-{'-'.join(map(str, layers))}"
    if not path.exists():
        if case.has_weights:
            generate(case.directory, path, layers)
        else:
            generate_dummy(case.directory, path, layers)
    return path


def variant(case: Case, folder: Path, layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
    base = cut(case, folder, layers) if len(layers) < 3 else full_checkpoint(case, folder)
    path = folder / f"variant-{len(layers)}-{kind.rank or kind.delta_format}-{number}"
    if not path.exists():
        write_random_variant(base, path, kind, number)
    return path, sum(file.stat().st_size for file in path.glob("*.safetensors"))


_Key = tuple[Workload, int, bool]


def whole(
    case: Case, spec: ModelSpec, target: Any, folder: Path, kind: VariantKind, rounds: int
) -> tuple[WholeRuns, ...]:
    """Run the whole model: before any variant is loaded, and with all of them."""
    session = target.open(tp=1, pp=1)
    try:
        variants = [variant(case, folder, range(spec.num_layers), kind, number) for number in range(LOADED)]
        session.load_with_slots(
            full_checkpoint(case, folder),
            num_layers=spec.num_layers,
            max_batch=max(work.batch for work, _ in CASES),
            max_context_tokens=max(work.context_tokens for work, _ in CASES),
            slots=LOADED,
            rank=kind.rank or ADAPTER_RANKS[0],
            delta_mib=2 * max(size for _, size in variants) // 2**20 + 1 if kind.is_delta else 0,
        )
        before = run_rounds(session, [(work, 0, False) for work, _ in CASES], rounds)
        session.load_variants([path for path, _ in variants])
        return before + run_rounds(session, [(work, a, True) for work, actives in CASES for a in actives], rounds)
    finally:
        session.close()


def run_rounds(session: Any, keys: Sequence[_Key], rounds: int) -> tuple[WholeRuns, ...]:
    found: dict[_Key, tuple[list[float], list[float]]] = {key: ([], []) for key in keys}
    for number in range(rounds + 1):  # the first warms up
        for work, active, loaded in keys if number % 2 else keys[::-1]:
            for index, outputs in enumerate((1, work.output_tokens)):
                reading = session.run_variants(
                    batch=work.batch, input_tokens=work.input_tokens, output_tokens=outputs, active=active
                )
                if number:
                    found[work, active, loaded][index].append(reading.e2e_s)
    return tuple(
        WholeRuns(workload=work, active=active, loaded=loaded, short_s=tuple(short), long_s=tuple(long))
        for (work, active, loaded), (short, long) in found.items()
    )


def compared(judged: Judged) -> Iterator[Row]:
    """Predict, and set next to what was measured."""
    spec, kind = judged.profile.spec, judged.measurement.kind
    base = estimator_for(judged.profile)
    config = DeploymentConfig(
        adapter_slots=LOADED, adapter_rank=kind.rank or ADAPTER_RANKS[0], delta_mib=int(kind.is_delta)
    )
    cost = measured_cost([judged.measurement], spec.num_layers, config)
    assert cost is not None
    before = {one.workload: readings(one) for one in judged.whole if not one.loaded}
    for runs in (one for one in judged.whole if one.loaded):
        work, active, now = runs.workload, runs.active, readings(runs)
        alone = base.estimate(config.without_slots, work)
        for quantity, of_base, added in (
            ("prompts", alone.ttft_s, prompts(cost, work, active)),
            ("step", alone.tpot_s, cost.step_s(work.batch, active)),
        ):
            yield Row(
                model=judged.profile.model,
                kind=str(kind),
                batch=work.batch,
                input_tokens=work.input_tokens,
                active=active,
                quantity=quantity,
                measured_s=now[quantity][0],
                measured_half_s=now[quantity][1],
                base_s=before[work][quantity][0],
                predicted_s=of_base.value + added.value,
                low_s=of_base.low + added.low,
                high_s=of_base.high + added.high,
                predicted_added_s=added.value,
                added_low_s=added.low,
                added_high_s=added.high,
            )


def prompts(cost: Any, work: Workload, active: int) -> Quantity:
    found: Quantity = cost.prompts_s(work, 0.0, 0.0 if active else 1.0, float(active))
    return found


def readings(runs: WholeRuns) -> dict[str, tuple[float, float]]:
    """Return median and half of the 90% interval of prompts and of a step."""
    steps = runs.workload.output_tokens - 1
    paired = [(b - a) / steps for a, b in zip(runs.short_s, runs.long_s, strict=True)]
    return {
        "prompts": (float(np.median(runs.short_s)), locate(runs.short_s).half_width),
        "step": (float(np.median(paired)), locate(paired).half_width),
    }


def machine() -> dict[str, str]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "cores": str(os.cpu_count()),
        "load average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def show(document: Document) -> None:
    """Print one line for each case: times in ms, predictions with their 90% intervals."""
    rows = [row for judged in document.judged for row in compared(judged)]
    print("| model | variants | requests | active | step | predicted | added | predicted | prompts | predicted |")
    print("|---|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for of_prompts, step in zip(rows[::2], rows[1::2], strict=True):
        added = step.measured_s - step.base_s
        print(
            f"| {step.model} | {step.kind} | {step.batch} x {step.input_tokens} | {step.active} "
            f"| {_measured(step)} | {_ends(step.predicted_s, step.low_s, step.high_s)} "
            f"| {1e3 * added:.1f} | {_ends(step.predicted_added_s, step.added_low_s, step.added_high_s)} "
            f"| {_measured(of_prompts)} | {_ends(of_prompts.predicted_s, of_prompts.low_s, of_prompts.high_s)} |"
        )
    for quantity in ("step", "prompts"):
        found = summary([row for row in rows if row.quantity == quantity])
        print(f"{quantity}: {found.within} of {found.number} within; median error {found.error:.0%}")
        print(f"added: {found.added_within} of {found.added_number} within; median error {found.added_error:.0%}")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of predictions of one quantity, and how many measured times lie in their intervals."""

    number: int
    within: int
    error: float  # the median, of what was measured
    added_number: int  # with variants
    added_within: int
    added_error: float


def summary(rows: Sequence[Row]) -> Summary:
    added = [(row, row.measured_s - row.base_s) for row in rows if row.active]
    return Summary(
        number=len(rows),
        within=sum(row.low_s <= row.measured_s <= row.high_s for row in rows),
        error=float(np.median([abs(row.predicted_s / row.measured_s - 1) for row in rows])),
        added_number=len(added),
        added_within=sum(row.added_low_s <= measured_s <= row.added_high_s for row, measured_s in added),
        added_error=float(np.median([abs(row.predicted_added_s / measured_s - 1) for row, measured_s in added])),
    )


def _measured(row: Row) -> str:
    return f"{1e3 * row.measured_s:.1f} ± {1e3 * row.measured_half_s:.1f}"


def _ends(value: float, low: float, high: float) -> str:
    return f"{1e3 * value:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", default="demo,random")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--share", type=int, default=0, help="of the two that the CPU is cut into")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    if not given.print:
        devices = (find_devices(2).devices[given.share],)
        options = Options(profile_s=given.seconds, repeats=given.rounds, devices=devices, batches=(1, 8))
        judged: tuple[Judged, ...] = ()
        with tempfile.TemporaryDirectory() as root:
            for case in models(Path(root), given.models.split(",")):
                folder = Path(root) / f"work-{case.name}"
                folder.mkdir()
                kinds = given.kinds.split(",")
                for found in judge(case, folder, kinds, options, given.rounds, cpu_time=given.cpu_time):
                    judged += (found,)
                    document = Document(
                        machine=machine(), rounds=given.rounds, cpu_time=given.cpu_time, judged=judged
                    )
                    given.out.write_bytes(gzip.compress(to_json(document), mtime=0))
    show(from_json(gzip.decompress(given.out.read_bytes()), Document))


if __name__ == "__main__":
    main()
