"""Cases of adapters that a thread loads, in vLLM's own LoRA code on a CPU; prints a line of JSON for each.

    python -m tests.daemon.engines.vllm_adapter_loads_on_cpu SITE [CASE ...]

``SITE`` is a folder with vLLM 0.33.0 and the Python of its dependencies.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    SLOTS,
    VOCABULARY,
    request,
    run,
    tiny_model,
    write_adapter,
    write_delta,
)
from tests.daemon.engines.vllm_deltas_on_cpu import main

CASES: dict[str, Callable[[], None]] = {}
KINDS: tuple[dict[str, Any], ...] = ({"adapters_alone": True}, {}, {"background": True})
BEING_READ = "being read"


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case by its name."""
    CASES[function.__name__] = function
    return function


@contextmanager
def adapters(count: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as place:
        yield [write_adapter(Path(place) / str(seed), seed) for seed in range(1, count + 1)]


def load(tiny: SimpleNamespace, number: int, folder: Path) -> None:
    """Load as a client does: each time that it asks, vLLM gives the adapter another number."""
    with pytest.raises(ValueError, match=BEING_READ):
        tiny.runner.add_lora(request(number + 100, folder))
    assert not {number, number + 100} & tiny.runner.list_loras()
    tiny.runner.lora_manager.loads.wait()
    assert tiny.runner.add_lora(request(number, folder))


@case
def adapters_are_those_of_loads_that_block() -> None:
    with adapters(5) as folders:
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tokens = torch.randint(0, VOCABULARY, (6,))
        for kind in KINDS:
            blocks, aside = tiny_model(**kind), tiny_model(loads_adapters_aside=True, **kind)
            for number in (1, 2, 4, 5, 3, 1, 4, 2):
                aside.runner.remove_lora(number)
                load(aside, number, folders[number - 1])
                assert number in aside.manager.lora_index_to_id
                others = [one for one in aside.manager.lora_index_to_id if one not in (None, number)][:2]
                ids = ([number, *others, 0, number] + [0] * 6)[:6]
                found, want = (run(one, ids, requests, tokens) for one in (aside, blocks))
                assert torch.equal(found, want), (kind, number, ids)
                assert float((found[0] - found[3]).abs().max()) > 0


@case
def the_last_call_and_the_next_step_copy_nothing() -> None:
    with adapters(4) as folders:
        for kind in KINDS:
            tiny, calls = tiny_model(loads_adapters_aside=True, **kind), list[str]()
            for module in tiny.manager.modules.values():
                for name in ("set_lora", "reset_lora"):
                    theirs = getattr(module, name)

                    def called(*given: Any, theirs: Any = theirs, name: str = name, calls: Any = calls) -> None:
                        calls.append(f"{name} {threading.current_thread() is threading.main_thread()}")
                        theirs(*given)

                    setattr(module, name, called)
            first = request(1, folders[0])
            load(tiny, 1, folders[0])
            for number in (2, 3, 4):
                with pytest.raises(ValueError, match=BEING_READ):
                    tiny.runner.add_lora(request(number + 100, folders[number - 1]))
                tiny.runner._set_active_loras((1, 0, 1), (1, 0, 1), {first})  # a step meanwhile
                tiny.runner.lora_manager.loads.wait()
                assert tiny.runner.add_lora(request(number, folders[number - 1]))
                tiny.runner._set_active_loras((1, number, 1), (1, number, 1), {first, request(number, folders[0])})
            assert "set_lora False" in calls
            assert not [one for one in calls if one.endswith("True")], kind
            assert len(set(tiny.manager.lora_index_to_id)) == SLOTS


@case
def a_step_takes_the_slot_that_is_being_filled() -> None:
    """All slots are in use while a thread fills one: the steps' adapters are right, and so is the one loaded."""
    with adapters(4) as folders:
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tokens, ids = torch.randint(0, VOCABULARY, (6,)), [1, 2, 3, 0, 3, 1]
        for kind in KINDS:
            tiny = tiny_model(loads_adapters_aside=True, **kind)
            want = run(tiny_model(**kind), ids, requests, tokens)
            assert torch.equal(run(tiny, ids, requests, tokens), want)
            theirs, there, go = tiny.manager.fill_module, threading.Event(), threading.Event()
            loads, pauses = tiny.runner.lora_manager.loads, list[str]()

            def fill(name: str, *given: Any, theirs: Any = theirs, pauses: list[str] = pauses) -> None:
                theirs(name, *given)
                pauses.append(name)

            def waits(pause: Any, there: Any = there, go: Any = go) -> Any:
                def wait() -> None:
                    there.set()
                    assert go.wait(60)

                return wait

            fill_modules = loads._fill_modules
            tiny.manager.fill_module = fill
            loads._fill_modules = lambda lora, pause, run=fill_modules, waits=waits: run(lora, waits(pause))
            with pytest.raises(ValueError, match=BEING_READ):
                tiny.runner.add_lora(request(104, folders[3]))
            assert there.wait(60)
            found = run(tiny, ids, requests, tokens)  # all three slots
            assert torch.equal(found, want)
            assert 104 not in tiny.manager.lora_index_to_id
            go.set()
            loads.wait()
            assert len(pauses) == 1, pauses  # nothing more was written
            assert torch.equal(run(tiny, ids, requests, tokens), want)
            assert tiny.runner.add_lora(requests[3])  # copied now
            both = [4, 1, 4, 2, 0, 4]
            assert torch.equal(run(tiny, both, requests, tokens), run(tiny_model(**kind), both, requests, tokens))


@case
def one_that_cannot_be_read_leaves_its_slot() -> None:
    with adapters(2) as (good, bad):
        (bad / "adapter_model.safetensors").write_bytes(b"none")
        for kind in KINDS:
            tiny = tiny_model(loads_adapters_aside=True, **kind)
            for _ in range(2):
                with pytest.raises(ValueError, match=BEING_READ):
                    tiny.runner.add_lora(request(1, bad))
                tiny.runner.lora_manager.loads.wait()
                with pytest.raises(Exception, match=r"(?i)header|safetensor|deserializ"):
                    tiny.runner.add_lora(request(2, bad))
                assert tiny.manager.lora_index_to_id == [None] * SLOTS
            load(tiny, 3, good)
            assert tiny.runner.add_lora(request(3, good))  # it is loaded


@case
def one_that_is_not_asked_for_again_leaves_its_slot() -> None:
    with adapters(3) as folders:
        tiny = tiny_model(adapters_alone=True, loads_adapters_aside=True)
        loader = tiny.runner.lora_manager.loads._loader

        def ask(number: int, folder: Path) -> None:
            with pytest.raises(ValueError, match=BEING_READ):
                tiny.runner.add_lora(request(number, folder))
            loader.wait()

        ask(1, folders[0])
        ask(2, folders[1])  # the first may be asked for again
        assert [one for one in tiny.manager.lora_index_to_id if one is not None] == [1]
        loader.kept_s = 0.0
        ask(2, folders[1])
        ask(3, folders[2])
        assert [one for one in tiny.manager.lora_index_to_id if one is not None] == [3]
        load(tiny, 4, folders[0])
        assert [one for one in tiny.manager.lora_index_to_id if one is not None] == [4]
        tiny.runner.lora_manager.remove_all_adapters()
        assert tiny.manager.lora_index_to_id == [None] * SLOTS


@case
def deltas_and_adapters_have_loads_of_their_own() -> None:
    with adapters(1) as (adapter,):
        tiny = tiny_model(background=True, loads_adapters_aside=True)
        delta = write_delta(adapter.parent / "delta", 7)
        for number, folder in ((1, adapter), (2, delta)):
            with pytest.raises(ValueError, match=BEING_READ):
                tiny.runner.add_lora(request(number, folder))
        tiny.manager.loader.wait()
        tiny.runner.lora_manager.loads.wait()
        assert tiny.runner.add_lora(request(2, delta))
        assert tiny.runner.add_lora(request(1, adapter))
        ids, tokens = [1, 2, 0, 1, 2, 0], torch.randint(0, VOCABULARY, (6,))
        requests = [request(1, adapter), request(2, delta)]
        assert torch.equal(run(tiny, ids, requests, tokens), run(tiny_model(), ids, requests, tokens))


@case
def reading_pauses_before_each_name_and_tensor() -> None:
    """Pauses of the thread next to steps; a step that reads by itself waits for nothing."""
    from iserve_variants import background, vllm_aside

    class Noted(background.Pauses):
        def __call__(self) -> None:
            done.append("pause")

        def take(self) -> None:
            done.append("take")

    done, opened = list[str](), vllm_aside.AdapterFile

    def adapter_file(*args: Any, **kwargs: Any) -> Any:
        done.append("open")
        return opened(*args, **kwargs)

    with adapters(1) as (folder,), pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_aside, "AdapterFile", adapter_file)
        for kind in KINDS:
            read = tiny_model(loads_adapters_aside=True, **kind).runner.lora_manager.loads._read
            done.clear()
            want = read(request(1, folder)).loras
            assert done == ["open"]
            done.clear()
            token = vllm_aside._pauses.set(Noted())
            try:
                found = read(request(1, folder))
            finally:
                vllm_aside._pauses.reset(token)
            tensors = 2 * len(want)  # checked, read and converted one by one
            assert done == ["take", "open", "take", *["pause"] * 3 * tensors], done  # of one group
            found.end_pauses()
            assert found.loras.keys() == want.keys()
            assert all(torch.equal(found.loras[one].lora_a, want[one].lora_a) for one in want)


