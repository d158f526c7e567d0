"""Frame of every HTML page of the project: a head with the style sheet, no script, no other page's address."""

from __future__ import annotations

from importlib.resources import files

from iserve.report.markup import Child, Markup, el, join

__all__ = ["html_page", "sectioned"]


def html_page(title: str, *body: Child) -> str:
    """Return a self-contained HTML page: works from a file, offline, in light and dark."""
    style = files("iserve.report").joinpath("report.css").read_text(encoding="utf-8")
    page = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("title", title),
            el("style", Markup(style)),
        ),
        el("body", *body),
        lang="en",
    )
    return str(join(Markup("<!DOCTYPE html>\n"), page, "\n"))


def sectioned(head: Child, sections: tuple[tuple[str, str, Markup | None], ...], footer: Child) -> Markup:
    """Return head, contents, and of each (anchor, heading, body) that has something to say a section."""
    filled = [(anchor, name, body) for anchor, name, body in sections if body is not None]
    return el(
        "main",
        head,
        el("nav", [el("a", name, href=f"#{anchor}") for anchor, name, _ in filled], aria_label="Contents"),
        [el("section", el("h2", name), body, id=anchor) for anchor, name, body in filled],
        el("footer", footer),
    )
