"""The bundled demo model, a byte-level Llama of 8 layers, and its variants (``iserve.demo.train*``)."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

__all__ = ["DEMO_MODEL_NAME", "demo_adapter_path", "demo_delta_path", "demo_model_path", "demo_quality_path"]

DEMO_MODEL_NAME = "iserve-demo"


def demo_model_path() -> Path:
    """Return the folder of the bundled checkpoint (packages are installed unzipped, so it is a real folder)."""
    return _bundled("model")


def demo_adapter_path(name: str) -> Path:
    """Return the folder of a bundled adapter: ``shout`` or ``capitals``."""
    return _bundled(f"adapters/{name}")


def demo_delta_path(name: str) -> Path:
    """Return the folder of a bundled delta: ``symbols``."""
    return _bundled(f"deltas/{name}")


def demo_quality_path() -> Path:
    """Return the prompts and answers that ``iserve quality`` asks the demo model and its variants."""
    return _bundled("quality.jsonl")


def _bundled(name: str) -> Path:
    with as_file(files("iserve.demo") / name) as path:
        return path
