"""Recommendations of AIConfigurator 0.12.0, as JSON: its own search, objective and limits.

Imports nothing of iServe.

It runs in an environment of its own (``pip install aiconfigurator==0.12.0``; it is no dependency of iServe):

    python tests/bench/aiconfigurator_choice.py --configs $ISERVE_REFERENCE_DATA/reference/model-configs.json \
        --json tests/bench/results/aiconfigurator_choices.json

Asked is what ``aiconfigurator cli default`` is asked: a checkpoint, GPUs, lengths and limits; it answers with the
configuration of most output tokens a second and GPU that keeps the limits by its figures. Formats are the
checkpoint's, so that 8 bits are asked for with an fp8 checkpoint's config.json. Of what it compares, one worker
for prompts and answers (``agg``) and workers for each (``disagg``), only the former can be deployed by iServe; the
latter's throughput is kept as well.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

SYSTEM, BACKEND, GPUS = "h200_sxm", "vllm", 4  # the GPUs of figure h200
INPUT_TOKENS, OUTPUT_TOKENS = 2048, 512  # what models are planned for there
# It refuses Mistral's architecture. The model is a Llama of the same sizes but for its window, which no request
# here is as long as, so it is asked for under that name too.
MODELS = (
    ("meta-llama/Llama-3.1-8B", None),
    ("mistralai/Mistral-7B-v0.1", None),
    ("mistralai/Mistral-7B-v0.1", "LlamaForCausalLM"),
)
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
FORMATS = {"16bit": {}, "fp8": FP8}
# Its own limits where none are given, in ms; the SLO of the longest request there; one that is tight.
LIMITS = ({"ttft": 2000.0, "tpot": 30.0}, {"request_latency": 26_000.0}, {"request_latency": 5_000.0})
NAMES = {"bfloat16": "16bit", "fp8": "fp8"}
ABOUT_THE_MODEL = ("planner", "source", "unconfirmed")  # what the configs file adds to each config.json
REASON_CHARS = 120


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question to AIConfigurator. ``architecture``: in place of the model's own."""

    model: str
    architecture: str | None
    weights: str  # of the checkpoint
    limits_ms: dict[str, float]

    def checkpoint(self, config: dict[str, object]) -> dict[str, object]:
        """The config.json that it is handed."""
        own = {key: value for key, value in config.items() if key not in ABOUT_THE_MODEL} | FORMATS[self.weights]
        if self.architecture is None:
            return own
        return own | {"architectures": [self.architecture], "model_type": "llama"}


def ask(question: Question, config: dict[str, object]) -> dict[str, object]:
    """``advice``, or the ``reason`` why it recommends nothing."""
    from aiconfigurator.cli.api import cli_default

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(question.checkpoint(config)))
        try:
            found = cli_default(
                folder,
                GPUS,
                SYSTEM,
                backend=BACKEND,
                isl=INPUT_TOKENS,
                osl=OUTPUT_TOKENS,
                top_n=1,
                **question.limits_ms,
            )
        except Exception as error:  # noqa: BLE001
            # whatever it raises is its answer, and is kept
            return {"reason": f"{type(error).__name__}: {error}"[:REASON_CHARS]}
    best = found.best_configs["agg"].iloc[0]
    advice = {
        "backend_version": str(best["version"]),
        "tp": int(best["tp"]),
        "pp": int(best["pp"]),
        "weights": NAMES[best["gemm"]],
        "kv": NAMES[best["kvcache"]],
        "batch": int(best["bs"]),
        "ttft_s": round(float(best["ttft"]) / 1e3, 4),
        "tpot_s": round(float(best["tpot"]) / 1e3, 5),
        "e2e_s": round(float(best["request_latency"]) / 1e3, 3),
        "tokens_per_s_per_gpu": round(float(best["tokens/s/gpu"]), 1),
        "disaggregated_tokens_per_s_per_gpu": round(float(found.best_throughputs.get("disagg", 0.0)), 1),
    }
    return {"advice": advice}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, required=True, help="JSON object of config.json by model name")
    parser.add_argument("--json", type=Path, required=True, help="where the answers go")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    configs, start, answers = json.loads(options.configs.read_text()), time.monotonic(), []
    for (model, architecture), weights, limits in product(MODELS, FORMATS, LIMITS):
        question = Question(model=model, architecture=architecture, weights=weights, limits_ms=limits)
        asked = {"model": model, "architecture": architecture, "checkpoint": weights, "limits_ms": limits}
        answers.append({"asked": asked} | ask(question, configs[model]))
    head = {
        "aiconfigurator": version("aiconfigurator"),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "wall_s": round(time.monotonic() - start, 1),
        "system": SYSTEM,
        "backend": BACKEND,
        "gpus": GPUS,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    lines = ",\n  ".join(json.dumps(answer) for answer in answers)
    options.json.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "answers": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
