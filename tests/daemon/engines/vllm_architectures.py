"""Recorder of ``daemon/engines/vllm/architectures.json`` and ``daemon/sources/transformers.json``.

They hold what the newest release's published wheel says, and that of the transformers that it takes.

Recorded again, of the release that ``daemon.engines.vllm.release`` calls the newest, by::

    python -m tests.daemon.engines.vllm_architectures

which downloads its wheel (some 330 MB) and that of the newest transformers that it takes with pip;
``--unpacked FOLDER`` reads the packages ``vllm`` and ``transformers`` that lie there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from daemon.engines.vllm import architectures
from daemon.engines.vllm.model_registry import Registry, read_registry
from daemon.engines.vllm.release import NEWEST
from daemon.sources import transformers_classes
from daemon.sources.transformers_classes import Transformers, read_transformers
from fingerprint.codec import to_builtins
from tests.daemon.engines.vllm_releases import download, requirement_of, version_of

REGISTRY = Path(architectures.__file__).with_name("architectures.json")
TRANSFORMERS = Path(transformers_classes.__file__).with_name("transformers.json")


def published(folder: Path) -> tuple[Registry, Transformers]:
    """Return what the wheels say that the package index has; they are unpacked in ``folder``."""
    download(f"vllm=={NEWEST}", folder)
    download(requirement_of(folder, "vllm", "transformers"), folder)
    return unpacked(folder)


def unpacked(folder: Path) -> tuple[Registry, Transformers]:
    """Return what the packages in ``folder`` say."""
    return (
        read_registry(folder / "vllm", version_of(folder, "vllm")),
        read_transformers(folder / "transformers", version_of(folder, "transformers")),
    )


def written(recorded: Registry | Transformers) -> str:
    """Return a file's text, a line for each architecture."""
    return _text(to_builtins(recorded), "") + "\n"


def _text(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not any(isinstance(one, (dict, list)) for one in value.values()):
        if isinstance(value, dict) and indent == "  " and value:
            rows = [f"{indent}  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()]
            return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
        return json.dumps(value)
    rows = [f"{indent}  {json.dumps(name)}: {_text(one, indent + '  ')}" for name, one in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unpacked", type=Path, help="the folder that holds both packages, with their metadata")
    options = parser.parse_args()
    if options.unpacked:
        found = unpacked(options.unpacked)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = published(Path(folder))
    registry, transformers = found
    REGISTRY.write_text(written(registry))
    TRANSFORMERS.write_text(written(transformers))
    text = registry.text.values()
    print(
        f"vLLM {registry.version}: {len(text)} architectures generate text, "
        f"{sum(one.multimodal for one in text)} of them multimodal, {sum(one.by_transformers for one in text)} of "
        f"them by the Transformers backend; transformers {transformers.version}: "
        f"{len(transformers.classes)} classes"
    )


if __name__ == "__main__":
    main()
