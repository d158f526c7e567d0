"""Time of vLLM's decode steps that verify n-gram drafts, as the product starts them.

    python -m tests.bench.ngram_steps measure CONFIG_JSON OUT --python VLLM_PYTHON
    python -m tests.bench.ngram_steps table OUT/ngram_steps.json.gz [PROFILE]

``measure`` runs on the GPU machine: a worker for each number of drafts on one GPU, with random weights, all of
them started before the first call and called in turns. A burst has n equal prompts of ``INPUT`` tokens; its time
with one token is taken off that with ``OUTPUT``. How many steps that took is what vLLM counted: a step gives a
sequence one token and the drafts that were accepted. Random weights repeat themselves, so the acceptance says
nothing of real text; the time of a step does. ``table`` prints each step's time over that of a step without
drafts, and the estimate from the recording PROFILE (``tests.bench.accuracy_measure``). No web framework is
imported.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.ngram_drafts import WithNgramDrafts, tokens_per_step
from fingerprint.estimators.roofline import RooflineEstimator
from tests.bench.accuracy_measure import Recorded
from tests.bench.engine_contest import PlacedReplica
from tests.bench.engine_contest_run import (
    FOLDER,
    Worker,
    _nvidia,
    _version,
    _wait_for,
    measuring_options,
    write_models,
)
from tests.bench.kept import read_kept, write_kept
from traces.simulator.step_model import Limits

DRAFTS, BATCHES = (0, 2, 4, 8), (1, 8, 32, 128)
INPUT, OUTPUT, ROUNDS = 512, 129, 3
GIB_EACH = 32
FILE = "ngram_steps.json.gz"
TIMEOUT = aiohttp.ClientTimeout(total=120)
COUNTERS = {  # here, of vLLM
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "generated": "vllm:generation_tokens_total",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """A burst's decode time, and what vLLM counted in the longer of its calls."""

    draft_tokens: int
    batch: int
    prompt: str  # "random" | "repeated"
    decode_s: float  # of the longer call less the one with one token
    drafts: int
    accepted: int
    generated: int

    @property
    def steps(self) -> float:
        """Decode steps after the first token, of each sequence on average.

        A last step's drafts count as accepted beyond the longest answer too: never fewer steps than had drafts.
        """
        return max(self.generated - self.batch - self.accepted, self.drafts) / self.batch

    @property
    def step_s(self) -> float:
        return self.decode_s / self.steps

    @property
    def drafted(self) -> float:
        """Share of the steps of a sequence that had drafts to verify."""
        return self.drafts / (self.steps * self.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramSteps:
    """Recording of one model."""

    model: str
    date: str
    machine: str
    versions: str
    bursts: tuple[Burst, ...]


def measure(config: Path, out: Path, python: str, gpu: int) -> None:
    """Start a worker for each number of drafts, and call them in turns; keep what is measured after each batch."""
    text, total = config.read_text(), int(_nvidia("memory.total")[0]) * 2**20
    write_models([("model", text)], FOLDER)
    limits = Limits(
        max_batch=max(BATCHES),
        max_context_tokens=2048,
        max_batched_tokens=8192,
        kv_tokens=max(BATCHES) * (INPUT + OUTPUT + 48),
    )
    with ExitStack() as stack:
        workers = {}
        for number, drafts in enumerate(DRAFTS):
            replica = PlacedReplica(
                deployment="model",
                config=DeploymentConfig(engine="vllm", draft_tokens=drafts),
                devices=(gpu,),
                bytes_per_gpu=GIB_EACH * 2**30,
                limits=limits,
            )
            workers[drafts] = Worker(40 + number, replica, total, FOLDER, python)
            stack.callback(workers[drafts].end)
        _wait_for(list(workers.values()))
        found = NgramSteps(
            model=config.parent.name,
            date=time.strftime("%Y-%m-%d"),
            machine=_nvidia("name")[gpu],
            versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
            bursts=(),
        )
        out.mkdir(parents=True, exist_ok=True)
        for batch in BATCHES:
            found = replace(found, bursts=(*found.bursts, *asyncio.run(_bursts(workers, batch))))
            write_kept(out / FILE, json.dumps(json.loads(to_json(found)), indent=0))


async def _bursts(workers: dict[int, Worker], batch: int) -> list[Burst]:
    found, rng = [], random.Random(batch)
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        for round_ in range(ROUNDS + 1):  # the first is not kept
            for kind in ("random", "repeated"):
                period = INPUT if kind == "random" else 16
                prompt = [rng.randrange(10, 2000) for _ in range(period)] * (INPUT // period)
                for drafts, worker in workers.items():
                    one = await _burst(session, worker, drafts, batch, kind, prompt)
                    if round_:
                        found.append(one)
                        print(
                            f"{drafts} drafts, batch {batch}, {kind}: {1e3 * one.step_s:.2f} ms a step, "
                            f"{one.steps:.1f} steps, {one.drafted:.0%} drafted",
                            flush=True,
                        )
    return found


async def _burst(
    session: aiohttp.ClientSession, worker: Worker, drafts: int, batch: int, kind: str, prompt: list[int]
) -> Burst:
    url = f"http://127.0.0.1:{worker.port}"

    async def call(tokens: int) -> float:
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }

        async def one() -> None:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise SystemExit(f"{url} answered {response.status}: {text[:500]}")

        begun = time.monotonic()
        await asyncio.gather(*(one() for _ in range(batch)))
        return time.monotonic() - begun

    async def read() -> dict[str, int]:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            name: round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counter)))
            for name, counter in COUNTERS.items()
        }

    async def counted() -> dict[str, int]:
        """Return the counters once they no longer grow: vLLM counts a little after it answers."""
        found = await read()
        while (await asyncio.sleep(0.05)) is None and (again := await read()) != found:
            found = again
        return found

    one_token_s = statistics.median([await call(1) for _ in range(3)])
    before = await counted()
    all_tokens_s = await call(OUTPUT)
    after = await counted()
    return Burst(
        draft_tokens=drafts,
        batch=batch,
        prompt=kind,
        decode_s=all_tokens_s - one_token_s,
        **{name: after[name] - before[name] for name in COUNTERS},
    )


