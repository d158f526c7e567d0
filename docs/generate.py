"""Writer of the reference pages, README.md's answers and tables of recorded results.

What is made from the code is in ``CODE``, pages with tables of recorded results are in ``RESULTS``. The prose of
every page is wrapped at 100 columns, but for decisions. ``python docs/generate.py``; with ``--check`` it only
compares.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from engine_tables import engine_tables
from gpu_page import gpu_page
from measured_tables import with_tables
from model_page import model_page
from rest_page import rest_page
from typer.main import get_command
from wrap import wrapped

DOCS = Path(__file__).parent
DECISIONS = DOCS / "decisions"
README = DOCS.parent / "README.md"

_LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float16",
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Facts of the published models, as many as a plan needs.
CONFIGS = {
    "Llama-2-7b-hf": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "Llama-2-70b-hf": {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def cli_reference() -> str:
    """Return every command with its help, as ``--help`` prints it."""
    from typer import Context

    from iserve.cli.app import make_app

    root = get_command(make_app())
    parts = [
        "# Command line\n\nMade by `docs/generate.py` from the code. Options shown in brackets have a default.\n"
    ]
    parts.append(
        "Exit codes: 0 done; 1 refused or failed, with one line on standard error, or a plan with nothing\n"
        "feasible; 2 usage, bad option values included.\n"
    )

    def describe(command: object, path: list[str]) -> None:
        context = Context(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)  # type: ignore[arg-type]
        parts.append(f"## {' '.join(path)}\n\n```\n{command.get_help(context).rstrip()}\n```\n")  # type: ignore[attr-defined]
        for name, child in getattr(command, "commands", {}).items():
            describe(child, [*path, name])

    describe(root, ["iserve"])
    return "\n".join(parts)


def configuration() -> str:
    """Every setting with its default, what it takes and what it means."""
    from iserve.settings import setting_rows

    rows = [f"| `{row.variable}` | {row.default} | {row.takes} | {row.meaning} |" for row in setting_rows()]
    return (
        "# Configuration\n\n"
        "Made by `docs/generate.py` from `iserve/settings.py`. Settings are environment variables, read when a\n"
        "process starts. A command-line option comes before its variable, that before the default. An unknown\n"
        "`ISERVE_` variable, or a value that cannot be read, is an error. On a home that runs, `iserve up`\n"
        "with other settings says what differs and changes nothing: run `iserve down`, then `iserve up`.\n\n"
        "| variable | default | takes | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n\n"
        "The Hugging Face hub has variables of its own; with `HF_HUB_OFFLINE=1` nothing is asked of it.\n"
    )


def answered(path: Path) -> Callable[[], str]:
    """Return how a page gets its tables, and the answer under every ``$ iserve ...`` as it is now.

    Blocks fenced as ``console`` are of other machines and are left as they are.
    """

    def page() -> str:
        with TemporaryDirectory() as folder:
            for name, config in CONFIGS.items():
                (Path(folder) / name).mkdir()
                (Path(folder) / name / "config.json").write_text(json.dumps(_LLAMA_2 | config))

            def answer(block: re.Match[str]) -> str:
                return f"```\n$ {block[1]}\n{_answer(shlex.split(block[1]), Path(folder))}\n```"

            return re.sub(r"```\n\$ (iserve .*)\n(?:(?!```).*\n)*```", answer, with_tables(path.read_text()))

    return page


def _answer(command: list[str], folder: Path) -> str:
    """Return what the command prints where nothing is set and nothing has ever run."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    done = subprocess.run(
        [sys.executable, "-c", "from iserve.cli import main; main()", *command[1:]],
        env=kept | {"ISERVE_HOME": str(folder / "home"), "PYTHONPATH": str(DOCS.parent)},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):  # 1: an answer too, that nothing is feasible
        done.check_returncode()
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def measured(page: str) -> Callable[[], str]:
    """Return how a page that is written by hand gets its tables of recorded results."""
    return lambda: with_tables((DOCS / page).read_text())


def world_schema() -> str:
    """Return the JSON schema of world files."""
    from iserve.evaluation.world_file import world_schema as schema

    return json.dumps(schema(), indent=2) + "\n"


# Of recorded results, with prose that is written by hand.
RESULTS = {
    DOCS / "accuracy.md": measured("accuracy.md"),
    DOCS / "decision_regret.md": measured("decision_regret.md"),
    DOCS / "fidelity.md": measured("fidelity.md"),
    DOCS / "operations.md": measured("operations.md"),
    DOCS / "performance.md": measured("performance.md"),
    DOCS / "risk.md": measured("risk.md"),
    DOCS / "placement.md": measured("placement.md"),
    DOCS / "adapters-measured.md": measured("adapters-measured.md"),
    DOCS / "deltas.md": measured("deltas.md"),
    DOCS / "variants.md": measured("variants.md"),
    DOCS / "worlds.md": measured("worlds.md"),
    DECISIONS / "0017-graph-sizes.md": measured("decisions/0017-graph-sizes.md"),
    DECISIONS / "0047-delta-kernels.md": measured("decisions/0047-delta-kernels.md"),
    DECISIONS / "0048-delta-plug-in.md": measured("decisions/0048-delta-plug-in.md"),
    DECISIONS / "0049-delta-scheduling.md": measured("decisions/0049-delta-scheduling.md"),
}
CODE = {
    DOCS / "world.schema.json": world_schema,
    DOCS / "cli.md": cli_reference,
    DOCS / "rest.md": rest_page,
    DOCS / "configuration.md": configuration,
    DOCS / "engine-tables.md": engine_tables,
    DOCS / "gpus.md": gpu_page,
    DOCS / "models.md": model_page,
    DOCS / "tour.md": answered(DOCS / "tour.md"),
    README: answered(README),
}


def stale(pages: Mapping[Path, Callable[[], str]]) -> list[str]:
    """Return the names of those pages that are not as they would be written."""
    texts = {path: _text(path, make) for path, make in pages.items()}
    return [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """Write pages, or return 1 where ``--check`` finds one that is not as it would be written.

    All of them, or one kind: ``code``, ``results`` or ``prose``.
    """
    by_hand = {path: path.read_text for path in DOCS.glob("*.md") if path not in RESULTS | CODE}
    kinds = {"code": CODE, "results": RESULTS, "prose": by_hand}
    asked = [word for word in sys.argv[1:] if word != "--check"] or list(kinds)
    pages = {path: make for kind in asked for path, make in kinds[kind].items()}
    if "--check" in sys.argv:
        if found := stale(pages):
            named = ", ".join(found)
            print(f"docs are not what the code says: {named}; run python docs/generate.py", file=sys.stderr)
        return bool(found)
    for path, make in pages.items():
        path.write_text(_text(path, make))
    return 0


def _text(path: Path, make: Callable[[], str]) -> str:
    text = make()
    return (wrapped(text) if path.suffix == ".md" and path.parent != DECISIONS else text).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
