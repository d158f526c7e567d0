"""The bench of adapter slots: its arithmetic, its adapters, and its calls to a server that answers at once."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from fingerprint.codec import from_json
from fingerprint.estimators.adapter_slots import ADDED_ERROR, added_prompt_share, added_step_s
from fingerprint.families import read_spec
from fingerprint.lora import read_adapter, slot_bytes
from iserve.gateway.variant_loader import reading_pause_s as gateway_pause_s
from tests.bench import lora_steps
from tests.bench.kept import read_kept
from tests.bench.lora_adapters import matrices, write_adapter
from tests.bench.lora_steps import ACTIVE, BATCHES, FILE, SLOTS, gaps_s, models_of
from tests.bench.lora_steps_table import RANK, Burst, Load, LoraSteps, Memory, Prompt, config_of, table
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B
from tests.golden_words import Golden

SMALL = LLAMA_8B | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
RESULTS = Path(__file__).parent / "results"
NOTHING = LoraSteps(model="m", date="", machine="", versions="")


def memory(slots: int, weights_gib: float) -> Memory:
    return Memory(
        slots=slots, weights_gib=weights_gib, graphs_gib=0.5, graphs_s=9.0, kv_tokens=22656, ready_s=100.0
    )


def test_a_step_is_the_decode_time_over_the_tokens_after_the_first() -> None:
    assert Burst(slots=8, active=1, batch=32, decode_s=0.64, tokens=64).step_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("active", "models"),
    [(0, ["model"] * 4), (1, ["adapter-0"] * 4), (3, ["adapter-0", "adapter-1", "adapter-2", "adapter-0"])],
)
def test_rows_take_the_adapters_in_turn(active: int, models: list[str]) -> None:
    assert models_of(active, 4) == models


def test_no_batch_needs_more_adapters_than_a_worker_has_slots() -> None:
    """A step holds adapters in slots only; of more the requests would wait and the burst take several turns."""
    for batch in BATCHES:
        for slots in SLOTS:
            for active in (one for one in ACTIVE if one <= slots):
                assert len(set(models_of(active, batch))) == max(active, 1) <= max(slots, 1)


@pytest.mark.parametrize(
    ("begun", "ended", "expected"),
    [
        pytest.param(2.5, 2.6, (1.5, 1.0), id="within-one-gap"),
        pytest.param(1.9, 2.1, (1.5, 1.0), id="over-an-arrival"),
        pytest.param(0.2, 0.3, (1.0, 1.5), id="another-gap"),
        pytest.param(9.0, 9.1, (0.0, 1.5), id="after-the-last-token"),
    ],
)
def test_gaps_during_a_load_are_those_that_touch_it(
    begun: float, ended: float, expected: tuple[float, float]
) -> None:
    assert gaps_s([0.0, 1.0, 2.0, 3.5, 4.0], begun, ended) == expected


@pytest.mark.parametrize("rank", [8, 64])
def test_its_adapters_are_those_that_iserve_reads(tmp_path: Path, rank: int) -> None:
    write_adapter(tmp_path / "adapter", SMALL, rank)
    adapter = read_adapter(tmp_path / "adapter")
    assert len(adapter.modules) == 2 * len(matrices(SMALL))
    assert {module.rank for module in adapter.modules} == {rank}
    shapes = {
        module.name.partition("layers.0.")[2]: (module.out_features, module.in_features)
        for module in adapter.modules
        if ".layers.0." in module.name
    }
    assert shapes == matrices(SMALL)


def test_an_adapter_of_the_slots_rank_has_a_slots_bytes_but_for_the_vocabulary() -> None:
    sides = sum(rows + columns for rows, columns in matrices(LLAMA_8B).values())
    spec = read_spec(LLAMA_8B)
    vocabulary = 2 * (spec.vocab_size + spec.hidden_size)
    assert slot_bytes(spec, config_of(8), spec.num_layers) == 2 * RANK * (sides * spec.num_layers + vocabulary)


def test_tables_have_medians_and_what_slots_add() -> None:
    bursts = [
        Burst(slots=slots, active=active, batch=32, decode_s=64 * seconds, tokens=64)
        for slots, active, times in ((0, 0, (0.005, 0.006, 0.005)), (8, 1, (0.0075, 0.0074, 0.009)))
        for seconds in times
    ]
    prompts = [
        Prompt(slots=8, requests=1, tokens=2048, adapter=adapter, seconds=0.05 * (1 + adapter))
        for adapter in (False, True)
    ]
    loads = [Load(slots=8, rank=64, load_s=0.4, longest_gap_s=0.39, usual_gap_s=0.008)]
    found = replace(
        NOTHING,
        bursts=tuple(bursts),
        prompts=tuple(prompts),
        loads=tuple(loads),
        memory=(memory(0, 15.0), memory(8, 17.75)),
    )
    rows = table(found, LLAMA_8B).splitlines()
    assert "| 32 | 0 | 0 | 5.00 ms | 1.00 |" in rows
    assert "| 32 | 8 | 1 | 7.50 ms | 1.50 |" in rows
    assert "| 1 x 2048 | 8 | yes | 100.0 ms |" in rows
    assert "| 8 | 64 | 400 ms | 390 ms | 8 ms |" in rows
    assert "| 8 | 17.75 | 2.75 | 2.75 | 0.50 | 9 s | 22656 | 100 s |" in rows


def test_what_adapters_add_is_shown_next_to_the_estimate_of_plans(golden: Golden) -> None:
    """Times of the recording that the estimate was made of, and one that is none."""
    steps = {(0, 0): 5.09e-3, (8, 0): 5.10e-3, (8, 1): 7.34e-3, (8, 8): 11.66e-3, (32, 8): 30e-3}
    bursts = [
        Burst(slots=slots, active=active, batch=32, decode_s=64 * seconds, tokens=64)
        for (slots, active), seconds in steps.items()
    ]
    prompts = [
        Prompt(slots=slots, requests=1, tokens=2048, adapter=adapter, seconds=seconds)
        for slots, adapter, seconds in ((0, False, 49.1e-3), (8, False, 52.3e-3), (8, True, 75.2e-3))
    ]
    found = replace(NOTHING, bursts=tuple(bursts), prompts=tuple(prompts))
    rows = table(found, LLAMA_8B).splitlines()
    assert [row.split(" | ")[1:] for row in rows if row.startswith(("| step of", "| prompts of"))] == [
        ["2.25 ms", "2.18 ms", "1.09 to 4.35 ms", "yes |"],
        ["6.57 ms", "6.58 ms", "3.29 to 13.17 ms", "yes |"],
        ["24.91 ms", "7.97 ms", "3.99 to 15.95 ms", "no |"],
        ["26.10 ms", "27.09 ms", "13.55 to 54.19 ms", "yes |"],
    ]
    golden("reports", rows)
    assert not any("adapters 0" in row for row in rows)


def test_the_kept_recording_is_within_the_intervals_of_plans() -> None:
    found = recording()
    rows = [row for row in table(found, LLAMA_8B).splitlines() if row.startswith(("| step of", "| prompts of"))]
    assert len(rows) == 14
    assert all(row.endswith("| yes |") for row in rows)


def recording() -> LoraSteps:
    return from_json(read_kept(RESULTS / "lora_steps_h200.json.gz"), LoraSteps, what="recording")


def empty_slots_s(found: LoraSteps) -> dict[tuple[int, int], float]:
    """Return the time that empty slots add to a step of the base, by sequences and slots: medians."""
    times: dict[tuple[int, int], list[float]] = {}
    for one in found.bursts:
        if not one.active:
            times.setdefault((one.batch, one.slots), []).append(one.step_s)
    step_s = {case: statistics.median(own) for case, own in times.items()}
    return {(rows, slots): taken - step_s[rows, 0] for (rows, slots), taken in sorted(step_s.items()) if slots}


def test_the_time_of_empty_slots_follows_from_the_rest_of_what_was_measured() -> None:
    """Each of four added times, by least squares from the other three, and within the interval."""
    measured = empty_slots_s(recording())
    assert len(measured) == 4
    for case, added_s in measured.items():
        rest = [(rows * slots**0.5, own) for (rows, slots), own in measured.items() if (rows, slots) != case]
        fitted = sum(x * y for x, y in rest) / sum(x * x for x, _ in rest)
        without_it_s = fitted * case[0] * case[1] ** 0.5
        assert without_it_s == pytest.approx(added_s, abs=1.3e-4)
        stated_s = added_step_s(32, case[0], 0, case[1])
        assert stated_s == pytest.approx(added_s, abs=1.3e-4)
        for estimate_s in (without_it_s, stated_s):
            assert 0 <= added_s <= ADDED_ERROR * estimate_s


def test_the_time_of_prompts_for_the_base_follows_from_the_rest_of_what_was_measured() -> None:
    times: dict[tuple[int, int, int], list[float]] = {}
    for one in recording().prompts:
        if not one.adapter:
            times.setdefault((one.requests, one.tokens, one.slots), []).append(one.seconds)
    taken = {case: statistics.median(own) for case, own in times.items()}
    more = [own / taken[case[0], case[1], 0] - 1 for case, own in taken.items() if case[2]]
    assert len(more) == 4
    for number, share in enumerate(more):
        rest = statistics.mean(more[:number] + more[number + 1 :])
        assert rest == pytest.approx(share, abs=0.03)
        assert added_prompt_share(8, base_share=1.0) == pytest.approx(share, abs=0.025)
        assert 0 <= share <= ADDED_ERROR * rest


def test_no_estimate_is_shown_where_its_base_was_not_measured() -> None:
    burst = Burst(slots=8, active=8, batch=32, decode_s=0.64, tokens=64)
    prompt = Prompt(slots=8, requests=1, tokens=2048, adapter=True, seconds=0.07)
    rows = table(replace(NOTHING, bursts=(burst,), prompts=(prompt,)), LLAMA_8B).splitlines()
    assert not any(row.startswith(("| step of", "| prompts of")) for row in rows)


def test_tables_of_a_run_that_was_cut_off_have_what_it_kept() -> None:
    rows = table(replace(NOTHING, memory=(memory(8, 17.75),)), None).splitlines()
    assert "| 8 | 17.75 |  |  | 0.50 | 9 s | 22656 | 100 s |" in rows


def test_all_parts_are_measured_and_kept_against_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps vLLM's rules: names are loaded once, unknown models are not found."""
    for name, value in {
        "ROUNDS": 1,
        "PROMPT_ROUNDS": 1,
        "LOADS": 1,
        "BATCHES": (4,),
        "PROMPTS": ((1, 8),),
    }.items():
        monkeypatch.setattr(lora_steps, name, value)
    for name, value in {"SLOTS": (0, 2), "ACTIVE": (0, 2), "LOADING_ROWS": 2, "LOADING_TOKENS": 6}.items():
        monkeypatch.setattr(lora_steps, name, value)
    monkeypatch.setattr(lora_steps, "_memory", remembered)
    log = tmp_path / "log"
    log.touch()

    async def measured() -> LoraSteps:
        servers = [await started() for _ in range(2)]
        workers: Any = {
            slots: SimpleNamespace(port=port, log=log, ready_s=1.0)
            for slots, (_, port) in zip((0, 2), servers, strict=True)
        }
        try:
            await lora_steps._measured(NOTHING, workers, tmp_path / FILE)
        finally:
            for runner, _ in servers:
                await runner.cleanup()
        return from_json(read_kept(tmp_path / FILE), LoraSteps)

    found = asyncio.run(measured())
    assert [(one.slots, one.active) for one in found.bursts] == [(0, 0), (2, 0), (2, 2)]
    assert [(one.slots, one.adapter) for one in found.prompts] == [(0, False), (2, False), (2, True)]
    assert [(one.slots, one.rank) for one in found.loads] == [(2, 64), (2, 16), (2, 8)]
    assert len(found.memory) == 2


