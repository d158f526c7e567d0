"""File formats of requests, by name.

A new format is a module, a line here, a subclass of the conformance suite (tests/traces/format_conformance.py) and
a row of the table in docs/traces.md, without which that suite fails.
"""

from __future__ import annotations

from traces.formats.azure import AZURE
from traces.formats.base import TraceFormat
from traces.formats.burstgpt import BURSTGPT
from traces.formats.mooncake import MOONCAKE
from traces.formats.plain_csv import CSV
from traces.formats.servegen_folder import SERVEGEN_FOLDER
from traces.formats.servegen_series import SERVEGEN_CLIENTS, SERVEGEN_RATE

__all__ = ["FORMATS", "TraceFormat"]

FORMATS: dict[str, TraceFormat] = {
    known.name: known
    for known in (CSV, AZURE, MOONCAKE, BURSTGPT, SERVEGEN_RATE, SERVEGEN_CLIENTS, SERVEGEN_FOLDER)
}
