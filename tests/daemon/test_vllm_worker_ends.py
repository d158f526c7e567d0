"""Ends of vLLM's server that only another start can tell from a failure for good; the server is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket

import pytest

from daemon.engine_options import EngineOptions
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment
from fingerprint.config import DeploymentConfig
from tests.daemon.engines.engine_conformance import LIMITS, ask
from tests.daemon.engines.standin import make_vllm

pytestmark = pytest.mark.process
OF_CLIENTS = ("OSError: [Errno 98] Address already in use", "error: unrecognized arguments: --bar")


@pytest.fixture
def vllm_node(node, tmp_path, tiny_checkpoint):
    node.offer_gpus(tmp_path / "nvml")
    node.extra_env["ISERVE_VLLM_PYTHON"] = str(make_vllm(tmp_path / "vllm-env"))
    shutil.copytree(tiny_checkpoint("llama"), node.checkpoint, dirs_exist_ok=True)
    return node


def launch(node, **changes):
    node.start(real_engines=True, cpu_devices=None, warm_up_s=1e-3)
    stage = StageAssignment(device_ids=("GPU-aaaa",), num_layers=4)
    config = DeploymentConfig(engine="vllm")
    return node.client.launch(
        node.spec("w1", config=config, stages=(stage,), limits=LIMITS, served_model="tiny", **changes)
    )


@pytest.mark.parametrize("words", OF_CLIENTS)
def test_words_of_a_client_in_the_log_do_not_give_a_worker_up(vllm_node, words):
    launch(vllm_node, options=EngineOptions(arguments=(("enable-log-requests", None),)))
    before = vllm_node.wait("w1", WorkerState.READY)
    body = {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 1}
    assert ask(before.url, "/v1/chat/completions", body, token=before.token)[0] == 200
    assert words in vllm_node.client.log("w1")
    _, core = (vllm_node.home / "workers" / "w1" / "processes").read_text().split()
    os.kill(int(core), signal.SIGKILL)
    after = vllm_node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
    assert (after.restarts, after.spec.port) == (1, before.spec.port)


def test_a_port_that_is_taken_while_it_imports_is_exchanged(vllm_node, tmp_path, until):
    """The wrapper saw the port free; the server ends with 1 then, not with the code of a taken port."""
    may_bind = tmp_path / "may-bind"
    (vllm_node.checkpoint / "behaviour.json").write_text(json.dumps({"once": True, "bind_file": str(may_bind)}))
    port = launch(vllm_node).spec.port
    until((tmp_path / "may-bind.asked").exists, "the server is about to bind")
    with socket.create_server(("127.0.0.1", port)):
        may_bind.touch()
        after = vllm_node.wait("w1", WorkerState.READY)
    assert after.spec.port != port
    assert after.restarts == 0
    assert "[Errno 98]" in vllm_node.client.log("w1")


def test_one_that_ends_while_pip_replaces_its_engine_is_started_when_that_is_there(vllm_node, tmp_path, until):
    launch(vllm_node)
    before = vllm_node.wait("w1", WorkerState.READY)
    (metadata,) = (tmp_path / "vllm-env").glob("lib/python*/site-packages/vllm-*.dist-info")
    removed = metadata.rename(tmp_path / "removed")
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: "vllm is not installed" in (vllm_node.client.worker("w1").error or ""), "a start has failed")
    assert vllm_node.client.worker("w1").state is WorkerState.RESTARTING
    removed.rename(metadata)
    vllm_node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
