"""Writer of the reference pages (``PAGES``) and README.md's answers from the code.

``python docs/generate.py``; with ``--check`` it only compares.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_tables import engine_tables
from gpu_page import gpu_page
from model_page import model_page
from typer.main import get_command

DOCS = Path(__file__).parent
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
        "Exit codes: 0 done (a plan with nothing feasible too); 1 refused or failed, with one line on standard\n"
        "error; 2 usage, bad option values included.\n"
    )

    def describe(command: object, path: list[str]) -> None:
        context = Context(command, info_name=" ".join(path), terminal_width=100, max_content_width=100)  # type: ignore[arg-type]
        parts.append(f"## {' '.join(path)}\n\n```\n{command.get_help(context).rstrip()}\n```\n")  # type: ignore[attr-defined]
        for name, child in getattr(command, "commands", {}).items():
            describe(child, [*path, name])

    describe(root, ["iserve"])
    return "\n".join(parts)


def rest_reference() -> str:
    """Return every route of the REST API with its body and answer."""
    from iserve.controller.app import create_app
    from iserve.controller.service import Controller
    from iserve.settings import Settings
    from iserve.state.store import Store

    with TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder))
        store = Store.open(settings.home / "state.db")
        schema = create_app(Controller(settings, store), "unused").openapi()
        store.close()
    parts = [
        "# REST API\n\n"
        "Made by `docs/generate.py` from the code. The base URL is the controller's (`iserve status`).\n"
        "Every `/api/v1` route and `/metrics` wants `Authorization: Bearer KEY` with an API key of scope `admin`\n"
        "(`iserve keys create --scope admin`). What is not known, a field of a body or a query parameter, is\n"
        "refused by name. An API key names models by a registered name, a Hugging Face id, or a folder within\n"
        "`ISERVE_MODEL_FOLDERS`. Errors are a [Problem](#problem), with one of these:\n\n"
        "| status | what |\n|---|---|\n"
        + "\n".join(f"| {status} | {answer['description']} |" for status, answer in _problems(schema))
        + "\n"
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"## `{method.upper()} {path}`\n")
            if text := route.get("description"):
                parts.append(inspect.cleandoc(text) + "\n")
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for status, answer in route["responses"].items():
                if int(status) < 400:  # the rest are alike, and in the page's head
                    content = answer.get("content", {}).get("application/json", {}).get("schema", {})
                    parts.append(f"Answer {status}: {_type(content) or 'text or nothing'}.\n")
            if body:
                parts.append(f"Body: {_type(body)}.\n")
    parts.append("# Types\n")
    for name, definition in sorted(schema["components"]["schemas"].items()):
        if name in {"HTTPValidationError", "ValidationError"}:
            continue
        parts.append(f"## {name}\n")
        if text := definition.get("description"):
            parts.append(inspect.cleandoc(text) + "\n")
        if "enum" in definition:
            parts.append("One of " + ", ".join(f"`{value}`" for value in definition["enum"]) + ".\n")
        rows = [
            f"| `{field}` | {_type(kind)} | {_default(field, kind, definition)} |"
            for field, kind in definition.get("properties", {}).items()
        ]
        if rows:
            parts.append("| field | type | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _problems(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every answer of an error, once."""
    found = {
        status: answer
        for methods in schema["paths"].values()
        for route in methods.values()
        for status, answer in route["responses"].items()
        if int(status) >= 400 and "content" in answer
    }
    return sorted(found.items())


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


def _default(field: str, kind: dict[str, object], definition: dict[str, object]) -> str:
    required = definition.get("required", [])
    assert isinstance(required, list)
    return "required" if field in required else f"`{kind.get('default')}`"


def _type(schema: dict[str, object]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])  # type: ignore[attr-defined]
    if schema.get("type") == "array":
        items = schema.get("items", {})
        assert isinstance(items, dict)
        return f"list of {_type(items) or 'anything'}"
    return str(schema.get("type", ""))


def readme() -> str:
    """The page as it is, with the answer under every ``$ iserve ...`` as it is now.

    Blocks fenced as ``console`` are of other machines and are left as they are.
    """
    with TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(_LLAMA_2 | config))

        def answered(block: re.Match[str]) -> str:
            return f"```\n$ {block[1]}\n{_answer(shlex.split(block[1]), Path(folder))}\n```"

        return re.sub(r"```\n\$ (iserve .*)\n(?:(?!```).*\n)*```", answered, README.read_text())


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


PAGES = {
    DOCS / "cli.md": cli_reference,
    DOCS / "rest.md": rest_reference,
    DOCS / "configuration.md": configuration,
    DOCS / "engine-tables.md": engine_tables,
    DOCS / "gpus.md": gpu_page,
    DOCS / "models.md": model_page,
    README: readme,
}


def main() -> int:
    """Write or check the pages; return 1 when ``--check`` finds a page that the code no longer says."""
    stale = []
    for path, make in PAGES.items():
        text = make().rstrip() + "\n"
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(path.name)
        else:
            path.write_text(text)
    if stale:
        print(f"docs are not what the code says: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
