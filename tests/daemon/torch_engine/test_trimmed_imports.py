"""Imports of a worker, in a process of its own: none that it never uses, and none that is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_PROGRAM = """
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
    loaded = "scipy" in sys.modules
frozen, collects = gc.get_freeze_count(), gc.isenabled()
from transformers.loss.loss_utils import ForCausalLMLoss
print(json.dumps([loaded, frozen > 100_000, collects, ForCausalLMLoss.__name__]))
"""


def test_a_worker_loads_no_scipy_freezes_its_imports_and_a_loss_that_is_asked_for_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, True, "ForCausalLMLoss"]
