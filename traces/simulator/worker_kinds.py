"""Kind of worker that serves a replica: by the scenario's service, the engine and the number of stages."""

from __future__ import annotations

from typing import TypeAlias

from fingerprint.errors import ConfigError
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.adapter_workers import AdapterWorker, PreemptingAdapterWorker
from traces.simulator.continuous import ContinuousWorker
from traces.simulator.fcfs import FcfsWorker
from traces.simulator.pipelined import PipelinedWorker, UnbatchedPipeline
from traces.simulator.preempting import PreemptingWorker
from traces.simulator.requests import Requests
from traces.simulator.scenario import Service
from traces.simulator.step_model import StepModel
from traces.simulator.stepped import MakeBatcher, SteppedWorker
from traces.simulator.workers import Server, Stage

__all__ = ["WorkerArguments", "new_worker"]

WorkerArguments: TypeAlias = tuple[str, list[Stage], float, StepModel, Requests]


def new_worker(
    service: Service,
    args: WorkerArguments,
    make_batcher: MakeBatcher | None,
    *,
    pipelined: bool,
    adapters: AdapterCost | None = None,
) -> Server:
    """Return a worker that serves as ``service`` says.

    Args:
        args: name, stages, the time from which it serves, step model, and the table of requests.
        make_batcher: of stepped service.
        pipelined: whether the engine keeps a batch in flight per stage.
        adapters: of continuous service; None: it has no adapter slots.

    Raises:
        ConfigError: a pipeline with adapter slots, a prefix cache or the times of single tokens; a prefix cache
            with adapters.
    """
    _, stages, _, steps, requests = args
    cache = requests.prefix_blocks is not None
    if (cache or requests.token_s is not None) and pipelined and len(stages) > 1:
        what = "a prefix cache" if cache else "the times of single tokens"
        raise ConfigError(f"{what} in a pipeline that keeps its stages full: this is not simulated")
    if cache and adapters is not None:
        raise ConfigError("a prefix cache next to adapters is not simulated; each adapter has prefixes of its own")
    preempts = steps.limits.preempts and steps.limits.kv_tokens is not None
    if adapters is not None:
        if pipelined and len(stages) > 1:
            raise ConfigError("adapters in a pipeline that keeps its stages full are not simulated")
        return (PreemptingAdapterWorker if preempts else AdapterWorker)(*args, adapters=adapters)
    match service:
        case Service.FCFS_PIPELINED if pipelined and len(stages) > 1:
            return UnbatchedPipeline(*args)
        case Service.FCFS | Service.FCFS_PIPELINED:
            return FcfsWorker(*args)
        case Service.CONTINUOUS if pipelined and len(stages) > 1:
            return PipelinedWorker(*args)
        case Service.CONTINUOUS if preempts:
            return PreemptingWorker(*args)
        case Service.CONTINUOUS:
            return ContinuousWorker(*args)
        case Service.STEPPED:
            assert make_batcher is not None, "checked before the simulation began"
            return SteppedWorker(*args, make_batcher(steps.limits))
