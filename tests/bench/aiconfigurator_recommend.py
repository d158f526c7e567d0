"""Recommendations of AIConfigurator 0.12.0 for the questions in a file, as JSON: its own search and its own pick.

Imports nothing of iServe: it runs in an environment of its own, started by ``aiconfigurator_worlds.py``.

A question without a rate is what ``aiconfigurator cli default --serving-mode agg`` is asked: GPUs, lengths and
limits; it answers with the configuration of most output tokens a second and GPU that keeps the limits by its
figures, and as many replicas as the GPUs hold. One with a rate is what ``aiconfigurator cli recommend`` is asked:
the fewest GPUs that serve the rate within the limits; of what that compares, one worker for prompts and answers.
Where a model needs more GPUs than the question has, it is asked again with twice as many.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BACKEND = "vllm"
GPUS_PER_NODE = 8
STEP, STEPS = 0.9, 22  # a limit that is to be tightened: to a tenth of it
REASON_CHARS = 200


class Said(logging.Handler):
    """Keeper of the last error that was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


class Asker:
    """Answers to questions, each model's config.json in a folder of its own."""

    def __init__(self, models: dict[str, dict[str, object]], folder: Path) -> None:
        self._said = Said()
        logging.getLogger().addHandler(self._said)
        self._folder = folder
        for name, config in models.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))

    def answer(self, question: dict[str, object]) -> dict[str, object]:
        """``advice``, or the ``reason`` why it recommends nothing."""
        gpus = int(question["gpus"])
        while True:
            found = self._asked(question, gpus)
            if "advice" in found or "KV cache" not in found["reason"] or 2 * gpus > int(question["most_gpus"]):
                return {"question": question} | found
            gpus *= 2

    def _asked(self, question: dict[str, object], gpus: int) -> dict[str, object]:
        limit, rate = question.get("request_latency_ms"), question.get("rate_per_s")
        if not question["tightest"]:
            return self._once(question, gpus, limit, rate)
        best = self._once(question, gpus, limit, None)
        low, high = 0, STEPS  # tightest limit known to be kept, and the first that is not
        while "advice" in best and low + 1 < high:
            middle = (low + high) // 2
            tighter = float(limit) * STEP**middle
            found = self._once(question, gpus, tighter, rate)
            advice = found.get("advice")
            if advice and advice["e2e_ms"] <= tighter and advice["gpus"] <= gpus:
                best, low = found, middle
            else:
                high = middle
        return best

    def _once(self, question: dict[str, object], gpus: int, limit: object, rate: object) -> dict[str, object]:
        from aiconfigurator.cli.api import _build_recommend_tasks
        from aiconfigurator.cli.main import _execute_tasks, build_default_tasks

        self._said.last = ""
        given = GPUS_PER_NODE if rate else gpus
        try:
            tasks = build_default_tasks(
                str(self._folder / str(question["model"])),
                given,
                str(question["system"]),
                backend=BACKEND,
                isl=int(question["input_tokens"]),
                osl=int(question["output_tokens"]),
                serving_mode="agg",
                **({"request_latency": float(limit)} if limit else {}),
                **({"database_mode": "HYBRID"} if rate else {}),  # as ``recommend`` has it
            )
            if rate:
                tasks = _build_recommend_tasks(tasks, given)
            _, best, _, _, _, outcomes = _execute_tasks(tasks, "default", top_n=1, target_request_rate=rate)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            # whatever it raises is its answer, and is kept
            said = self._said.last if isinstance(error, SystemExit) else f"{error}"
            return {"reason": said[:REASON_CHARS]}
        if "agg" not in best or best["agg"].empty:
            errors = [str(outcome.error) for outcome in outcomes.values() if outcome.error is not None]
            return {"reason": (" ".join(errors) or "no results")[:REASON_CHARS]}
        row = best["agg"].iloc[0]
        each = int(row["num_total_gpus"])
        replicas = int(row["replicas_needed"]) if rate else gpus // each
        advice = {
            "gpus": replicas * each,
            "tp": int(row["tp"]),
            "pp": int(row["pp"]),
            "replicas": replicas,
            "batch": int(row["bs"]),
            "ttft_ms": round(float(row["ttft"]), 1),
            "tpot_ms": round(float(row["tpot"]), 2),
            "e2e_ms": round(float(row["request_latency"]), 1),
            "tokens_per_s_per_gpu": round(float(row["tokens/s/gpu"]), 1),
        }
        if limit:
            advice["limit_ms"] = round(float(limit), 1)
        return {"backend_version": str(row["version"]), "advice": advice}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="JSON object of models and questions")
    parser.add_argument("--json", type=Path, required=True, help="where the answers go")
    options = parser.parse_args()
    logging.getLogger("aiconfigurator").setLevel(logging.ERROR)
    asked, start = json.loads(options.questions.read_text()), time.monotonic()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(asked["models"], Path(folder))
        for number, question in enumerate(asked["questions"]):
            answers.append(asker.answer(question))
            if number % 20 == 19:
                print(f"{number + 1} of {len(asked['questions'])}", file=sys.stderr, flush=True)
    document = {"aiconfigurator": version("aiconfigurator"), "seconds": time.monotonic() - start}
    options.json.write_text(json.dumps(document | {"answers": answers}))


if __name__ == "__main__":
    main()
