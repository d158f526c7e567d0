"""Fit the roofline's constants to public measurements, and say how well they hold on what was left out.

    ISERVE_REFERENCE_DATA=... python tests/bench/calibrate_roofline.py

Prints the constants to paste into ``RooflineConstants`` and every figure of
``docs/decisions/0002-roofline-calibration.md``. Deterministic; CPU only; about twenty seconds on one core.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from fingerprint.config import WeightFormat
from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants
from fingerprint.gpus import gpu_spec
from tests.bench.roofline_tables import (
    SHAPES,
    SLOW,
    Row,
    Tables,
    bench_rows,
    gpu_family,
    is_emulated,
    is_quantized,
    keep_sound,
    pipeline_rows,
    present_day_rows,
    quantized_rows,
    splitwise_rows,
    ttft_rows,
)

TTFT_WEIGHT = 3.0  # 46 rows of TTFT against 970 of whole runs
FITTED = (
    "memory_efficiency",
    "compute_efficiency",
    "activation_passes",
    "all_reduce_latency_s",
    "all_reduce_hop_s",
    "launch_per_layer_s",
    "host_per_step_s",
    "host_per_sequence_s",
)
DERIVED = ("quantized_efficiency", "link_efficiency", "handover_latency_s", "client_overhead_s")
# Fitted a second time for the slow engine, only so that its host does not pass for the GPU's.
OWN_OF_SLOW = ("launch_per_layer_s", "host_per_step_s", "host_per_sequence_s")
TAILS = (0.05, 0.03, 0.02, 0.01, 0.005)  # tried for the TPOT interval, narrowest interval first
UPPER = {"activation_passes": 100.0}


def fit(
    tables: Tables, rows: Sequence[Row], base: RooflineConstants
) -> tuple[RooflineConstants, RooflineConstants]:
    """Least squares on log times with a soft L1 loss.

    Returns the constants with the fast engine's host (the ones published) and the same with the slow engine's.
    """
    slow = [row for row in rows if row.engine == SLOW]
    fast = [row for row in rows if row.engine != SLOW]
    names = (*FITTED, *OWN_OF_SLOW)

    def unpack(logs: np.ndarray) -> tuple[RooflineConstants, RooflineConstants]:
        values = [float(value) for value in np.exp(logs)]
        published = replace(base, **dict(zip(FITTED, values, strict=False)))
        return published, replace(published, **dict(zip(OWN_OF_SLOW, values[len(FITTED) :], strict=True)))

    weights = np.array([TTFT_WEIGHT if row.kind == "ttft" else 1.0 for row in (*fast, *slow)])

    def residuals(logs: np.ndarray) -> np.ndarray:
        published, of_slow = unpack(logs)
        return weights * np.concatenate([tables.errors(fast, published), tables.errors(slow, of_slow)])

    start = np.log([getattr(base, name) for name in names])
    upper = np.log([UPPER.get(name, 1.0) for name in names])
    found = least_squares(
        residuals, start, loss="soft_l1", f_scale=0.1, bounds=(np.full(len(names), -18.5), upper)
    )
    return unpack(found.x)


def fit_quantized(
    tables: Tables, rows: Sequence[Row], published: RooflineConstants, of_slow: RooflineConstants
) -> float:
    """The one factor by which kernels on 8-bit weights attain less than 16-bit ones."""
    chosen = [row for row in rows if row.config.weights is not WeightFormat.BITS16]

    def residuals(factor: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [
                tables.errors([row], replace(constants, quantized_efficiency=float(factor[0])))
                for row in chosen
                for constants in [of_slow if row.engine == SLOW else published]
            ]
        )

    found = least_squares(residuals, [0.9], loss="soft_l1", f_scale=0.1, bounds=([0.2], [1.0]))
    return float(found.x[0])


def operators(tables: Tables) -> tuple[float, float]:
    """Link efficiency and hand-over latency from measured collectives."""
    links = {
        "a100_dgx": gpu_spec("a100-80gb-sxm"),
        "h100_dgx": gpu_spec("h100-sxm"),
        "a100_pairwise_nvlink": gpu_spec("a100-80gb-pcie"),
        "h100_pairwise_nvlink": gpu_spec("h100-pcie"),
    }
    attained: dict[tuple[str, int], list[float]] = defaultdict(list)
    small: dict[tuple[str, int], list[float]] = defaultdict(list)
    for entry in tables.read("vidur/all_reduce_median.csv.gz"):
        device, group, size = entry["network_device"], int(entry["num_workers"]), int(entry["size"])
        if device not in links or int(entry["devices_per_node"]) != group:
            continue
        seconds = float(entry["median_ms"]) / 1e3
        if size >= 8e6:
            ideal = 2 * (group - 1) / group * size / links[device].slowest_link_bytes_per_s(group)
            attained[device, group].append(ideal / seconds)
        elif size <= 100_000:
            small[device, group].append(seconds)
    print("\nall-reduce: attained share of the link above 8 MB, median time below 100 kB")
    for key, shares in sorted(attained.items()):
        print(f"  {key[0]} x{key[1]}: {np.median(shares):.2f}, {np.median(small[key]) * 1e6:.0f} us")
    sends = [
        float(entry["median_ms"]) / 1e3
        for entry in tables.read("vidur/send_recv_median.csv.gz")
        if int(entry["size"]) <= 100_000 and entry["devices_per_node"] == entry["num_workers"] == "2"
    ]
    handover_s = float(np.median(sends))
    print(f"  send and receive below 100 kB within a node: median {handover_s * 1e6:.0f} us")
    return float(np.median([np.median(shares) for shares in attained.values()])), handover_s


def gemm_check(tables: Tables) -> None:
    """Print what the four linear operators of Llama-2-70B attain on their own, at 1 and at 4096 tokens, and the
    rest.
    """
    spec = tables.spec("llama2-70b")
    peaks = {"a100": (2.039e12, 312e12), "h100": (3.35e12, 989.4e12), "a40": (0.696e12, 149.7e12)}
    print(
        "\nLlama-2-70B operators, tp 1: share of bandwidth at 1 token, of peak at 4096, activation passes at 4096"
    )
    linear = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")
    other = ("input_layernorm_ms", "attn_rope_ms", "post_attention_layernorm_ms", "mlp_act_ms", "add_ms")
    found = {
        (entry["device"], int(entry["num_tokens"])): entry
        for entry in tables.read("vidur/mlp_median.csv.gz")
        if entry["model"] == "meta-llama/Llama-2-70b-hf" and entry["tp"] == "1"
    }
    width = (
        spec.hidden_size + (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + 2 * spec.intermediate_size
    )
    for device, (bandwidth, peak) in peaks.items():
        one, many = found[device, 1], found[device, 4096]
        read_s = 2 * spec.layer_linear_params / bandwidth
        work_s = 2 * spec.layer_linear_params * 4096 / peak
        other_s = sum(float(many[name]) for name in other) / 1e3
        passes = other_s * bandwidth * CALIBRATED.memory_efficiency / (2 * width * 4096)
        one_s = sum(float(one[name]) for name in linear) / 1e3
        many_s = sum(float(many[name]) for name in linear) / 1e3
        print(f"  {device}: {read_s / one_s:.2f}, {work_s / many_s:.2f}, {passes:.1f}")


def describe(title: str, errors: np.ndarray) -> None:
    relative = np.abs(np.exp(-errors) - 1)  # |predicted / measured - 1|
    print(
        f"  {title}: n {len(errors)}, bias {np.expm1(np.median(-errors)):+.1%}, median {np.median(relative):.1%}, "
        f"p90 {np.quantile(relative, 0.9):.1%}, worst {relative.max():.1%}"
    )


def interval(errors: np.ndarray, tail: float = 0.05) -> tuple[float, float]:
    return float(np.quantile(errors, tail)), float(np.quantile(errors, 1 - tail))


def coverage(errors: np.ndarray, bounds: tuple[float, float]) -> float:
    return float(np.mean((errors >= bounds[0]) & (errors <= bounds[1])))


def hold_out(tables: Tables, rows: Sequence[Row], base: RooflineConstants, groups: np.ndarray) -> np.ndarray:
    """Errors of every row under constants fitted without its group."""
    errors = np.empty(len(rows))
    kinds = np.array([row.kind for row in rows])
    for name in sorted(set(groups)):
        published, _ = fit(tables, [row for row, group in zip(rows, groups, strict=True) if group != name], base)
        errors[groups == name] = tables.errors(
            [row for row, group in zip(rows, groups, strict=True) if group == name], published
        )
        for kind in sorted(set(kinds[groups == name])):
            describe(f"{kind} without {name}", errors[(groups == name) & (kinds == kind)])
    return errors


def nested_coverage(errors: np.ndarray, groups: np.ndarray, tail: float) -> float:
    """Share of held-out rows inside the interval of the *other* groups' held-out errors: no row has a say in the
    interval that judges it."""
    inside = 0.0
    for name in set(groups):
        inside += coverage(errors[groups == name], interval(errors[groups != name], tail)) * np.sum(groups == name)
    return inside / len(errors)


def report_by(title: str, rows: Sequence[Row], errors: np.ndarray, group: Callable[[Row], object]) -> None:
    print(f"\n{title}")
    for name in sorted({str(group(row)) for row in rows}):
        describe(name, errors[[i for i, row in enumerate(rows) if str(group(row)) == name]])


def held_out_intervals(
    tables: Tables, rows: Sequence[Row], base: RooflineConstants, host_bound: np.ndarray
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (ttft, tpot) bounds of ln(measured / predicted) over both ways of holding out.

    Whole runs are used for TPOT: decoding is most of their time. Errors differ more between models and GPUs than
    within them, so plain 5% tails cover too little of an unseen one; the tail is the widest of a few that covers
    90% of the held-out models (with two GPUs, the one is judged by the other alone: reported, not chosen by).
    ``host_bound`` are prefills of an engine that waits for its host; they widen the slow side of TTFT, because
    which engine will run is not known here.
    """
    ways = {
        "model (llama2-70b is all of Splitwise)": np.array([row.model for row in rows]),
        "GPU": np.array([gpu_family(row) for row in rows]),
    }
    errors = {}
    for way, groups in ways.items():
        print(f"\nHold out one {way} at a time")
        errors[way] = hold_out(tables, rows, base, groups)
    whole = np.array([row.kind == "e2e" for row in rows])
    chosen = TAILS[-1]
    for tail in reversed(TAILS):
        by_model, by_gpu = (
            nested_coverage(errors[way][whole], groups[whole], tail) for way, groups in ways.items()
        )
        print(
            f"  e2e, tails {tail:.1%}, inside the others' interval: {by_model:.1%} by model, {by_gpu:.1%} by GPU"
        )
        if by_model >= 0.9:
            chosen = tail
    print(f"  tails taken: {chosen:.1%}")
    for way, groups in ways.items():
        share = nested_coverage(errors[way][~whole], groups[~whole], 0.05)
        print(f"  ttft, tails 5.0%, by {way}: {share:.1%} inside the others' interval")
    ttft_errors = np.concatenate([*(found[~whole] for found in errors.values()), host_bound])
    return interval(ttft_errors, chosen), interval(
        np.concatenate([found[whole] for found in errors.values()]), chosen
    )


