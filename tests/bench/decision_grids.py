"""Grids of decisions whose truth is known: the measured public tables.

A table answers where two or more alternatives (TP x PP x format) of one model were measured on one kind of GPU,
with one engine, under one workload. Fits nothing and predicts nothing.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from tests.bench.decision_rules import Cell, Measured
from tests.bench.roofline_tables import (
    LIGHT,
    SHAPES,
    Row,
    Tables,
    bench_rows,
    pipeline_rows,
    quantized_rows,
    splitwise_rows,
)

NOT_ASKED = {
    "measured_gpustack_serving.csv": "alternatives in TP of families that iServe does not describe only "
    "(gpt-oss, GLM, Qwen3 MoE)",
    "measured_datacrunch_sglang_h200.csv": "one TP per model",
    "measured_dstack_llama405b_*.csv": "one configuration per kind of GPU",
    "measured_dstack_gptoss120b_pd_h200.csv": "splits of prefill and decode workers, which iServe does not plan",
    "measured_llm_inference_bench_ttft.csv": "TP 1 only",
    "Deepspeed-MII in measured_llm_inference_bench.csv.gz": "an engine that neither planner knows",
    "Deci/DeciLM-7B in measured_llm_inference_bench.csv.gz": "no config.json at hand",
    "BLOOM-176B in measured_splitwise_llama2_bloom.csv": "TP 8 only",
    "h100-80gb-pcap in measured_splitwise_llama2_bloom.csv": "prefill times are another row's times 1.3, the "
    "others another row's: derived, not measured",
    "EP in measured_llm_inference_bench_parallelism.csv": "not in iServe's space",
    "GH200, B200, GB200, RTX PRO 6000 in measured_trtllm_throughput.csv": "no datasheet row, or one alternative",
}


def shape_of(model: str) -> str:
    """The name in model-configs.json of what a table calls ``model``."""
    return SHAPES.get(model, model)


def joined(rows: Iterable[tuple[tuple[object, ...], Cell]]) -> list[Cell]:
    """Cells of one alternative each, joined by key; those with a single one are no decision."""
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for key, cell in rows:
        groups[key].append(cell)
    found = []
    for cells in groups.values():
        runs: dict[DeploymentConfig, list[Measured]] = defaultdict(list)
        for cell in cells:
            runs[cell.alternatives[0].config].append(cell.alternatives[0])
        if len(runs) > 1:
            alternatives = tuple(_mean(measured) for _, measured in sorted(runs.items()))
            estimates = tuple(estimate for cell in cells for estimate in cell.estimates)
            found.append(replace(cells[0], alternatives=alternatives, estimates=estimates))
    return found


def _mean(runs: list[Measured]) -> Measured:
    """Repeated runs of one alternative (whole runs only are ever repeated) as one."""
    if len(runs) == 1:
        return runs[0]
    return Measured(config=runs[0].config, e2e_s=float(np.mean([run.e2e_s for run in runs])))


def _row_cells(tables: Tables, title: str, rows: Iterable[Row]) -> list[Cell]:
    """Whole runs of a static batch, but for those faster than the peak figures allow: outputs ended early."""
    rows = list(rows)
    light = tables.errors(rows, LIGHT)
    return joined(
        (
            (row.engine, shape_of(row.model), row.gpu, row.workload),
            Cell(
                table=f"{title}, {row.engine}, {tables.gpu(row.gpu).name}",
                engine=row.engine,
                model=shape_of(row.model),
                spec=tables.spec(row.model),
                gpu=tables.gpu(row.gpu),
                workload=row.workload,
                alternatives=(Measured(config=row.config, e2e_s=row.seconds),),
            ),
        )
        for row, error in zip(rows, light, strict=True)
        if error >= 0
    )


def bench_cells(tables: Tables) -> list[Cell]:
    """LLM-Inference-Bench: TP 1, 2, 4 and, from its table on parallelism, PP and both on A100."""
    pipelines = pipeline_rows(tables)
    with_pp = {(row.engine, shape_of(row.model), row.gpu, row.workload) for row in pipelines}
    plain = bench_rows(tables, ("A100", "H100"))
    mixed = [row for row in plain if (row.engine, shape_of(row.model), row.gpu, row.workload) in with_pp]
    others = [row for row in plain if (row.engine, shape_of(row.model), row.gpu, row.workload) not in with_pp]
    return _row_cells(tables, "bench TP", others) + _row_cells(tables, "bench TP x PP", [*mixed, *pipelines])


def format_cells(tables: Tables) -> list[Cell]:
    """Llama-3-8B on one GPU under several formats of weights and KV."""
    return _row_cells(tables, "bench formats", quantized_rows(tables))


def splitwise_cells(tables: Tables) -> list[Cell]:
    """Llama-2-70B, TP 2, 4, 8: TTFT and TPOT, and the energy where power was recorded.

    E2E is put together from the two: where outputs ended early, the table's own is of fewer tokens.
    """
    power = {
        tuple(entry[name] for name in ("hardware", "tp", "batch", "isl", "osl_max")): entry["avg_power_frac_tdp"]
        for entry in tables.read("measured_splitwise_llama2_bloom.csv")
        if entry["model"] == "llama2-70b"
    }

    def rows() -> Iterator[tuple[tuple[object, ...], Cell]]:
        for first, later in zip(splitwise_rows(tables, "ttft"), splitwise_rows(tables, "tpot"), strict=True):
            config, work, gpu = first.config, first.workload, tables.gpu(first.gpu)
            e2e_s = first.seconds + (work.output_tokens - 1) * later.seconds
            key = (first.gpu, *map(str, (config.tp, work.batch, work.input_tokens, work.output_tokens)))
            energy_j = float(power[key] or 0) * gpu.tdp_w * config.num_gpus * e2e_s / work.batch
            yield (
                (first.gpu, work),
                Cell(
                    table=f"Splitwise, {gpu.name}",
                    engine=first.engine,
                    model=shape_of(first.model),
                    spec=tables.spec(first.model),
                    gpu=gpu,
                    workload=work,
                    alternatives=(
                        Measured(
                            config=config,
                            e2e_s=e2e_s,
                            ttft_s=first.seconds,
                            tpot_s=later.seconds,
                            energy_j=energy_j or None,
                        ),
                    ),
                ),
            )

    return joined(rows())


TRTLLM_MODELS = {
    "LLaMA v2 70B": "meta-llama/Llama-2-70b-hf",
    "LLaMA v3 70B": "meta-llama/Llama-3.1-70B",
    "LLaMA v3.1 70B": "meta-llama/Llama-3.1-70B",
    "LLaMA v2 7B": "meta-llama/Llama-2-7b-hf",
    "LLaMA v3 8B": "meta-llama/Llama-3.1-8B",
    "LLaMA v3.1 8B": "meta-llama/Llama-3.1-8B",
    "GPTJ 6B": "EleutherAI/gpt-j-6b",
    "Mistral 7B": "mistralai/Mistral-7B-v0.1",
    "Mixtral 8x7B": "mistralai/Mixtral-8x7B-v0.1",
}
TRTLLM_GPUS = {
    "A100 SXM4 80GB": "a100-80gb-sxm",
    "A100 PCIe 80GB": "a100-80gb-pcie",
    "H100 SXM 80GB": "h100-sxm",
    "H200 SXM 141GB": "h200-sxm",
    "L40S 48GB": "l40s",
}
# "FP8" is NVIDIA's recipe, whose KV cache is fp8 too; "mixed16" are 16-bit weights.
TRTLLM_FORMATS = {
    "FP8": (WeightFormat.FP8, KvFormat.FP8),
    "FP16": (WeightFormat.BITS16, KvFormat.BITS16),
    "mixed16": (WeightFormat.BITS16, KvFormat.BITS16),
}


def trtllm_cells(tables: Tables, configs: dict[str, dict[str, object]]) -> list[Cell]:
    """NVIDIA's maximum throughput: all requests queued at once, the batch is whatever memory holds."""

    def rows() -> Iterator[tuple[tuple[object, ...], Cell]]:
        for entry in tables.read("measured_trtllm_throughput.csv"):
            model, gpu = TRTLLM_MODELS.get(entry["model"]), TRTLLM_GPUS.get(entry["gpu"])
            if model is None or gpu is None or entry["precision"] not in TRTLLM_FORMATS:
                continue
            weights, kv = TRTLLM_FORMATS[entry["precision"]]
            config = DeploymentConfig(tp=int(entry["tp"]), pp=int(entry["pp"]), weights=weights, kv=kv)
            workload = Workload(1, int(entry["isl"]), int(entry["osl"]))
            yield (
                (entry["trtllm_version"], entry["model"], gpu, workload),
                Cell(
                    table=f"TensorRT-LLM {entry['trtllm_version']} saturated, {gpu}",
                    engine="TensorRT-LLM",
                    model=model,
                    spec=read_spec(configs[model]),
                    gpu=gpu_spec(gpu),
                    workload=workload,
                    alternatives=(Measured(config=config, tokens_per_s=float(entry["output_tok_per_s"])),),
                    saturated=True,
                ),
            )

    return joined(rows())


