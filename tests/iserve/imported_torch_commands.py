"""The command line with what compressing a fine-tune, and a reference in a folder, import."""

from __future__ import annotations

from importlib import import_module

from daemon.torch_engine.trimmed_imports import trimmed_imports
from tests.iserve.imported_commands import main

__all__ = ["main"]

_USED = (
    "daemon.variants.compress",
    "daemon.variants.local_model",
    "transformers.models.llama.modeling_llama",  # of the demo model
)
with trimmed_imports():
    for _name in _USED:
        import_module(_name)
