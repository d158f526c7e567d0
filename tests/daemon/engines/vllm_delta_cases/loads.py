"""Cases of loads: what waits, what runs ahead, and what a slot has that changes hands."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    BEING_READ,
    SLOTS,
    VOCABULARY,
    case,
    close,
    load_ahead,
    request,
    run,
    tiny_model,
    write_adapter,
    write_delta,
)


@case
def a_slot_taken_by_another_kind_has_nothing_of_the_former() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1)
        adapter = write_adapter(Path(place) / "adapter", 3)
        part = write_delta(Path(place) / "part", 4, leave=("norm", "embed", "lm_head", "gate", "k_proj"))
        tokens = torch.randint(0, VOCABULARY, (6,))
        fresh = {}
        for number, folder in ((1, delta), (2, adapter), (3, part)):
            fresh[number] = run(tiny_model(), [number] * 6, [request(number, folder)], tokens)
        requests = [request(1, delta), request(2, adapter), request(3, part)]
        for background in (False, True):
            tiny = tiny_model(background=background)
            for number in (1, 2, 3, 1, 3, 2, 1, 2):
                for other in (1, 2, 3):
                    tiny.runner.remove_lora(other)  # the first slot is taken again
                if background and number != 2:
                    load_ahead(tiny, requests[number - 1])
                found = run(tiny, [number] * 6, requests, tokens)
                assert tiny.manager.lora_index_to_id[0] == number
                assert torch.equal(found, fresh[number]), number


@case
def a_delta_that_is_ready_gets_a_slot_without_work_for_each_module() -> None:
    """Even where another had the slot, and rows of the step that goes on are not routed anew."""
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in range(1, 6)]
        tiny = tiny_model(background=True)
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        ids, calls, called = (1, 0, 1), list[str](), ("fill", "clear", "put", "set_lora", "reset_lora")
        tiny.runner._set_active_loras(ids, ids, {requests[0]})
        for module in tiny.manager.modules.values():
            for one in (module, getattr(module, "deltas", None)):
                for name in called:
                    if hasattr(one, name):
                        setattr(one, name, lambda *given, name=name: calls.append(name))
        tiny.runner.remove_lora(1)
        run(tiny, [1] * 3, requests, torch.zeros(3, dtype=torch.long))
        assert calls.count("fill") + calls.count("clear") == len(tiny.manager.filler._modules)  # one that waits
        routes = tiny.manager.runtime.routes
        for asked in requests[1:]:
            with pytest.raises(ValueError, match=BEING_READ):
                tiny.runner.add_lora(asked)
            tiny.manager.loader.wait()
            calls.clear()
            tiny.runner._set_active_loras(ids, ids, {requests[0]})
            slots, routes.token_slots[0] = int(routes.token_slots[0]), 77
            assert tiny.runner.add_lora(asked)
            tiny.runner._set_active_loras(ids, ids, {requests[0]})
            assert calls == []
            assert int(routes.token_slots[0]) == 77  # not written
            routes.token_slots[0] = slots
        assert len(set(tiny.manager.lora_index_to_id)) == SLOTS


@case
def loads_ahead_are_those_that_wait() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2, 3)]
        folders.append(write_delta(Path(place) / "part", 4, leave=("norm", "embed", "lm_head", "gate", "k_proj")))
        folders.append(write_adapter(Path(place) / "adapter", 5))
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        waits, ahead = tiny_model(), tiny_model(background=True)
        tokens = torch.randint(0, VOCABULARY, (6,))
        loader = ahead.manager.loader
        for number in (1, 2, 4, 5, 3, 1, 4, 2):
            ahead.runner.remove_lora(number)
            if number != 5:
                with pytest.raises(ValueError, match=BEING_READ):
                    ahead.runner.add_lora(requests[number - 1])
                assert number not in ahead.runner.list_loras()
                loader.wait()
            assert ahead.runner.add_lora(requests[number - 1])
            places = [ahead.manager.runtime.places.of(slot) for slot in range(SLOTS)]
            assert sorted([*places, ahead.manager.runtime.places.spare]) == list(range(SLOTS + 1))
            others = [one for one in ahead.manager.lora_index_to_id if one not in (None, number)][:2]
            ids = [number, *others, 0, number, *others][:6]
            ids += [0] * (6 - len(ids))
            found, want = (run(one, ids, requests, tokens) for one in (ahead, waits))
            assert torch.equal(found, want), (number, ids)
        ahead.runner.remove_lora(3)
        close(run(ahead, [3] * 6, requests, tokens), run(waits, [3] * 6, requests, tokens), 1e-6)  # not asked for


@case
def a_delta_that_was_loaded_before_is_loaded_without_its_file() -> None:
    """From the arena: after an unload, after its slot was taken, next to steps or not; the bytes are the same."""
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2, 3)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tokens = torch.randint(0, VOCABULARY, (6,))
        want = [run(tiny_model(), [number] * 6, requests, tokens) for number in (1, 2, 3)]
        kept = (folders[0] / "delta.safetensors").read_bytes()
        for background in (True, False):
            tiny = tiny_model(background=background, arena_mib=1)
            folders_of, arena = tiny.manager.folders, tiny.manager.folders.arena
            for number in (1, 2, 1, 3, 1):
                if number == 1 and (folders_of.wait() or arena.taken_bytes()):
                    (folders[0] / "delta.safetensors").unlink()
                if background:
                    load_ahead(tiny, requests[number - 1])
                found = run(tiny, [number] * 6, requests, tokens)
                assert torch.equal(found, want[number - 1]), number
                tiny.runner.remove_lora(number)
                (folders[0] / "delta.safetensors").write_bytes(kept)
                for thread in threading.enumerate():
                    if thread.name == "iserve-free":
                        thread.join()
                assert arena.taken_bytes() <= 2**20
            del folders_of, arena, tiny


@case
def a_delta_that_lost_its_slot_is_read_without_pauses_in_the_step() -> None:
    """A step whose delta's folder has gone fails and leaves the slots."""
    from iserve_variants import background as module

    slept, pauses = list[threading.Thread](), module.time
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        recorded = SimpleNamespace(
            perf_counter=lambda: len(slept) * 1e9 + pauses.perf_counter(),  # each call is one that pauses
            sleep=lambda seconds: slept.append(threading.current_thread()),
            monotonic=pauses.monotonic,
        )
        patch.setattr(module, "time", recorded)
        patch.setattr(module, "_MOST_HELD_S", -1.0)
        folders = [write_delta(Path(place) / str(seed), seed) for seed in range(1, SLOTS + 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tokens = torch.randint(0, VOCABULARY, (6,))
        want = run(tiny_model(), [1] * 6, requests[:1], tokens)
        tiny = tiny_model(background=True, arena_mib=64)
        for asked in requests:
            load_ahead(tiny, asked)
        assert slept  # in the thread next to steps
        tiny.manager.folders.wait()
        manager, ids = tiny.manager, list(tiny.manager.lora_index_to_id)
        assert 1 not in ids
        assert 1 in tiny.runner.list_loras()
        kept = Path(place) / "kept"
        folders[0].rename(kept)
        with pytest.raises(FileNotFoundError):
            tiny.runner._set_active_loras((1,), (1,), {requests[0]})
        assert manager.lora_index_to_id == ids
        kept.rename(folders[0])
        slept.clear()
        assert torch.equal(run(tiny, [1] * 6, requests[:1], tokens), want)
        assert threading.main_thread() not in slept
        assert slept == []


@case
def a_load_without_memory_leaves_the_worker_as_it_was() -> None:
    """Memory ends while a thread or the call fills a place: an error that says so, and the next call loads."""
    said = "CUDA out of memory. Tried to allocate 20.00 MiB"
    with tempfile.TemporaryDirectory() as place:
        one, two = (request(seed, write_delta(Path(place) / str(seed), seed)) for seed in (1, 2))
        tokens = torch.randint(0, VOCABULARY, (6,))
        ids = [1, 1, 0, 1, 0, 1]
        for background in (True, False):
            tiny = tiny_model(background=background)
            want = run(tiny, ids, [one], tokens)
            fill, calls = tiny.manager.filler._fill, list[None]()

            def full(*given: Any, fill: Any = fill, calls: list[None] = calls, **named: Any) -> None:
                calls.append(None)
                if len(calls) == 3:  # the third module's
                    raise torch.OutOfMemoryError(said)
                fill(*given, **named)

            tiny.manager.filler._fill = full
            if background:
                with pytest.raises(ValueError, match="still being read"):
                    tiny.runner.add_lora(two)
                tiny.manager.loader.wait()
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                tiny.runner.add_lora(two)
            assert tiny.runner.list_loras() == {1}
            assert torch.equal(run(tiny, ids, [one], tokens), want)
            if background:
                load_ahead(tiny, two)
            else:
                assert tiny.runner.add_lora(two)
            assert tiny.runner.list_loras() == {1, 2}
            assert torch.equal(run(tiny, ids, [one], tokens), want)
            fresh = run(tiny_model(), [2] * 6, [two], tokens)
            assert torch.equal(run(tiny, [2] * 6, [two], tokens), fresh)


@case
def a_delta_that_is_dropped_is_freed_by_a_thread() -> None:
    with tempfile.TemporaryDirectory() as place:
        asked = request(1, write_delta(Path(place) / "delta", 1))
        for background in (True, False):
            tiny = tiny_model(background=background)
            for ahead in (False, True) if background else (False,):
                if ahead:
                    load_ahead(tiny, asked)
                else:
                    tiny.runner._set_active_loras((1,), (1,), {asked})
                pairs = tiny.manager.list_adapters()[1].pairs
                assert pairs
                tiny.runner.remove_lora(1)
                for thread in threading.enumerate():
                    if thread.name == "iserve-free":
                        thread.join()
                assert bool(pairs) != background  # page-locked buffers are kept by torch