def report_outside(tables: Tables, published: RooflineConstants) -> None:
    """Rows that neither the constants nor (but for Splitwise's prefills) the intervals have seen."""
    quantized, pipelines = quantized_rows(tables), pipeline_rows(tables)
    tpot = splitwise_rows(tables, "tpot")
    narrow = [row for row in quantized if is_quantized(row)]
    print("\nNever fitted")
    outside = {
        "GH200 whole runs (as an H100 at 4.0 TB/s)": keep_sound(tables, bench_rows(tables, ("GH200",)), "GH200"),
        "GH200 ttft": ttft_rows(tables, ("GH200",)),
        "present-day tpot at low load": present_day_rows(tables, "tpot"),
        "present-day ttft at low load (sets client_overhead_s)": present_day_rows(tables, "ttft"),
        "Splitwise ttft, tp 4 and 8 (2023)": [r for r in splitwise_rows(tables, "ttft") if r.config.tp > 2],
        "Splitwise tpot, tp 2 (2023)": [row for row in tpot if row.config.tp == 2],
        "Splitwise tpot, tp 4 and 8 (2023)": [row for row in tpot if row.config.tp > 2],
        "pipeline, batch 1": [row for row in pipelines if row.workload.batch == 1],
        "pipeline, batch above 1": [row for row in pipelines if row.workload.batch > 1],
        "8-bit weights or KV on hardware that has them": [row for row in narrow if not is_emulated(row)],
        "fp8 emulated on A100": [row for row in narrow if is_emulated(row)],
    }
    for title, rows in outside.items():
        errors = tables.errors(rows, published)
        low, high = interval(errors)
        describe(f"{title}, {tables.share_inside(rows, published):.0%} in the 90% interval", errors)
        print(f"    5% and 95% of ln(measured / predicted): {low:+.2f} {high:+.2f}")
    rows = present_day_rows(tables, "tpot")
    for row, predicted_s in zip(rows, tables.predict(rows, published), strict=True):
        print(
            f"    {row.engine} {row.model} {row.gpu} tp {row.config.tp} batch {row.workload.batch}: "
            f"measured {row.seconds * 1e3:.2f} ms, predicted {predicted_s * 1e3:.2f} ms"
        )


