"""Fidelity of ``iserve simulate`` to vLLM on one GPU, for a model whose profile is kept as a record.

    python -m tests.bench.fidelity_vllm OUT --record RECORD.json.xz --model PUBLIC_NAME --python VLLM_PYTHON
        --trace TRACE [--gpu I] [--loads 0.4 0.7 0.9] [--minutes 1]

RECORD is one of ``tests.bench.accuracy_measure``, made on another day and machine of the same kind; PUBLIC_NAME
names its config in ``tests/fingerprint/recorded/public_models.json``. Starts ``vllm serve`` with random weights as
a daemon would, prefix cache off, a mixture's tokens drawn uniformly for its experts as in its profile, and plays
the trace at shares of the saturated rate (``tests.bench.fidelity``). ``OUT/NAME.json`` is written after each load.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.measurements import Profile
from iserve.planning.estimator_factory import step_tokens_of
from iserve.simulation.running import launch_limits
from tests.bench.engine_contest import PlacedReplica
from tests.bench.engine_contest_run import Worker, _nvidia, _wait_for, write_models
from tests.bench.family_configs import config_of
from tests.bench.fidelity import Asked, Fidelity, Target, _read_profile, measure

__all__ = ["main"]

WORKLOAD = Workload(batch=64, input_tokens=3072, output_tokens=1024)
_SHARE = 0.9  # of the GPU's memory, to the server


def play(options: argparse.Namespace, profile: Profile) -> None:
    """Start the server and play each load."""
    name = options.model.rpartition("/")[2]
    text = to_json(config_of(options.model)).decode()
    total = int(_nvidia("memory.total")[options.gpu]) * 2**20
    write_models([(name, text)], options.work)
    limits = launch_limits(WORKLOAD, "vllm", step_tokens_of(profile))
    config = DeploymentConfig(engine="vllm")
    replica = PlacedReplica(
        deployment=name, config=config, devices=(options.gpu,), bytes_per_gpu=int(_SHARE * total), limits=limits
    )
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"  # read by mixtures alone
    asked = Asked(trace=options.trace, minutes=options.minutes, loads=(), check_s=0.0, steps_s=0.0, capacity=None)
    found: list[Fidelity] = []
    with ExitStack() as stack:
        worker = Worker(options.gpu, replica, total, options.work, options.python)
        stack.callback(worker.end)
        _wait_for([worker])
        target = Target(
            url=f"http://127.0.0.1:{worker.port}", model=name, config=config, workload=WORKLOAD, limits=limits
        )
        for load in options.loads:
            asked = replace(asked, loads=(load,), seed=len(found))
            found.append(measure(target, profile, asked, lambda line: print(line, flush=True)))
            asked = replace(asked, capacity=found[0].capacity_requests_per_s)
            (options.out / f"{name}.json").write_bytes(to_json(found, indent=1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", required=True, help="vLLM's")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.7, 0.9])
    parser.add_argument("--minutes", type=float, default=1.0, help="of each load")
    parser.add_argument("--work", type=Path, default=Path("/tmp/fidelity"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    play(options, _read_profile(options.record))


if __name__ == "__main__":
    main()
