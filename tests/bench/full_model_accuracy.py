"""How far L2 and M2 are from real full models on this machine: its CPU as two devices, or its GPUs.

Run: ``python -m tests.bench.full_model_accuracy [--json FILE] [--seconds S] [--repeats N] [--model NAME]
[--gpu]``.

Two models: the bundled demo, and a random-weight Llama of 16 layers of 25 MB, where the effect of a layer is far
above the noise; ``wide``, for GPUs, is of Llama-2-7B's width and 16 layers; ``kinds`` are a Gemma 3 and a
GPT-OSS of random weights, whose layers look back differently. Each is profiled by its fingerprints
through the real worker, as a deployment would do it; then the whole model is loaded into the same worker and timed
at every (tp, pp, format, batch). TTFT is the time of one token, TPOT the difference of two output lengths over the
tokens between. The prediction is for a longer output than the fingerprints were run with. Fingerprint and
full-model runs do not interleave: a machine that changes its speed between them shows as error, so run it when
nothing else does; the load average is recorded.

The record is kept in iServe's home (``ISERVE_HOME``), where ``iserve report MODEL`` finds it by the model's shape
and the machine; ``--json`` writes it to a file as well, which ``iserve report MODEL --truth FILE`` takes anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from daemon.devices import Device
from daemon.engines.base import WorkerLimits, WorkerSpec
from daemon.engines.torch import TorchEngine
from daemon.profile_client import WorkerProfileSession, WorkerProfileTarget
from daemon.server import find_devices
from daemon.torch_engine.rank_device import CORES_VARIABLE
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.estimates import Quantity
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.l2 import key_of
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS, RooflineEstimator
from fingerprint.families import load_spec
from fingerprint.generate import generate, generate_dummy
from fingerprint.measurements import Profile
from fingerprint.profile import ProfileProgress, profile
from fingerprint.profile_plan import default_plan
from fingerprint.report import AccuracyRecord, AccuracyRow
from fingerprint.robust import locate
from iserve.accuracy_store import store_accuracy
from iserve.demo import demo_model_path
from iserve.settings import load_settings

ROOT = Path(__file__).parents[2]
DEGREES = ((1, 1), (2, 1), (1, 2))
FORMATS = (WeightFormat.BITS16, WeightFormat.INT8)
BATCHES = (1, 4)
STOP_S = 20.0

LLAMA = {  # 16 layers of 12.8 million parameters: 25 MB each in bfloat16
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


WIDE = LLAMA | {  # 16 of the layers of Llama-2-7B: 405 MB each
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


GEMMA = LLAMA | {  # 12 layers of 25 MB, of which the 6th and the 12th look all the way back
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
GPT_OSS = LLAMA | {  # 8 layers of 8 experts, 53 MB, a token of which reads 2; every second looks all the way back
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and the requests it is judged on."""

    name: str
    directory: Path
    has_weights: bool
    input_tokens: int
    output_tokens: int  # of the predicted workload; the fingerprints ran at most 17
    weights: tuple[WeightFormat, ...] = FORMATS
    degrees: tuple[tuple[int, int], ...] = DEGREES


@dataclass(frozen=True, kw_only=True)
class Options:
    profile_s: float
    repeats: int
    devices: tuple[Device, ...]
    batches: tuple[int, ...] = BATCHES

    def degrees_of(self, case: Case) -> tuple[tuple[int, int], ...]:
        return tuple((tp, pp) for tp, pp in case.degrees if tp * pp <= len(self.devices))