@case
def one_of_the_same_folder_as_a_step_uses_is_loaded() -> None:
    """Two variants of one content; steps of the first go on while the second is asked for."""
    with adapters(1) as (folder,):
        tiny = tiny_model(adapters_alone=True, loads_adapters_aside=True)
        load(tiny, 1, folder)
        with pytest.raises(ValueError, match=BEING_READ):
            tiny.runner.add_lora(request(10, folder))
        tiny.runner.lora_manager.loads.wait()
        tiny.runner._set_active_loras((1, 0, 1), (1, 0, 1), {request(1, folder)})
        assert tiny.runner.add_lora(request(11, folder))
        assert {1, 11} <= set(tiny.manager.lora_index_to_id)


@case
def no_page_is_locked_where_loads_are_next_to_steps() -> None:
    """Memory as where vLLM locks pages, which torch refuses without a GPU."""
    from vllm.lora import lora_model, lora_weights, model_manager

    modules = (lora_model, lora_weights, model_manager)
    with adapters(1) as (folder,), pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            for module in modules:
                patch.setattr(module, "PIN_MEMORY", True)
            tiny = tiny_model(loads_adapters_aside=True, **kind)
            load(tiny, 1, folder)
            assert not any(module.PIN_MEMORY for module in modules)


@case
def a_refusal_is_not_logged_and_an_error_is() -> None:
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.v1.engine.core import EngineCoreProc

    records = list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    configure_logging(LoggingConfig())  # which vLLM may do after its plug-ins
    logging.getLogger("vllm").addHandler(handler)
    try:
        with adapters(1) as (bad,):
            (bad / "adapter_model.safetensors").write_bytes(b"none")
            tiny = tiny_model(adapters_alone=True, loads_adapters_aside=True)
            said = list[str]()
            for number in (1, 2):
                output = SimpleNamespace(result=None, failure_message=None)

                def load_it(number: int = number) -> Any:
                    return tiny.runner.add_lora(request(number, bad))

                EngineCoreProc._invoke_utility_method("add_lora", load_it, output, lambda one: None)  # type: ignore[arg-type]
                said.append(str(output.failure_message))
                tiny.runner.lora_manager.loads.wait()
                assert len(records) == number - 1
            assert [BEING_READ in one for one in said] == [True, False]
            assert records[0].exc_info
    finally:
        logging.getLogger("vllm").removeHandler(handler)


