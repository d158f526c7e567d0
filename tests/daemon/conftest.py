"""Shared by the daemon's tests: a strict NVML, a real daemon process over real workers; tiny random models."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from daemon.client import DaemonClient
from daemon.lease import LEASE_FILE, Lease, read_file
from daemon.process import is_alive, read_record
from daemon.procfs import pids_with, read_stat, started_as
from daemon.status import WorkerState, WorkerStatus
from daemon.worker_process import WORKER_MARK
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, even_split
from fingerprint.errors import UnavailableError
from tests.forked_process import Forked, Forking
from tests.waiting import PATIENCE_S, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_DAEMONS = Forking("tests.daemon.fake_daemon", "tests.known_sources")

FAST = {
    "tick_s": 0.1,
    "stop_grace_s": 0.6,
    "resident_period_s": 0.1,
    "cpu_devices": 2,
    "restart": {"max_starts": 3, "window_s": 600.0, "first_delay_s": 0.1, "max_delay_s": 0.4},
}


def runs(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.is_gone


class Node:
    """A home folder and the daemon that serves it; its workers are fake_worker.py processes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.checkpoint = home.parent / "checkpoint"
        self.checkpoint.mkdir()
        self.process: Forked | None = None
        self.extra_env: dict[str, str] = {}
        self.client: DaemonClient

    def behave(self, **behaviour: object) -> None:
        """Set how workers behave from their next start on."""
        (self.checkpoint / "behaviour.json").write_text(json.dumps(behaviour))

    def start(self, **settings: object) -> DaemonClient:
        command = [str(HERE / "fake_daemon.py"), str(self.home), json.dumps(FAST | settings)]
        self.process = _DAEMONS.start(command, self.env, self.home.parent / "daemon.log")
        record_file = self.home / "run" / "daemon.json"

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.daemon_log
            record = read_record(record_file)
            return record is not None and record.pid == self.process.pid and is_alive(record)

        wait_until(answers, "the daemon answers")
        record = read_record(record_file)
        assert record is not None
        self.client = DaemonClient(record.url, record.token)
        return self.client

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT)} | self.extra_env

    def offer_gpus(self, folder: Path) -> None:
        """Have the daemon see the two GPUs of fake_nvml.py: laid into ``folder`` as pynvml, which it then finds
        first. Start it with ``cpu_devices=None``."""
        folder.mkdir()
        (folder / "pynvml.py").write_bytes((HERE / "fake_nvml.py").read_bytes())
        self.extra_env["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"

    @property
    def daemon_log(self) -> str:
        return (self.home.parent / "daemon.log").read_text()

    def signal_daemon(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)
        self.process.wait(PATIENCE_S)

    def spec(self, worker_id: str = "w1", **changes: object) -> WorkerSpec:
        values = {
            "worker_id": worker_id,
            "served_model": "fake",
            "checkpoint": str(self.checkpoint),
            "config": DeploymentConfig(),
            "stages": (StageAssignment(device_ids=("cpu:0",), num_layers=2),),
            "limits": WorkerLimits(
                max_batch=1,
                max_batched_tokens=64,
                max_context_tokens=64,
                kv_tokens=64,
                memory_bytes_per_device=100 * 2**20,
            ),
        }
        return WorkerSpec(**(values | changes))

    def wait(self, worker_id: str, state: WorkerState, *, but_not_pid: int | None = None) -> WorkerStatus:
        def there() -> WorkerStatus | None:
            status = self.client.worker(worker_id)
            return status if status.state is state and (but_not_pid is None or status.pid != but_not_pid) else None

        found = wait_until(there, f"{worker_id} is {state}")
        assert isinstance(found, WorkerStatus)
        return found

    def ready(self, worker_id: str = "w1", **changes: object) -> WorkerStatus:
        """Launch a worker and wait until it serves."""
        self.client.launch(self.spec(worker_id, **changes))
        return self.wait(worker_id, WorkerState.READY)

    def lease(self, worker_id: str = "w1") -> Lease:
        return read_file(self.home / "workers" / worker_id / LEASE_FILE, Lease)

    def clear(self) -> None:
        """End every process of this test, whatever state it left them in."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(UnavailableError):
                for worker in self.client.workers():
                    self.client.stop(worker.spec.worker_id)
            self.process.kill()
            self.process.wait()
        wait_until(lambda: not self._kill_workers(), "every process of a worker is gone")

    def _kill_workers(self) -> bool:
        """Kill each shim and all that carries the mark of a worker; whether there was any."""
        found = set()
        for folder in (self.home / "workers").glob("*"):
            shims = started_as(("-m", "daemon.shim", str(folder)))
            found |= {stat.pid for stat in shims} | set(pids_with(WORKER_MARK, str(folder)))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)


@pytest.fixture(scope="module", autouse=True)
def home_of_sources(engine_sources: Path) -> Iterator[None]:
    """Have workers and ranks without a home of their own keep what they read in engines' sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISERVE_HOME", str(engine_sources.parent))
        yield


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "home")
    try:
        yield node
    finally:
        node.clear()