class WorkerProcess:
    """``daemon.profile_client.WorkerHandle`` on a child process, which gets its devices as from the daemon."""

    def __init__(self, spec: WorkerSpec, folder: Path, devices: tuple[Device, ...]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            spec = replace(spec, port=probe.getsockname()[1])
        folder.mkdir()
        (folder / "spec.json").write_bytes(to_json(spec))
        command = TorchEngine().command(spec, folder, {})
        self.url = f"http://127.0.0.1:{spec.port}"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            environment = os.environ | dict(command.env) | device_environment(spec, devices)
            self._process = subprocess.Popen(command.argv, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def failure(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"exit code {code}: {self._log.read_text(errors='replace')[-500:]}"

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def device_environment(spec: WorkerSpec, devices: tuple[Device, ...]) -> dict[str, str]:
    used = [device_id for stage in spec.stages for device_id in stage.device_ids]
    if devices[0].kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": ",".join(used)}
    return {CORES_VARIABLE: ";".join(f"{d.device_id}={','.join(map(str, d.cores))}" for d in devices)}


@contextmanager
def worker_target(checkpoint: Path, folder: Path, devices: tuple[Device, ...]) -> Iterator[WorkerProfileTarget]:
    limits = WorkerLimits(
        max_batch=1,
        max_batched_tokens=DEFAULT_MAX_BATCHED_TOKENS,
        max_context_tokens=1024,
        kv_tokens=1024,
        memory_bytes_per_device=int(0.8 * devices[0].total_bytes),
    )
    launched = iter(range(10_000))

    def launch(spec: WorkerSpec) -> WorkerProcess:
        return WorkerProcess(spec, folder / f"worker-{next(launched)}", devices)

    ids = [device.device_id for device in devices]
    with WorkerProfileTarget(launch, checkpoint=checkpoint, device_ids=ids, limits=limits) as target:
        yield target


# Profile and truth


def take_profile(case: Case, target: WorkerProfileTarget, folder: Path, options: Options) -> Profile:
    """The default plan of a deployment, for the larger batch."""
    spec = load_spec(case.directory)
    workload = Workload(max(options.batches), case.input_tokens, case.output_tokens)
    degrees = options.degrees_of(case)
    plan = default_plan(spec, workload, weights=case.weights, degrees=degrees, budget_s=options.profile_s)

    def fingerprint(layers: Sequence[int]) -> Path:
        path = folder / f"fingerprint-{'-'.join(map(str, layers))}"
        if not path.exists():
            if case.has_weights:
                generate(case.directory, path, layers)
            else:
                generate_dummy(case.directory, path, layers)
        return path

    def show(progress: ProfileProgress) -> None:
        note(f"{case.name}: {progress.done}/{progress.total} {progress.running}", end="\r")

    return profile(case.name, spec, target, fingerprint, plan, progress=show)


def full_checkpoint(case: Case, folder: Path) -> Path:
    if case.has_weights:
        return case.directory
    path = folder / "full"
    if not path.exists():
        generate_dummy(case.directory, path, load_spec(case.directory).num_layers)
    return path


def measure_full(
    case: Case, target: WorkerProfileTarget, folder: Path, predicted: FingerprintedEstimator, options: Options
) -> Iterator[AccuracyRow]:
    """Every configuration of the full model, each beside its prediction."""
    checkpoint = full_checkpoint(case, folder)
    for tp, pp in options.degrees_of(case):
        session = target.open(tp=tp, pp=pp)
        try:
            for weights in case.weights:
                for batch in options.batches:
                    config = DeploymentConfig(tp=tp, pp=pp, weights=weights)
                    workload = Workload(batch, case.input_tokens, case.output_tokens)
                    note(f"{case.name}: full model, {config}, batch {batch}", end="\r")
                    yield from measure_one(case, session, checkpoint, config, workload, predicted, options.repeats)
        finally:
            session.close()


def measure_one(
    case: Case,
    session: WorkerProfileSession,
    checkpoint: Path,
    config: DeploymentConfig,
    workload: Workload,
    estimator: FingerprintedEstimator,
    repeats: int,
) -> Iterator[AccuracyRow]:
    spec = estimator.profile.spec
    split = even_split(spec.num_layers, config.pp)
    session.load(
        checkpoint,
        weights=config.weights,
        kv=KvFormat.BITS16,
        layers_per_stage=split,
        max_batch=workload.batch,
        max_context_tokens=workload.context_tokens,
    )
    lengths = (1, workload.output_tokens)
    runs: dict[int, list[float]] = {length: [] for length in lengths}
    for repeat in range(repeats + 1):  # the first warms up
        for length in lengths:
            reading = session.run(batch=workload.batch, input_tokens=workload.input_tokens, output_tokens=length)
            if repeat:
                runs[length].append(reading.e2e_s)
    estimate = estimator.estimate(config, workload)
    unresolved = below_resolution(estimator, config)

    def row(quantity: str, predicted: Quantity, measured: tuple[float, float, float], hidden: bool) -> AccuracyRow:
        return AccuracyRow(
            model=case.name,
            shape_hash=spec.shape_hash,
            num_layers=spec.num_layers,
            config=config,
            workload=workload,
            quantity=quantity,
            predicted=predicted,
            measured=measured[0],
            measured_low=measured[1],
            measured_high=measured[2],
            repeats=repeats,
            below_resolution=hidden,
        )

    ttft, tpot = times(runs[1], runs[workload.output_tokens], workload.output_tokens - 1)
    yield row("ttft_s", estimate.ttft_s, ttft, unresolved)
    yield row("tpot_s", estimate.tpot_s, tpot, unresolved)
    ranks, memory = session.memory(), estimate.memory
    stages = memory.stages(split)
    totals = [r.weights_bytes + r.kv_bytes + r.activation_peak_bytes + r.pp_buffer_bytes for r in ranks]
    both = [(total, rank.runtime_bytes) for total, rank in zip(totals, ranks, strict=True)]
    for quantity, value, truth in (
        ("memory_bytes_per_gpu", memory.per_gpu_bytes(split), max(counted + runtime for counted, runtime in both)),
        ("engine_bytes_per_gpu", max(s.total_bytes - s.runtime_bytes for s in stages), max(totals)),
    ):
        low, high = value * (1 - memory.relative_error), value * (1 + memory.relative_error)
        predicted = Quantity(float(value), max(0.0, low), high, memory.source)
        yield row(quantity, predicted, (float(truth), float(truth), float(truth)), False)


def times(short: list[float], long: list[float], steps: int) -> tuple[tuple[float, float, float], ...]:
    """(value, low, high) of TTFT and TPOT: medians, with the 90% intervals of the trimmed means."""
    at_short, at_long = float(np.median(short)), float(np.median(long))
    half_short = locate(short).half_width
    half = float(np.hypot(half_short, locate(long).half_width)) / steps
    tpot = (at_long - at_short) / steps
    return (at_short, at_short - half_short, at_short + half_short), (tpot, tpot - half, tpot + half)


def below_resolution(estimator: FingerprintedEstimator, config: DeploymentConfig) -> bool:
    return any(effect.below_resolution for effect in estimator.layer_effects if effect.key == key_of(config))


# Cases and output


def cases(folder: Path, which: str) -> Iterable[Case]:
    if which in {"demo", "both"}:
        yield Case(
            name="iserve-demo", directory=demo_model_path(), has_weights=True, input_tokens=512, output_tokens=33
        )
    if which in {"llama", "both"}:
        config = folder / "llama-16x25MB"
        config.mkdir()
        (config / "config.json").write_text(json.dumps(LLAMA))
        yield Case(name=config.name, directory=config, has_weights=False, input_tokens=64, output_tokens=33)
    if which == "kinds":
        for name, shape, weights in (
            ("gemma3-12x25MB", GEMMA, FORMATS),
            ("gpt-oss-8x53MB", GPT_OSS, (WeightFormat.BITS16,)),
        ):
            config = folder / name
            config.mkdir()
            (config / "config.json").write_text(json.dumps(shape))
            yield Case(
                name=name,
                directory=config,
                has_weights=False,
                input_tokens=256,
                output_tokens=33,
                weights=weights,
                degrees=((1, 1),),
            )
    if which == "wide":
        config = folder / "llama-16x405MB"
        config.mkdir()
        (config / "config.json").write_text(json.dumps(WIDE))
        yield Case(name=config.name, directory=config, has_weights=False, input_tokens=512, output_tokens=33)


def run(which: str, options: Options, command: str) -> AccuracyRecord:
    rows: list[AccuracyRow] = []
    notes: list[str] = []
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="iserve-accuracy-") as root:
        for case in cases(Path(root), which):
            folder = Path(root) / f"{case.name}-work"
            folder.mkdir()
            with worker_target(case.directory, folder, options.devices) as target:
                found = take_profile(case, target, folder, options)
                machine = found.machine
                notes += [f"{case.name}: {said}" for said in found.notes]
                notes.append(
                    f"{case.name}: profiled in {found.spent_s:.0f} s, "
                    f"{sum(len(p.runs) for p in found.timing)} runs of {len(found.timing)} points"
                )
                estimator = FingerprintedEstimator(found, RooflineEstimator(found.spec, machine.device))
                rows += measure_full(case, target, folder, estimator, options)
    return AccuracyRecord(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        machine=machine,
        load_average_before=before,
        load_average_after=os.getloadavg()[0],
        rows=tuple(rows),
        notes=tuple(notes),
    )


def shown(row: AccuracyRow) -> tuple[str, ...]:
    """The cells of one line: times in ms, memory in MiB."""
    scale, unit = (1e-3, "ms") if row.is_time else (2.0**20, "MiB")
    predicted, config = row.predicted, row.config

    def text(value: float) -> str:
        return f"{value / scale:.4g}"

    verdict = ("inside" if row.inside else "outside") + (", below resolution" if row.below_resolution else "")
    return (
        f"tp={config.tp} pp={config.pp} {config.weights}",
        str(row.workload.batch),
        row.quantity.removesuffix("_s").removesuffix("_bytes_per_gpu"),
        f"{text(predicted.value)} [{text(predicted.low)}, {text(predicted.high)}] {unit}",
        f"{text(row.measured)} {unit}",
        f"{row.relative_error:+.1%}",
        verdict,
    )


def markdown(record: AccuracyRecord) -> str:
    """The tables of docs/accuracy.md."""
    lines = []
    for model in dict.fromkeys(row.model for row in record.rows):
        rows = [row for row in record.rows if row.model == model]
        work = rows[0].workload
        lines.append(f"### {model}: {work.input_tokens} tokens in, {work.output_tokens} out\n")
        lines.append("| configuration | batch | quantity | predicted [90%] | measured | error | interval |")
        lines.append("|---|---|---|---|---|---|---|")
        lines += ["| " + " | ".join(shown(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines) + "\n" + summary(record)


def summary(record: AccuracyRecord) -> str:
    lines = []
    for model in dict.fromkeys(row.model for row in record.rows):
        for quantity in dict.fromkeys(row.quantity for row in record.rows):
            rows = [r for r in record.rows if (r.model, r.quantity) == (model, quantity)]
            errors = sorted(abs(r.relative_error) for r in rows)
            inside = sum(r.inside for r in rows)
            lines.append(
                f"- {model}, {quantity}: {inside} of {len(rows)} inside, median error "
                f"{np.median(errors):.1%}, largest {errors[-1]:.1%}"
            )
    return "\n".join(lines)


def note(text: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(f"{text:<100}", end=end, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.full_model_accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--seconds", type=float, default=120.0, help="budget of each model's profile")
    parser.add_argument("--repeats", type=int, default=7, help="of every point of the full models, at least 2")
    parser.add_argument("--model", choices=("demo", "llama", "both", "wide", "kinds"), default="both")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPUs, not its CPU")
    given = sys.argv[1:] if argv is None else argv
    chosen = parser.parse_args(given)
    if chosen.repeats < 2 or chosen.seconds <= 0:
        parser.error("--repeats must be at least 2 and --seconds above 0")
    started = clock()
    devices = find_devices(None if chosen.gpu else 2).devices
    if chosen.gpu and devices[0].kind != "cuda":
        parser.error("--gpu: there is no GPU here")
    options = Options(profile_s=chosen.seconds, repeats=chosen.repeats, devices=tuple(devices))
    record = run(chosen.model, options, " ".join(["python -m tests.bench.full_model_accuracy", *given]))
    print(markdown(record))
    note(
        f"{clock() - started:.0f} s; load average {record.load_average_before:.2f} before, "
        f"{record.load_average_after:.2f} after"
    )
    for said in record.notes:
        note(said)
    for path in store_accuracy(load_settings().home, record):
        note(f"kept in {path}; `iserve report` shows it with this machine's profile of that model")
    if chosen.json is not None:
        chosen.json.write_bytes(to_json(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