@case
def no_thread_loads_without_the_setting() -> None:
    from iserve_variants.settings import adapter_loads_config
    from iserve_variants.vllm_aside import AsideWorkerManager

    tiny = tiny_model(adapters_alone=True, loads_adapters_aside=True)
    worker = tiny.runner.lora_manager
    assert isinstance(worker, AsideWorkerManager)
    assert worker.loads is not None
    plain = tiny_model(adapters_alone=True).runner.lora_manager
    assert not isinstance(plain, AsideWorkerManager)
    assert adapter_loads_config() == {"iserve_adapter_loads": {"background": 1}}


@case
def adapters_of_small_ranks_share_places() -> None:
    """Eight places of rank 8: what is kept, against the shares of those that were loaded or used last."""
    from iserve_variants.settings import PER_PLACE, place_share

    for kind in ({"adapters_alone": True}, {"adapters_alone": True, "loads_adapters_aside": True}):
        with tempfile.TemporaryDirectory() as place:
            tiny, used = tiny_model(**kind), list[tuple[int, int]]()
            for number in range(1, 100):
                tiny.runner.lora_manager._waits = True  # as for what a step needs
                rank = (1, 4, 8, 1, 2)[number * number % 5] if number > 70 else 1
                folder = write_adapter(Path(place) / str(number), number, rank=rank)
                assert tiny.runner.add_lora(request(number, folder))
                used.append((number, rank))
                if number % 3 == 0:  # a step with one that is kept, though it may have lost its slot
                    old = used.pop(len(used) // 2)
                    tiny.runner._set_active_loras(
                        (old[0],), (old[0],), {request(old[0], Path(place) / str(old[0]))}
                    )
                    used.append(old)
                while sum(place_share(one, 8) for _, one in used) > 8:
                    used.pop(0)
                assert tiny.runner.list_loras() == {one for one, _ in used}, number
                assert len(used) <= 8 * PER_PLACE
            assert len(used) < 8 * PER_PLACE
    with tempfile.TemporaryDirectory() as place:  # of which each matrix has the rank that its pattern says
        tiny = tiny_model(adapters_alone=True)
        for number in range(1, 10):
            folder = write_adapter(Path(place) / str(number), number, rank=8)
            config = json.loads((folder / "adapter_config.json").read_text())
            config |= {"r": 1, "rank_pattern": {".*": 8}, "alpha_pattern": {".*": 8}}
            (folder / "adapter_config.json").write_text(json.dumps(config))
            assert tiny.runner.add_lora(request(number, folder))
        assert tiny.runner.list_loras() == set(range(2, 10))
    deltas = tiny_model(background=False).manager
    assert (deltas.capacity, tiny.manager.capacity) == (8, 8 * PER_PLACE)


@case
def a_step_with_loaded_adapters_lists_none() -> None:
    """The adapters and their slots are those that vLLM's own manager has."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    with adapters(SLOTS + 2) as folders:
        requests = [request(number, folder) for number, folder in enumerate(folders, 1)]
        found = []
        for theirs in (False, True):
            tiny, listed = tiny_model(adapters_alone=True), list[str]()
            kind = type(tiny.runner.lora_manager)
            names = ("add_adapter", "list_adapters")
            with pytest.MonkeyPatch.context() as patch:
                if theirs:
                    for name in names:
                        patch.setattr(kind, name, getattr(LRUCacheWorkerLoRAManager, name))
                for one in requests:
                    tiny.runner.add_lora(one)
                slots = []
                for ids in ((1, 2), (2, 1), (3, 4, 5), (5,), (1, 5, 4), (1, 5, 4)):
                    own = kind.list_adapters
                    patch.setattr(
                        kind, "list_adapters", lambda self, own=own, listed=listed: listed.append("") or own(self)
                    )
                    del listed[:]
                    had_slots = set(ids) <= set(tiny.manager.lora_index_to_id)
                    tiny.runner._set_active_loras(ids, ids, {requests[one - 1] for one in ids})
                    slots.append(tuple(tiny.manager.lora_index_to_id))
                    assert theirs or not (had_slots and listed)
                    patch.setattr(kind, "list_adapters", own)
            found.append(slots)
        assert found[0] == found[1]


if __name__ == "__main__":
    main(CASES)
