"""Imports of a worker, in a process of its own: none that it never uses, and none that is missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_WORKER = """
import gc, json, sys
from daemon.torch_engine.trimmed_imports import trimmed_imports
with trimmed_imports():
    import daemon.torch_engine.parallel.runner, daemon.torch_engine.api.server
    import transformers
    from daemon.torch_engine.model.capabilities import FAMILIES
    from fingerprint.families import FAMILIES as known
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes
    for family in sorted(FAMILIES):
        getattr(transformers, classes[family])
"""
_FROZEN = "print(json.dumps([gc.get_freeze_count() > 100_000, gc.isenabled()]))"
_UNUSED = """
unused = {"scipy", "sympy", "torch._dynamo.eval_frame", "torch.distributed.tensor"}
print(json.dumps(sorted(unused & sys.modules.keys())))
"""
# The compiler's parts in an order that its own imports do not have.
_DEFERRED = """
import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import TransformGetItemToIndex
from torch._dynamo.backends.registry import list_backends
with TransformGetItemToIndex():
    second = torch.arange(3)[torch.tensor(1)].item()
marked = torch.compiler.disable(recursive=False)(int.__add__)
print(json.dumps([
    ForCausalLMLoss.__name__, second, marked is int.__add__, torch.compile(lambda x: x + 1, backend="eager")(1)
]))
"""
_EXPORTS = """
import transformers.models
exported = [sorted({*module.__all__}) for module in (transformers, transformers.models)]
print(json.dumps([transformers.__version__, *exported]))
"""


def run(program: str, home: Path) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"ISERVE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, list)
    return answer


def test_a_worker_freezes_its_imports_and_loads_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    assert run(_WORKER + _FROZEN, tmp_path) == [True, True]
    assert run(_WORKER + _UNUSED, tmp_path) == []


def test_what_is_asked_for_all_the_same_is_there(tmp_path: Path) -> None:
    assert run(_WORKER + _DEFERRED, tmp_path) == ["ForCausalLMLoss", 1, False, 2]


def test_transformers_exports_what_it_says_itself(tmp_path: Path) -> None:
    """Read anew, and from what was kept."""
    own = run("import json" + _EXPORTS, tmp_path)
    assert not any(tmp_path.iterdir())
    assert run(_WORKER + _EXPORTS, tmp_path) == own
    assert any(tmp_path.glob("engine-sources/modelexports-*"))
    assert run(_WORKER + _EXPORTS, tmp_path) == own
