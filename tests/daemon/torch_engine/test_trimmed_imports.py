"""Imports of a worker that computes a step, in a process of its own: none that it never uses, none missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # its two processes import torch and transformers whole

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
from pathlib import Path
from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.config import DeploymentConfig
runner = LocalRunner()
limits = WorkerLimits(
    max_batch=1, max_batched_tokens=8, max_context_tokens=8, kv_tokens=8, memory_bytes_per_device=2**30
)
stages = (StageAssignment(device_ids=("cpu:0",), num_layers=8),)
runner.load(Path("iserve/demo/model"), DeploymentConfig(), stages, limits)
runner.step(StepPlan((StepItem(0, 0, (1, 2, 3)),)))
runner.close()
unused = {"scipy", "sympy", "torch._dynamo.eval_frame", "torch.distributed.tensor"}
said = {"frozen": gc.get_freeze_count(), "collects": gc.isenabled(), "loaded": sorted(unused & sys.modules.keys())}
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
compiled = torch.compile(lambda x: x + 1, backend="eager")(1)
said |= {"deferred": [ForCausalLMLoss.__name__, second, marked is int.__add__, compiled]}
"""
_EXPORTS = """
import transformers.models
exported = [sorted({*module.__all__}) for module in (transformers, transformers.models)]
print(json.dumps(said | {"version": transformers.__version__, "exported": exported}))
"""


def run(program: str, home: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"ISERVE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(home: Path) -> dict[str, Any]:
    """Return the words of a worker that reads everything anew, for its home is empty."""
    assert not any(home.iterdir())
    return run(_WORKER + _EXPORTS, home)


@pytest.fixture(scope="module")
def second(home: Path, first: dict[str, Any]) -> dict[str, Any]:
    """Return the words of the next one, which finds what the first read and asks for what was deferred."""
    assert any(home.glob("engine-sources/modelexports-*"))
    return run(_WORKER + _DEFERRED + _EXPORTS, home)


@pytest.mark.slow
def test_a_worker_freezes_its_imports_and_loads_nothing_that_it_does_not_use(first: dict[str, Any]) -> None:
    assert first["frozen"] > 100_000
    assert first["collects"]
    assert first["loaded"] == []


@pytest.mark.slow
def test_what_is_asked_for_all_the_same_is_there(second: dict[str, Any]) -> None:
    assert second["deferred"] == ["ForCausalLMLoss", 1, False, 2]


def test_transformers_exports_what_it_says_itself(
    first: dict[str, Any], second: dict[str, Any], home: Path
) -> None:
    own = run("import json\nsaid = {}" + _EXPORTS, home)
    for worker in (first, second):
        assert worker.items() >= own.items()
