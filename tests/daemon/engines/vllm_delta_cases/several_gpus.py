"""Cases of loads on several GPUs: two processes with tensor parallelism, and how vLLM collects their answers."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import case, matrix_shapes, write_adapter, write_delta

ROOT = Path(__file__).parents[4]


@case
def ranks_load_the_same_at_the_same_call() -> None:
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        for seed, name in ((1, "a"), (2, "b")):
            write_delta(work / name, seed, leave=("down",))  # whose inputs two ranks cut within a group
        write_adapter(work / "large", 3, rank=16)
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.daemon.engines.vllm_delta_cases.rank_process"),
                    *(sys.argv[1], str(rank), str(work / "store"), str(work)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=300) for process in processes]
        assert all(process.returncode == 0 for process in processes), said[0][1][-2000:] + said[1][1][-2000:]
        first, last = (json.loads(out.splitlines()[-1]) for out, _ in said)
        shards = [one.pop() for one in (first, last)]
        being_read = "is still being read: ask for it again"
        wanted = [
            *(f"delta va {being_read}",) * 2,
            *("True", "True"),
            f"delta vb {being_read}",
            "rank 0 cannot read b",
            f"delta vb {being_read}",
            "rank 0 is full",
            f"delta vb {being_read}",
            "True",
        ]
        for at, want in enumerate(wanted):
            want = want.replace("va", "v1").replace("vb", "v2")
            assert last[at]["said"] == want, (at, last[at], want)
            assert first[at]["said"] == (want if want == "True" else "False"), (at, first[at])
        assert "rank 16" in last[10]["said"].lower() or "LoRA rank" in last[10]["said"], last[10]
        assert "disagree on v2" in last[11]["said"], last[11]
        for one, two in zip(first, last, strict=True):
            assert (one["loaded"], one["slots"]) == (two["loaded"], two["slots"])
        assert [one["loaded"] for one in last] == [[], [], *[[1]] * 7, [1, 2], [1, 2], [1]]
        check_shards(work / "a", shards)


def check_shards(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Assert that each rank has its own part: the sums of both are those of the whole delta."""
    from iserve_variants.folder import read_folder

    matrices = read_folder(folder, pin=False).matrices
    joined = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up"), "o_proj": "o"}
    assert set(matrix_shapes()) >= set(matrices)
    for leaf, parts in joined.items():
        own = [matrices[f"layers.0.{part}_proj.weight"] for part in parts]
        whole = [sum(int(one.codes.long().sum()) for one in own)]
        whole.append(sum(int(one.scales.view(torch.int16).long().sum()) for one in own))
        found = [one["shards"][leaf] for one in shards]
        assert [sum(both) for both in zip(*found, strict=True)] == whole, leaf
        assert found[0] != found[1]


@case
def vllm_leaves_the_answers_after_the_first_error() -> None:
    """Hence a refusal is raised on the last rank: what is left would be taken for the next call's answer."""
    from iserve_variants.refusals import StillReadError, hides
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    status = WorkerProc.ResponseStatus

    class Answers(queue.SimpleQueue):  # type: ignore[type-arg]
        def dequeue(self, timeout: float | None = None) -> Any:
            return self.get(timeout=60)

    def ask(answers: list[Any], queues: list[Answers]) -> Any:
        for one, each in zip(queues, answers, strict=True):
            one.put(each)
        executor = SimpleNamespace(
            rpc_broadcast_mq=SimpleNamespace(enqueue=lambda asked: None),
            is_failed=False,
            response_mqs=queues,
            futures_queue=deque(),
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False)),
        )
        return MultiprocExecutor.collective_rpc(executor, "add_lora", args=(None,))  # type: ignore[arg-type]

    asked_again = StillReadError("delta", "v1")
    refused, done, no = (status.FAILURE, str(asked_again)), (status.SUCCESS, True), (status.SUCCESS, False)
    for answers, is_left in (([refused, refused], True), ([no, refused], False)):
        queues = [Answers(), Answers()]
        with pytest.raises(RuntimeError, match="still being read") as raised:
            ask(answers, queues)
        assert hides(raised.value)  # from the engine's log
        assert [one.empty() for one in queues] == [True, not is_left]
        if is_left:
            with pytest.raises(RuntimeError, match="still being read"):
                ask([done, done], queues)  # which both ranks made
        else:
            assert ask([done, done], queues) == [True, True]