def report_power(tables: Tables) -> None:
    shares = [
        float(entry["avg_power_frac_tdp"] or 0)
        for entry in tables.read("measured_splitwise_llama2_bloom.csv")
        if not entry["hardware"].endswith("pcap")
    ]
    known = [share for share in shares if share > 0]
    low, middle, high = np.quantile(known, [0.05, 0.5, 0.95])
    print(f"\naverage power over TDP, {len(known)} runs: 5% {low:.2f}, median {middle:.2f}, 95% {high:.2f}")


def calibrate(tables: Tables, *, leave_out: str | None = None) -> tuple[RooflineConstants, RooflineConstants]:
    """Every fitted constant (intervals included), and the same with the slow engine's host; prints the reports.

    Args:
        leave_out: a value of ``SHAPES``; no row of a model of that shape is looked at.
    """

    def others(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if SHAPES[row.model] != leave_out]

    link_efficiency, handover_s = operators(tables)
    gemm_check(tables)
    base = replace(CALIBRATED, link_efficiency=link_efficiency, handover_latency_s=handover_s)
    print()
    runs = keep_sound(tables, others(bench_rows(tables, ("A100", "H100"))), "LLM-Inference-Bench, A100 and H100")
    old_ttft = others(splitwise_rows(tables, "ttft"))
    # TP 2 only: from TP 4 on the engine of 2023 waits for its host even in prefill
    rows = [*runs, *others(ttft_rows(tables, ("A100", "H100"))), *(row for row in old_ttft if row.config.tp == 2)]
    published, of_slow = fit(tables, rows, base)
    sound = [row for row in others(quantized_rows(tables)) if not is_emulated(row)]
    factor = fit_quantized(tables, sound, published, of_slow) if sound else 1.0  # 1: as 16 bits, nothing is known
    published = replace(published, quantized_efficiency=factor)
    own = np.array([tables.errors([row], of_slow if row.engine == SLOW else published)[0] for row in rows])
    kind = "Fit, each engine with its own host terms"
    report_by(kind, rows, own, lambda row: (row.kind, row.engine, row.gpu))
    errors = tables.errors(rows, published)
    report_by("Published constants", rows, errors, lambda row: (row.kind, row.engine, row.gpu))
    low_load = others(present_day_rows(tables, "ttft"))
    on_top_s = np.array([row.seconds for row in low_load]) - tables.predict(low_load, published)
    published = replace(published, client_overhead_s=float(np.quantile(on_top_s, 0.95)))
    host_bound = tables.errors([row for row in old_ttft if row.config.tp > 2], published)
    ttft_bounds, tpot_bounds = held_out_intervals(tables, rows, base, host_bound)
    return replace(published, ttft_log_error=ttft_bounds, tpot_log_error=tpot_bounds), of_slow


def main() -> None:
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        sys.exit("set ISERVE_REFERENCE_DATA to the folder that holds reference/")
    tables = Tables(Path(folder) / "reference")
    published, of_slow = calibrate(tables)
    report_outside(tables, published)
    report_power(tables)
    print("\nConstants to publish")
    for name in (*FITTED, *DERIVED):
        print(f"  {name}: {getattr(published, name):.3g} (slow engine {getattr(of_slow, name):.3g})")
    for name in ("ttft_log_error", "tpot_log_error"):
        low, high = getattr(published, name)
        print(f"  {name}: ({low:.2f}, {high:.2f})")


if __name__ == "__main__":
    main()
