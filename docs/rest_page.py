"""The REST API's reference: operations and types from the OpenAPI document, below the page's own text."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["rest_page"]

PAGE = Path(__file__).with_name("rest.md")
MARK = "<!-- Everything below is made by docs/generate.py from the code. -->"


def rest_page() -> str:
    """The page's text as it is, and the reference as the code says it now."""
    text, mark, _ = PAGE.read_text().partition(MARK)
    assert mark, f"{PAGE.name} has lost the line {MARK}"
    schema = openapi()
    return "\n".join([text + MARK, "", *_errors(schema), *_operations(schema), *_types(schema)])


def openapi() -> dict[str, Any]:
    """The document of a controller that runs nothing."""
    from iserve.controller.app import create_app
    from iserve.controller.service import Controller
    from iserve.settings import Settings
    from iserve.state.store import Store

    with TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder))
        store = Store.open(settings.home / "state.db")
        schema: dict[str, Any] = create_app(Controller(settings, store), "unused").openapi()
        store.close()
    return schema


def _errors(schema: dict[str, Any]) -> list[str]:
    found = {
        status: answer
        for methods in schema["paths"].values()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
        if "application/json" in answer.get("content", {}) and int(status) >= 400
    }
    rows = [
        f"| {status} | {answer['description']} | `{answer['content']['application/json']['example']['error']}` |"
        for status, answer in sorted(found.items())
    ]
    return [
        "## Errors\n",
        "The body of every error is a [Problem](#problem). Each operation lists its own.\n",
        "| status | meaning | such as |\n|---|---|---|",
        *rows,
        "",
    ]


def _operations(schema: dict[str, Any]) -> list[str]:
    parts = []
    for tag in schema["tags"]:
        parts.append(f"## {tag['name'].capitalize()}\n\n{tag['description']}\n")
        for path, methods in schema["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    parts += [
                        f"### `{method.upper()} {path}`\n",
                        operation["description"] + "\n",
                        *_call(operation),
                    ]
    return parts


def _call(operation: dict[str, Any]) -> list[str]:
    """Parameters, body and answers."""
    parts = []
    if rows := [
        f"| `{one['name']}` | {one['in']} | {_type(one['schema'])} | {_default(one, one['schema'])} "
        f"| {_cell(one['description'])} |"
        for one in operation.get("parameters", ())
    ]:
        parts.append(
            "| parameter | in | type | default | meaning |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    said = []
    if body := operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema"):
        said.append(f"Body: {_type(body)}.")
    errors = []
    for status, answer in operation["responses"].items():
        if int(status) >= 400:
            errors.append(status)
            continue
        content = answer.get("content", {})
        kind = _type(content.get("application/json", {}).get("schema", {})) or ("text" if content else "no body")
        said.append(f"Answer {status}: {kind}.")
    if errors:
        said.append(f"Errors: {', '.join(sorted(errors))}.")
    return [*parts, " ".join(said) + "\n"]


def _types(schema: dict[str, Any]) -> list[str]:
    parts = ["# Types\n"]
    for name, definition in sorted(schema["components"]["schemas"].items()):
        parts.append(f"## {name}\n\n{definition['description']}\n")
        if "enum" in definition:
            parts.append("One of " + ", ".join(f"`{value}`" for value in definition["enum"]) + ".\n")
        required = definition.get("required", [])
        if rows := [
            f"| `{field}` | {_type(kind)} | {_default({'required': field in required}, kind)} "
            f"| {_cell(kind['description'])} |"
            for field, kind in definition.get("properties", {}).items()
        ]:
            parts.append("| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n")
    return parts


def _default(place: dict[str, Any], kind: dict[str, Any]) -> str:
    if place.get("required"):
        return "required"
    value = kind.get("default")
    known = {None: "null", True: "true", False: "false"}
    return f"`{known[value] if value is None or isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(kind: dict[str, Any]) -> str:
    if "$ref" in kind:
        name = str(kind["$ref"]).rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_type(one) for one in kind["anyOf"])
    if kind.get("type") == "array":
        return f"list of {_type(kind.get('items', {})) or 'anything'}"
    return str(kind.get("type", ""))
