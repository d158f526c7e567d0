"""Cases of adapters that a thread loads, in vLLM's own LoRA code on a CPU; prints a line of JSON for each.

    python -m tests.daemon.engines.vllm_adapter_loads_on_cpu SITE [CASE ...]

``SITE`` is a folder with vLLM 0.33.0 and the Python of its dependencies.
"""

from __future__ import annotations

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
def vllms_own_manager_stays_without_the_setting() -> None:
    from iserve_variants.settings import adapter_loads_config
    from iserve_variants.vllm_aside import AsideWorkerManager

    tiny = tiny_model(adapters_alone=True, loads_adapters_aside=True)
    worker = tiny.runner.lora_manager
    assert isinstance(worker, AsideWorkerManager)
    assert worker.loads is not None
    plain = tiny_model(adapters_alone=True).runner.lora_manager
    assert not isinstance(plain, AsideWorkerManager)
    assert adapter_loads_config() == {"iserve_adapter_loads": {"background": 1}}


if __name__ == "__main__":
    main(CASES)