SAMPLE_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
}
SAMPLE_GPUS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
SAMPLE_ENGINES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang"}
# An empty cell: the checkpoint as published, 16 bits. fp4 is not in the space. NVIDIA's fp8 checkpoints of these
# models ask for an fp8 KV cache; the table does not tell.
SAMPLE_FORMATS = {"": (WeightFormat.BITS16, KvFormat.BITS16), "fp8": (WeightFormat.FP8, KvFormat.FP8)}


def sample_cells(path: Path, configs: dict[str, dict[str, object]]) -> list[Cell]:
    """The measured points that AIConfigurator's own package ships (``silicon_sample.csv``): served, dense models.

    Read where that package is installed and not copied. E2E is one request's, TTFT + (output - 1) x TPOT; the
    GPUs work on ``batch`` of them at once.
    """

    def rows() -> Iterator[tuple[tuple[object, ...], Cell]]:
        with path.open() as file:
            for entry in csv.DictReader(file):
                model, gpu = SAMPLE_MODELS.get(entry["model_path"]), SAMPLE_GPUS.get(entry["system"])
                if (
                    entry["mode"] != "agg"
                    or model is None
                    or gpu is None
                    or entry["precision"] not in SAMPLE_FORMATS
                ):
                    continue
                weights, kv = SAMPLE_FORMATS[entry["precision"]]
                batch, osl = int(float(entry["batch_size"])), int(entry["osl"])
                ttft_s, tpot_s = float(entry["silicon_ttft_ms"]) / 1e3, float(entry["silicon_tpot_ms"]) / 1e3
                config = DeploymentConfig(tp=int(float(entry["tp_size"])), weights=weights, kv=kv)
                workload = Workload(batch, int(entry["isl"]), osl)
                measured = Measured(config=config, e2e_s=ttft_s + (osl - 1) * tpot_s, ttft_s=ttft_s, tpot_s=tpot_s)
                engine = SAMPLE_ENGINES[entry["backend"]]
                yield (
                    (engine, entry["backend_version"], entry["model_path"], gpu, workload, weights),
                    Cell(
                        table=f"served sample, {engine}, {gpu}",
                        engine=engine,
                        model=model,
                        spec=read_spec(configs[model]),
                        gpu=gpu_spec(gpu),
                        workload=workload,
                        alternatives=(measured,),
                        served=True,
                    ),
                )

    return joined(_without_repeats(rows()))


def _without_repeats(rows: Iterable[tuple[tuple[object, ...], Cell]]) -> Iterator[tuple[tuple[object, ...], Cell]]:
    """The first of several measurements of one alternative: the sample holds reruns of other engine versions."""
    seen = set()
    for key, cell in rows:
        if (known := (key, cell.alternatives[0].config)) not in seen:
            seen.add(known)
            yield key, cell
