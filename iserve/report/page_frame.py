"""Templates of the pages: self-contained HTML without scripts, whose every value is escaped by Jinja2.

A rendered page is well-formed XML, from which the Markdown is made. Names of models are hostile input.
"""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from iserve.report import text

__all__ = ["environment", "render"]

_LAYOUT = re.compile(r">\s*\n\s*<")  # line breaks between tags are a template's, not the page's
_TEXT_FILTERS = (
    text.gib,
    text.label,
    text.number,
    text.percent,
    text.range_of,
    text.seconds,
    text.workload_text,
)


@cache
def environment() -> Environment:
    """Return the pages' templates, with the functions of ``text`` as filters."""
    made = Environment(
        loader=PackageLoader("iserve.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {filter_.__name__: filter_ for filter_ in _TEXT_FILTERS}
    made.filters |= {"share": "{:.1%}".format, "thousands": "{:,}".format, "whole": "{:,.0f}".format}
    return made


def render(template: str | Template, **values: object) -> str:
    """Return a page that works from a file, offline, in light and dark."""
    return "<!DOCTYPE html>\n" + _LAYOUT.sub("><", environment().get_template(template).render(values)) + "\n"


def _shown(value: object) -> object:
    """Return a value as a page holds it; Jinja2 then escapes what is no markup."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return text.page_text(value)
    return "" if value is None else value