def table(found: NgramSteps, recorded: Recorded | None) -> str:
    """Return the steps' times as Markdown; of bursts in which nine of ten steps had drafts."""
    lines = [
        "| sequences | drafts | step | over one without | estimated | bursts | steps with drafts |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for batch in BATCHES:
        own = [one for one in found.bursts if one.batch == batch]
        plain_s = statistics.median(one.step_s for one in own if not one.draft_tokens)
        for drafts in DRAFTS:
            these = [o for o in own if o.draft_tokens == drafts and (not drafts or o.drafted >= 0.9)]
            if not these:
                lines.append(f"| {batch} | {drafts} | not measured | | | 0 | |")
                continue
            step_s = statistics.median(one.step_s for one in these)
            said = f"{_estimated(recorded, drafts, batch):.2f}" if recorded and drafts else ""
            share = statistics.mean(one.drafted for one in these) if drafts else 0.0
            lines.append(
                f"| {batch} | {drafts} | {1e3 * step_s:.2f} ms | {step_s / plain_s:.2f} | {said} | {len(these)} "
                f"| {share:.0%} |"
            )
    return "\n".join(lines)


def _estimated(recorded: Recorded, drafts: int, batch: int) -> float:
    """Return the estimate of a step with so many drafts over that of one without."""
    spec = recorded.profile.spec
    base = DepthTiedEstimator(recorded.profile, RooflineEstimator(spec, recorded.profile.machine.device))
    with_drafts = WithNgramDrafts(base, 0.5, vocab_size=spec.vocab_size)
    plain, work = DeploymentConfig(engine="vllm"), Workload(batch, INPUT, OUTPUT)
    verified = with_drafts.estimate(replace(plain, draft_tokens=drafts), work).tpot_s.value
    return verified * tokens_per_step(drafts, 0.5) / base.estimate(plain, work).tpot_s.value


def main() -> None:
    options = measuring_options(__doc__, "profile")
    if options.order == "measure":
        measure(options.config, options.out, options.python, options.gpu)
        return
    recorded = from_json(read_kept(options.profile), Recorded) if options.profile else None
    print(table(from_json(read_kept(options.kept), NgramSteps), recorded))


if __name__ == "__main__":
    main()
