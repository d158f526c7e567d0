"""Record AIConfigurator's answers for the worlds of ``notebooks/worlds``, in ``aiconfigurator.json.gz`` there.

Run: ``pip install aiconfigurator==0.12.0`` in an environment of its own (it is no dependency of iServe; some 850
MB, no PyTorch), then, with that environment's interpreter:

    python -m tests.bench.aiconfigurator_worlds --python .aic/bin/python [--processes 2]

Models, lengths, parts of the GPUs, SLOs and rates are those that each world gives its contestants, for each seed
and with and without rates; ``iserve/evaluation/aiconfigurator.py`` says what is asked for which intent. A model's
config.json is the world's. Mistral's architecture is refused, and the models are Llamas of their sizes (no
attention window), so they are asked for as such. Formats are 16 bits, as the worlds have them. Answers that are in
the file already are kept where the question is the same; without the file everything is asked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from iserve.evaluation.aiconfigurator import ANSWERS, Answer, Question, RecordedAnswers, questions, read_answers
from iserve.evaluation.arena import Arena, make_arena
from iserve.evaluation.world import Information
from iserve.evaluation.world_file import read_world
from traces.baselines.aiconfigurator import AIC_SYSTEMS

SCRIPT = Path(__file__).with_name("aiconfigurator_recommend.py")
WORLDS = Path(__file__).parents[2] / "notebooks" / "worlds"
# Changes of the worlds that are recorded, and seeds; SLOs follow the truth.
RUNS: dict[tuple[str, ...], int] = {(): 3, ("truth.all_reduce=4",): 1}
AS_LLAMA = {"MistralForCausalLM": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}}


def asked_in(arena: Arena) -> Iterator[tuple[str, Question]]:
    """Yield deployments and what is asked of them, in one world for one seed."""
    for intent in arena.world.intents:
        there = 0
        for _, names in arena.groups:
            yield from questions(arena.situation(names, intent, arena.cluster), there).items()
            there += len(names)


def all_questions(seeds: int) -> tuple[dict[Question, int], dict[str, dict[str, Any]]]:
    """Return every question with the number of GPUs of its world, and the models' config.json by shape."""
    asked: dict[Question, int] = {}
    configs: dict[str, dict[str, Any]] = {}
    for path, (changes, of_seeds) in product(sorted(WORLDS.glob("*.yaml")), RUNS.items()):
        stated = read_world(path, changes)
        given = {model.name: model.config for model in stated.models}
        for seed in stated.seeds[: min(seeds, of_seeds)]:
            arena = make_arena(stated, seed, path.parent)
            for information in (Information.NONE, Information.RATES):
                of = replace(arena, world=replace(stated, information=information))
                for name, question in asked_in(of):
                    asked[question] = len(arena.cluster.gpus)
                    config = given[name]
                    assert config is not None, "the worlds there state their models' shapes"
                    configs[question.model] = config
    return asked, configs


def put(python: Path, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to each part of the questions, asked in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, part in enumerate(parts):
            questions_file, answers = Path(folder) / f"{number}.json", Path(folder) / f"{number}-answers.json"
            questions_file.write_text(json.dumps(part))
            command = [python, SCRIPT, "--questions", questions_file, "--json", answers]
            running.append((subprocess.Popen(command, stdout=subprocess.DEVNULL), answers))
        found = []
        for process, answers in running:
            if process.wait():
                raise SystemExit(f"{SCRIPT.name} ended with {process.returncode}")
            found.append(json.loads(answers.read_text()))
        return found


def as_written(question: Question, most_gpus: int) -> dict[str, Any]:
    """Return a question for the script that asks, which runs where nothing of this project is."""
    fields: dict[str, Any] = json.loads(to_json(question))
    return fields | {"system": AIC_SYSTEMS.get(question.gpu, question.gpu), "most_gpus": most_gpus}


def refusals(python: Path, asked: dict[Question, int], configs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the reasons for which models are refused by their own architecture, by shape."""
    names = {name for name, config in configs.items() if set(config["architectures"]) & set(AS_LLAMA)}
    first = {
        name: next(one for one in asked if one.model == name and one.gpu in AIC_SYSTEMS) for name in sorted(names)
    }
    part = {
        "models": {name: configs[name] for name in first},
        "questions": [as_written(one, one.gpus) for one in first.values()],
    }
    (found,) = put(python, [part])
    return dict(zip(first, (str(one["reason"]) for one in found["answers"]), strict=True))


def as_asked(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that AIConfigurator is handed."""
    (architecture,) = config["architectures"]
    return config | AS_LLAMA.get(architecture, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of AIConfigurator's environment")
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="for the record")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, help="the first so many of each world")
    parser.add_argument("--json", type=Path, default=WORLDS / ANSWERS, help="where the answers go")
    options = parser.parse_args()
    asked, configs = all_questions(options.seeds)
    kept = read_answers(options.json) if options.json.exists() else None
    known = {} if kept is None else {one.question: one for one in kept.answers}
    refused = refusals(options.python, asked, configs)
    handed = {name: as_asked(config) for name, config in configs.items()}
    written = [as_written(question, most) for question, most in asked.items() if question not in known]
    parts = [{"models": handed, "questions": written[n :: options.processes]} for n in range(options.processes)]
    began = datetime.now(UTC)
    found = put(options.python, parts)
    answers = known | {one.question: one for part in found for one in map(_answer, part["answers"])}
    versions = {one["backend_version"] for part in found for one in part["answers"] if "backend_version" in one}
    recorded = RecordedAnswers(
        aiconfigurator=str(found[0]["aiconfigurator"]),
        backend=f"vllm {', '.join(sorted(versions))}",
        date=began.date().isoformat(),
        machine=options.machine,
        seconds=round((datetime.now(UTC) - began).total_seconds() + (kept.seconds if kept else 0.0), 1),
        as_llama=refused,
        answers=tuple(answers[question] for question in asked),
    )
    data = to_json(recorded)
    options.json.write_bytes(gzip.compress(data, mtime=0) if options.json.suffix == ".gz" else data)


def _answer(found: dict[str, Any]) -> Answer:
    question = {key: value for key, value in found["question"].items() if key not in ("system", "most_gpus")}
    kept = {"question": question} | {key: found[key] for key in ("advice", "reason") if key in found}
    return from_json(json.dumps(kept), Answer, what="an answer")


if __name__ == "__main__":
    main()