@pytest.fixture(scope="session")
def make_node() -> type[Node]:
    """For suites that keep a node through several tests; they clear it."""
    return Node


@pytest.fixture(scope="module")
def calm_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A started daemon for tests that change nothing."""
    node = Node(tmp_path_factory.mktemp("calm") / "home")
    try:
        node.start()
        yield node
    finally:
        node.clear()


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Return a test of whether a process runs (a zombie does not)."""
    return runs


@pytest.fixture
def until() -> Callable[..., object]:
    """Wait until a condition holds; fails after a time that only a hang reaches."""
    return wait_until


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fresh copy of the strict fake, two idle GPUs."""
    spec = importlib.util.spec_from_file_location("fake_nvml", HERE / "fake_nvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_nvml", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- tiny random models for the embedded engine ---

TINY_VOCAB = 96
TINY_CONTEXT = 64

# Small initial weights make every token as likely as every other, or one the answer to all; these are large enough
# that greedy choices are far apart compared with rounding, and change.
_WIDE = 0.5
_SIZES = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TINY_CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TINY_CONTEXT}
_FAMILIES = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "llama-odd-vocab": ("LlamaConfig", {"num_hidden_layers": 2, "vocab_size": TINY_VOCAB + 1}),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 3, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": None}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"head_dim": 16, "norm_topk_prob": True},
    ),
    "phi3": ("Phi3Config", {"num_hidden_layers": 2, "sliding_window": 8, "pad_token_id": None}),
    "gpt_neox": ("GPTNeoXConfig", {"num_hidden_layers": 2}),
    # Three layers, of which one looks all the way back; the caps, low, are felt by random weights too. A head
    # of its own: an embedding that is scaled up and the head as well has each token call for itself.
    "gemma2": (
        "Gemma2Config",
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "tie_word_embeddings": False},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "pad_token_id": None, "initializer_range": 0.5},
    ),
    "falcon": ("FalconConfig", {"num_hidden_layers": 2}),
    "opt": ("OPTConfig", {"num_hidden_layers": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "ctrl": ("CTRLConfig", _GPT2 | {"dff": 64}),
    "xglm": ("XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    "doge": ("DogeConfig", {"num_hidden_layers": 2, "num_experts": 4}),
}
_PLAIN = "apertus arcee bitnet cohere diffllama ernie4_5 gemma glm glm4 granite helium hunyuan_v1_dense"
_PLAIN += " hyperclovax internlm3 iquestcoder jais2 ministral3 nanochat nemotron olmo olmo2 persimmon phi seed_oss"
_PLAIN += " smollm3 stablelm starcoder2"
_WINDOWED = "cohere2 cwm exaone4 granite_swa ministral olmo3 vaultgemma"


def _tiny_config(family: str) -> Any:
    """Listed sizes, else two layers; where they are of two kinds three, of which one looks all the way back."""
    import transformers

    if family in _FAMILIES:
        config_class, sizes = _FAMILIES[family]
        return getattr(transformers, config_class)(**(_SIZES | sizes))
    sizes = _SIZES | {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": None, "pad_token_id": None}
    if family in _WINDOWED.split():
        types = ["sliding_attention", "sliding_attention", "full_attention"]
        sizes |= {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": types}
    if family in ("ministral3", "starcoder2"):  # all layers, without being called so in the config
        sizes["sliding_window"] = 8
    if family == "cwm":
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.CONFIG_MAPPING[family](**sizes)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_checkpoint("llama")``: a directory with a random float32 model; made once, never written to again."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, made = tmp_path_factory.mktemp("checkpoints", numbered=False), dict[str, Path]()

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(zlib.crc32(family.encode()))
            model = transformers.AutoModelForCausalLM.from_config(_tiny_config(family)).float().eval()
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, 0, _WIDE)
                else:  # norms and biases: not all ones and zeros
                    low = -0.5 if name.endswith("bias") else 0.5
                    torch.nn.init.uniform_(parameter, low, low + 1)
            made[family] = folder / family
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_stages() -> Callable[..., tuple[StageAssignment, ...]]:
    """``tiny_stages(4, tp=2, pp=2)``: CPU devices numbered by rank; ``layers`` for an uneven split."""

    def make(
        num_layers: int, *, tp: int = 1, pp: int = 1, layers: tuple[int, ...] | None = None
    ) -> tuple[StageAssignment, ...]:
        return tuple(
            StageAssignment(
                device_ids=tuple(f"cpu:{stage * tp + index}" for index in range(tp)), num_layers=num_layers_here
            )
            for stage, num_layers_here in enumerate(layers or even_split(num_layers, pp))
        )

    return make


@pytest.fixture(scope="session")
def tiny_limits() -> WorkerLimits:
    """4 sequences of ``TINY_CONTEXT`` tokens, 48 tokens a step, 64 MiB a device."""
    return WorkerLimits(
        max_batch=4,
        max_batched_tokens=48,
        max_context_tokens=TINY_CONTEXT,
        kv_tokens=4 * TINY_CONTEXT,
        memory_bytes_per_device=64 * 2**20,
    )