def test_a_load_is_asked_for_as_the_gateway_does() -> None:
    waited_s = [0.001 * number**2 for number in range(120)]
    assert [lora_steps.reading_pause_s(one) for one in waited_s] == [*map(gateway_pause_s, waited_s)]


def test_loads_of_all_ways_are_kept_and_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reads in a thread is asked again until it has; the gap is given in medians."""
    for name, value in {"SLOTS": (0, 2), "LOADING_ROWS": 2, "LOADING_TOKENS": 6, "LOADS": 1}.items():
        monkeypatch.setattr(lora_steps, name, value)

    async def measured() -> LoraSteps:
        servers = [await started(asks) for asks in (0, 0, 3)]
        workers: Any = [SimpleNamespace(port=port) for _, port in servers]
        try:
            await lora_steps._measured_loads(NOTHING, workers, tmp_path / FILE)
        finally:
            for runner, _ in servers:
                await runner.cleanup()
        return from_json(read_kept(tmp_path / FILE), LoraSteps)

    found = asyncio.run(measured())
    assert [(one.in_background, one.rank, one.calls) for one in found.loads] == [
        (in_background, rank, 4 if in_background else 1)
        for _ in range(2)
        for in_background in (False, False, True)
        for rank in (64, 16, 8)
    ]
    assert all(one.median_gap_s > 0 for one in found.loads)
    words = table(found, None)
    assert words.count("thread reads") == words.count("plug-in reads") == 3
    assert "in medians" in words


async def remembered(slots: int, *_: object) -> Memory:
    return memory(slots, 15.0 + slots)


async def started(asks: int = 0) -> tuple[web.AppRunner, int]:
    """Return a server with vLLM's routes, and its port; it refuses a load ``asks`` times, as one that reads it."""
    loaded, asked = set[str](), Counter[str]()

    async def load(request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name in loaded:
            return web.json_response({}, status=400)
        asked[name] += 1
        if asked[name] <= asks:
            return web.json_response(
                {"error": f"adapter {name} is still being read: ask for it again"}, status=500
            )
        del asked[name]
        loaded.add(name)
        return web.Response(text="Success")

    async def unload(request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        there = name in loaded
        loaded.discard(name)
        return web.Response(status=200 if there else 404)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] not in {"model", *loaded}:
            return web.json_response({}, status=404)
        if not body.get("stream"):
            return web.json_response({})
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(body["max_tokens"]):
            await response.write(b"data: " + json.dumps({"token": number}).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", load)
    app.router.add_post("/v1/unload_lora_adapter", unload)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]
