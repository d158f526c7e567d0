"""Writes docs/cli.md and docs/rest.md from the code: ``python docs/generate.py`` (``--check`` only compares)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.main import get_command

DOCS = Path(__file__).parent


def cli_reference() -> str:
    """Every command with its help, as ``--help`` prints it."""
    from typer import Context

    from iserve.cli.app import app

    root = get_command(app)
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
    """Every route of the REST API with its body and answer."""
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
        '(`iserve keys create --scope admin`). Errors are `{"error": CLASS, "message": TEXT}`.\n'
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"## `{method.upper()} {path}`\n")
            if text := route.get("description"):
                parts.append(inspect.cleandoc(text) + "\n")
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for status, answer in route["responses"].items():
                if status != "422":
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


PAGES = {"cli.md": cli_reference, "rest.md": rest_reference}


def main() -> int:
    """1 when ``--check`` finds a page that the code no longer says."""
    stale = []
    for name, make in PAGES.items():
        text = make().rstrip() + "\n"
        path = DOCS / name
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.write_text(text)
    if stale:
        print(f"docs are not what the code says: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
