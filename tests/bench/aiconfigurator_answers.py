"""AIConfigurator's answers for the alternatives of decision cells, asked through ``aiconfigurator_static.py``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fingerprint.config import DeploymentConfig, Workload
from tests.bench.decision_rules import Cell, Measured, workloads
from traces.baselines.aiconfigurator import AIC_SYSTEMS

AIC_SCRIPT = Path(__file__).with_name("aiconfigurator_static.py")
AIC_BACKENDS = {"TensorRT-LLM": "trtllm", "vLLM": "vllm", "SGLang": "sglang", "Splitwise": "vllm"}

AicKey = tuple[str, str, str, DeploymentConfig, Workload]  # model, system, backend


def _aic_key(cell: Cell, config: DeploymentConfig, workload: Workload) -> AicKey | None:
    system, backend = AIC_SYSTEMS.get(cell.gpu.name), AIC_BACKENDS.get(cell.engine)
    return None if system is None or backend is None else (cell.model, system, backend, config, workload)


class Aiconfigurator:
    """Answers of AIConfigurator for every alternative of the cells, asked in a process of its own environment."""

    def __init__(self, answers: dict[tuple[str, AicKey], dict]) -> None:
        self._answers = answers

    def knows(self, cell: Cell) -> bool:
        """Return whether it predicts at least one of the alternatives."""
        return any(self._seen(cell, a.config) for a in cell.alternatives)

    def __call__(self, cell: Cell, config: DeploymentConfig) -> Measured | None:
        """Return its figures as if measured; None where it has none or, by its own memory figures, it does not
        fit.
        """
        room = cell.gpu.memory_bytes / 2**30
        fitting = [(w, a) for w, a in self._seen(cell, config) if a["memory_gib"]["total"] <= room]
        if not fitting:
            return None
        if cell.saturated:
            best = max(answer["output_tokens_per_s"] for _, answer in fitting)
            return Measured(config=config, tokens_per_s=best)
        workload, answer = fitting[0]
        e2e_s = answer["ttft_s"] + (workload.output_tokens - 1) * answer["tpot_s"]
        return Measured(config=config, e2e_s=e2e_s, ttft_s=answer["ttft_s"], tpot_s=answer["tpot_s"])

    def _seen(self, cell: Cell, config: DeploymentConfig) -> list[tuple[Workload, dict]]:
        found = []
        for workload in workloads(cell):
            key = _aic_key(cell, config, workload)
            answer = None if key is None else self._answers.get((_mode(cell), key))
            if answer is not None and "reason" not in answer:
                found.append((workload, answer))
        return found


def _mode(cell: Cell) -> str:
    return "agg" if cell.saturated or cell.served else "static"


def ask_aiconfigurator(
    python: Path, cells: Sequence[Cell], configs: Path, keep: Path
) -> tuple[Aiconfigurator, dict[str, str]]:
    """Every alternative of ``cells`` put to the AIConfigurator of ``python``; and which versions answered.

    Questions and answers lie in ``keep``; answers already there are taken where the questions are the same.
    """
    asked = {
        (_mode(cell), key): None
        for cell in cells
        for alternative in cell.alternatives
        for workload in workloads(cell)
        if (key := _aic_key(cell, alternative.config, workload)) is not None
    }
    points = [question(mode, key) for mode, key in asked]
    questions, answers = keep / "points.json", keep / "answers.json"
    text = json.dumps(points)
    if not (answers.exists() and questions.exists() and questions.read_text() == text):
        questions.write_text(text)
        answers.unlink(missing_ok=True)
        command = [python, AIC_SCRIPT, "--configs", configs, "--points", questions, "--json", answers]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document = json.loads(answers.read_text())
    versions = {"aiconfigurator": document["aiconfigurator"]}
    for answer in document["answers"]:
        point = answer["point"]
        versions[f"{point['backend']} on {point['system']}"] = answer.get("version", "no data")
    return Aiconfigurator(dict(zip(asked, document["answers"], strict=True))), versions


def question(mode: str, key: AicKey) -> dict[str, object]:
    """A ``Point`` of the script that asks, which runs where nothing of this project is installed."""
    model, system, backend, config, workload = key
    return {
        "model": model,
        "system": system,
        "backend": backend,
        "mode": mode,
        "tp": config.tp,
        "pp": config.pp,
        "weights": config.weights,
        "kv": config.kv,
        "batch": workload.batch,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
    }


def sample_path(python: Path) -> Path:
    """Return the measured points in AIConfigurator's package."""
    code = "import aiconfigurator_core as a, pathlib; print(pathlib.Path(a.__file__).parent)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "systems" / "silicon_sample.csv"
