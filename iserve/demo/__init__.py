"""The bundled demo model: a byte-level Llama of 8 layers, made by ``iserve.demo.train``."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

__all__ = ["DEMO_MODEL_NAME", "demo_model_path"]

DEMO_MODEL_NAME = "iserve-demo"


def demo_model_path() -> Path:
    """Return the folder of the bundled checkpoint (packages are installed unzipped, so it is a real folder)."""
    with as_file(files("iserve.demo") / "model") as path:
        return path
