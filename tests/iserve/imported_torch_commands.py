"""The command line with what compressing a fine-tune, and a reference in a folder, import."""

from __future__ import annotations

from tests.fork_server import import_trimmed
from tests.iserve.imported_commands import main

__all__ = ["main"]

_USED = (
    "daemon.variants.compress",
    "daemon.variants.local_model",
    "transformers.models.llama.modeling_llama",  # of the demo model
)
import_trimmed(_USED)
