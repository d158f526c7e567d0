"""Record what ``iserve plan`` makes of each architecture that vLLM lists, of its config.json alone.

    python -m tests.fingerprint.record_model_support

The config is the default one of transformers' config class, as ``family_truths`` has it. Each is planned for eight
H200 by the command line, and cut to the layers that a profile runs. ``docs/model_page.py`` makes the page of it.
"""

from __future__ import annotations

import datetime
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from daemon.engines.vllm.architectures import recorded_registry
from fingerprint.depth_tied_cuts import tied_depths
from fingerprint.errors import IserveError
from fingerprint.families import is_tabled, load_spec, read_config
from fingerprint.model_spec import ModelSpec
from fingerprint.truncate import generate_shape
from iserve.cli.app import make_app
from tests.fingerprint import family_truths

RECORD = Path(__file__).parent / "recorded" / "model_support.json"
PLAN = ("--gpus", "h200:8", "--engine", "vllm", "--json")
_LIBRARY = re.compile(r"requires the (\S+) library")


def document() -> dict[str, Any]:
    """Return the record of all architectures, as the file has it."""
    registry, truths = recorded_registry(), family_truths.document()
    return {
        "recorded": str(datetime.datetime.now(datetime.UTC).date()),
        "vllm": registry.version,
        "transformers": truths["transformers"],
        "architectures": {
            name: {"multimodal": one.multimodal, "by_transformers": one.by_transformers} | support_of(name)
            for name, one in registry.text.items()
        },
    }


def support_of(architecture: str) -> dict[str, Any]:
    """Return the support of one architecture; a step that fails has its reason."""
    truths = family_truths.document()
    truth = {**truths["multimodal"], **truths["architectures"]}[architecture]
    if "error" in truth:
        return {"model_type": truth.get("model_type"), "plan": _no_config(truth["error"])}
    held = family_truths.default(architecture)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model"
        whole.mkdir()
        (whole / "config.json").write_text(json.dumps(held.config))
        return {
            "model_type": truth["model_type"],
            "parameters": held.parameters,
            **_planned(whole, held.parameters),
        }


def _no_config(error: str) -> str:
    if "has no class" in error:
        return "no class in transformers"
    library = _LIBRARY.search(error)
    return f"transformers' class needs {library[1]}" if library else "builds no model by its own defaults"


def _planned(whole: Path, parameters: int) -> dict[str, Any]:
    answer = CliRunner().invoke(make_app(), ["plan", str(whole), *PLAN], env={"ISERVE_HOME": str(whole.parent)})
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        return {"plan": str(answer.exception)}
    plan = json.loads(answer.stdout)
    refusals = {row["refused_for"]: row["reason"] for row in plan["candidates"] if not row["feasible"]}
    if plan["chosen"] is None and "memory" not in refusals:
        return {"plan": "; ".join(refusals.values())}
    spec = load_spec(whole)
    if spec.num_params != parameters:
        return {"plan": f"{spec.num_params - parameters:+,} parameters against transformers' class"}
    return {
        "plan": None,
        "needs_torch": not is_tabled(read_config(whole)),
        "beside_parameters": spec.embedding_params - spec.vocab_size * spec.hidden_size,  # towers, positions
        **_cut(whole, spec),
    }


def _cut(whole: Path, spec: ModelSpec) -> dict[str, Any]:
    """Return the layers of both fingerprints of one stage, or why there are none."""
    depths = tied_depths(spec, 1)
    if not depths:
        reason = f"{spec.num_layers} layers of {len(spec.kinds)} kinds, in no order that repeats"
        return {"depths": [], "cut": reason}
    for depth in depths:
        target = whole.parent / f"cut-{depth}"
        try:
            generate_shape(whole, target, depth)
            cut = load_spec(target)
        except IserveError as error:
            return {"depths": list(depths), "cut": f"{depth} layers: {error}"}
        if layers(cut) != layers(spec)[:depth]:
            return {"depths": list(depths), "cut": f"{depth} layers are not the whole's first"}
    return {"depths": list(depths), "cut": None}


def layers(spec: ModelSpec) -> list[tuple[Any, ...]]:
    """Return what distinguishes each layer: how far it looks back, what it is made of and keeps."""
    alike = (spec.layer_params, spec.layer_linear_params, spec.layer_expert_params, spec.kv_elements)
    shapes: list[Any] = [spec.layer_shapes[index] for index in spec.layer_shape_indexes]
    return list(zip(spec.windows, shapes or [alike] * spec.num_layers, strict=True))


def main() -> None:
    """Write the record."""
    RECORD.write_text(json.dumps(document(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
