"""The public tables as rows: what was run, on what, and how long it took. Says which rows are unsound, and why.

Read by ``calibrate_roofline.py``; fits nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.estimators.physical_floor import NOTHING_LOST
from fingerprint.estimators.roofline import RooflineConstants, RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec

# Names in the tables -> the config.json of the same shape.
SHAPES = {
    "meta-llama/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "huggyllama/llama-7b": "meta-llama/Llama-2-7b-hf",
    "mistralai/Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1",
    "meta-llama/Meta-Llama-3-8B": "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2-7B": "Qwen/Qwen2.5-7B",
    "EleutherAI/gpt-j-6b": "EleutherAI/gpt-j-6b",
    "mistralai/Mixtral-8x7B-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "meta-llama/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "meta-llama/Meta-Llama-3-70B": "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen2-72B": "Qwen/Qwen2.5-72B",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-FP8": "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B",
}
# The benchmark does not name its A100. It is the 40 GB part: Llama-2-7B at batch 32, 1024/1024 (34 GB of KV and
# 13 GB of weights) takes twice the time of batch 16, as a batch that does not fit and runs in two waves does.
GPUS = {
    "A100": "a100-40gb-sxm",
    "H100": "h100-sxm",
    "H200 SXM 141GB": "h200-sxm",
    "a100-80gb": "a100-80gb-sxm",
    "h100-80gb": "h100-sxm",
}
FAST, SLOW, OLD = "TensorRT-LLM", "vLLM", "Splitwise"
ROOM = 0.85  # of a GPU for weights and KV; a batch above it is cut into waves and measures something else


@dataclass(frozen=True)
class Row:
    """Measured figure: ``kind`` is ``ttft``, ``tpot`` or ``e2e``."""

    engine: str
    model: str
    gpu: str
    config: DeploymentConfig
    workload: Workload
    kind: str
    seconds: float


class Tables:
    """The reference folder, read once; estimators are kept per shape and constants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        configs = json.loads((folder / "model-configs.json").read_text())
        self._specs: dict[str, ModelSpec] = {name: read_spec(configs[shape]) for name, shape in SHAPES.items()}

    def read(self, name: str) -> list[dict[str, str]]:
        raw = (self._folder / name).read_bytes()
        text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
        return list(csv.DictReader(io.StringIO(text)))

    def spec(self, model: str) -> ModelSpec:
        return self._specs[model]

    def knows(self, model: str) -> bool:
        return model in self._specs

    def gpu(self, name: str) -> GpuSpec:
        if name == "GH200":  # not in the datasheet table: an H100 with 96 GB at 4.0 TB/s
            return replace(gpu_spec("h100-sxm"), name="gh200", memory_bytes=96 * 10**9, memory_bytes_per_s=4.0e12)
        return gpu_spec(GPUS[name])

    def predict(self, rows: Sequence[Row], constants: RooflineConstants) -> np.ndarray:
        """Predicted seconds of every row."""
        estimators: dict[tuple[str, str], RooflineEstimator] = {}
        out = np.empty(len(rows))
        for i, row in enumerate(rows):
            key = (row.model, row.gpu)
            if key not in estimators:
                estimators[key] = RooflineEstimator(self.spec(row.model), self.gpu(row.gpu), constants=constants)
            estimator, steps = estimators[key], row.workload.output_tokens - 1
            out[i] = 0.0 if row.kind == "tpot" else estimator.ttft_s(row.config, row.workload)
            if row.kind != "ttft":
                out[i] += (1 if row.kind == "tpot" else steps) * estimator.tpot_s(row.config, row.workload)
        return out

    def errors(self, rows: Sequence[Row], constants: RooflineConstants) -> np.ndarray:
        """ln(measured / predicted) of every row."""
        return np.log([row.seconds for row in rows]) - np.log(self.predict(rows, constants))

    def share_inside(self, rows: Sequence[Row], constants: RooflineConstants) -> float:
        """Share of the rows that lie in the interval which the estimator itself gives."""
        inside = 0
        for row in rows:
            estimator = RooflineEstimator(self.spec(row.model), self.gpu(row.gpu), constants=constants)
            estimate = estimator.estimate(row.config, row.workload)
            found = {"ttft": estimate.ttft_s, "tpot": estimate.tpot_s, "e2e": estimate.e2e_s}[row.kind]
            inside += found.low <= row.seconds <= found.high
        return inside / len(rows)

    def fits(self, row: Row) -> bool:
        memory = (
            RooflineEstimator(self.spec(row.model), self.gpu(row.gpu)).estimate(row.config, row.workload).memory
        )
        split = (-(-memory.num_layers // memory.pp),) * memory.pp
        stage = max(memory.stages(split), key=lambda part: part.total_bytes)
        return stage.weights_bytes + stage.kv_bytes <= ROOM * self.gpu(row.gpu).memory_bytes


# Nothing can be faster than this: full bandwidth, full peak, no launches, no host, no latency.
LIGHT = NOTHING_LOST


def bench_rows(tables: Tables, gpus: Iterable[str]) -> list[Row]:
    """LLM-Inference-Bench: static batches in 16 bit, whole runs."""
    rows = []
    for entry in tables.read("measured_llm_inference_bench.csv.gz"):
        if entry["gpu"] in gpus and entry["framework"] in (FAST, SLOW) and tables.knows(entry["model"]):
            rows.append(
                Row(
                    entry["framework"],
                    entry["model"],
                    entry["gpu"],
                    DeploymentConfig(tp=int(entry["n_gpu"])),
                    Workload(int(entry["batch"]), int(entry["isl"]), int(entry["osl"])),
                    "e2e",
                    float(entry["e2e_latency_s"]),
                )
            )
    return rows


def keep_sound(tables: Tables, rows: list[Row], what: str) -> list[Row]:
    """Without rows that ran in waves, that light itself could not run, or whose routing was not uniform."""
    light = tables.errors(rows, LIGHT)
    kept, dropped = [], Counter[str]()
    for row, error in zip(rows, light, strict=True):
        if not tables.fits(row):
            dropped["does not fit at once"] += 1
        elif "Mixtral" in row.model and row.engine == FAST:
            # many are faster than reading the experts of uniform routing would be: equal prompts share experts
            dropped["MoE with equal prompts"] += 1
        elif error < 0:
            dropped["faster than the peak figures allow"] += 1
        else:
            kept.append(row)
    print(f"{what}: {len(rows)} rows, kept {len(kept)}; dropped {dict(dropped)}")
    return kept


def ttft_rows(tables: Tables, gpus: Iterable[str]) -> list[Row]:
    return [
        Row(
            entry["framework"],
            entry["model"],
            entry["gpu"],
            DeploymentConfig(),
            Workload(int(entry["batch"]), int(entry["isl"]), 1024),
            "ttft",
            float(entry["ttft_s"]),
        )
        for entry in tables.read("measured_llm_inference_bench_ttft.csv")
        if entry["gpu"] in gpus and entry["framework"] in (FAST, SLOW)
    ]


def splitwise_rows(tables: Tables, kind: str) -> list[Row]:
    """Llama-2-70B without the power cap and without the TP 2 points whose times fit no trend."""
    rows = []
    for entry in tables.read("measured_splitwise_llama2_bloom.csv"):
        tp, batch = int(entry["tp"]), int(entry["batch"])
        broken = tp == 2 and batch >= (32 if entry["hardware"] == "a100-80gb" else 64)
        if entry["model"] == "llama2-70b" and entry["hardware"] in GPUS and not broken:
            workload = Workload(batch, int(entry["isl"]), int(entry["osl_max"]))
            seconds = float(entry[f"{kind}_ms_median"]) / 1e3
            config = DeploymentConfig(tp=tp)
            rows.append(Row(OLD, entry["model"], entry["hardware"], config, workload, kind, seconds))
    return rows


def present_day_rows(tables: Tables, kind: str) -> list[Row]:
    """Serving runs of 2024 to 2026 at low load, 16 bit. ``ttft`` is of one request, seen by an HTTP client."""
    rows = []
    for entry in tables.read("measured_gpustack_serving.csv"):
        low = entry["max_concurrency"] in {"1", "2", "4"} and entry["speculative"] == "0"
        if low and tables.knows(entry["model"]) and not entry["model"].endswith("FP8"):
            workload = Workload(
                int(entry["max_concurrency"]) if kind == "tpot" else 1,
                round(float(entry["mean_isl"])),
                round(float(entry["mean_osl"])),
            )
            seconds = float(entry[f"{kind}_median_ms"]) / 1e3
            config = DeploymentConfig(tp=int(entry["tp"]))
            rows.append(Row(entry["engine"], entry["model"], entry["gpu"], config, workload, kind, seconds))
    for entry in tables.read("measured_datacrunch_sglang_h200.csv"):
        if entry["mode"] == "online" and entry["request_rate_rps"] == "1.0" and tables.knows(entry["model"]):
            concurrent = round(float(entry["median_e2e_ms"]) / 1e3)  # Little's law at 1 request/s
            workload = Workload(
                max(concurrent, 1) if kind == "tpot" else 1,
                round(float(entry["mean_isl"])),
                round(float(entry["mean_osl"])),
            )
            seconds = float(entry["median_itl_ms" if kind == "tpot" else "median_ttft_ms"]) / 1e3
            config = DeploymentConfig(tp=int(entry["tp"]))
            rows.append(Row("sglang", entry["model"], entry["gpu"], config, workload, kind, seconds))
    return rows


def quantized_rows(tables: Tables) -> list[Row]:
    weights = {"fp16": WeightFormat.BITS16, "fp8": WeightFormat.FP8, "int8": WeightFormat.INT8}
    kv = {"fp16": KvFormat.BITS16, "fp8": KvFormat.FP8, "int8": KvFormat.INT8}
    rows = []
    for entry in tables.read("measured_llm_inference_bench_quant.csv"):
        words = entry["weight_and_kv_dtype"].replace(",", "").split()  # Weight = fp16, KV Cache = fp8
        config = DeploymentConfig(weights=weights[words[2]], kv=kv[words[-1]])
        length = int(entry["isl_and_osl"])
        workload = Workload(int(entry["batch"]), length, length)
        seconds = float(entry["e2e_latency_s"])
        rows.append(Row(entry["framework"], entry["model"], entry["gpu"], config, workload, "e2e", seconds))
    return rows


def pipeline_rows(tables: Tables) -> list[Row]:
    rows = []
    for entry in tables.read("measured_llm_inference_bench_parallelism.csv"):
        degree, kind, length = int(entry["n_gpu"]), entry["parallelism"], int(entry["isl_and_osl"])
        if degree == 1 or not tables.knows(entry["model"]):
            continue
        if kind in {"PP", "Pipeline Parallelism"}:
            config = DeploymentConfig(pp=degree)
        elif "Pipeline" in kind or "and PP" in kind:
            config = DeploymentConfig(tp=2, pp=degree // 2)
        else:
            continue
        workload = Workload(int(entry["batch"]), length, length)
        seconds = float(entry["e2e_latency_s"])
        rows.append(Row(entry["framework"], entry["model"], entry["gpu"], config, workload, "e2e", seconds))
    return rows


def gpu_family(row: Row) -> str:
    return "A100" if row.gpu[0] in "Aa" else "H100"


def is_quantized(row: Row) -> bool:
    return (row.config.weights, row.config.kv) != (WeightFormat.BITS16, KvFormat.BITS16)


def is_emulated(row: Row) -> bool:
    """fp8 on a GPU without fp8 units."""
    return gpu_family(row) == "A100" and (row.config.weights is WeightFormat.FP8 or row.config.kv is KvFormat.FP8)
