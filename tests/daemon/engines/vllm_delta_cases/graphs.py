"""Cases of graphs of their own for steps with deltas, with adapters and with both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    SLOTS,
    VOCABULARY,
    case,
    request,
    run,
    tiny_model,
    write_adapter,
    write_delta,
)

ROWS = 8  # of a step that a graph computes


@contextmanager
def _launches(tiny: SimpleNamespace) -> Iterator[set[str]]:
    """Collect which kernels run: of deltas, of adapters."""
    found: set[str] = set()
    products, wrapper = (
        tiny.manager.runtime.products,
        type(next(iter(tiny.manager.punica_wrapper_mapping.values()))),
    )
    add, add_lora_linear = products.add, wrapper.add_lora_linear

    def of_deltas(*args: Any, **kwargs: Any) -> Any:
        found.add("deltas")
        return add(*args, **kwargs)

    def of_adapters(*args: Any, **kwargs: Any) -> Any:
        found.add("adapters")
        return add_lora_linear(*args, **kwargs)

    with patch.object(products, "add", of_deltas), patch.object(wrapper, "add_lora_linear", of_adapters):
        yield found


@case
def each_kind_is_captured_with_its_own_launches() -> None:
    import vllm.v1.worker.gpu.model_runner as runner_module
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    tiny = tiny_model(is_newer_runner=True)
    runner = tiny.runner
    assert runner.lora_capture_cases == [0, 1, 2, 3]
    assert CudaGraphManager._build_lora_dispatch_map(runner) == ({1: 1, 2: 2, 3: 3}, 3)
    hook = runner_module.create_lora_capture_hook(runner.lora_config, runner)
    expected: tuple[set[str], ...] = (set(), {"deltas"}, {"adapters"}, {"deltas", "adapters"})
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        for number in (3, 2, 1, 0, 1, 3):
            hook(number, 2, ROWS)
            with _launches(tiny) as found:
                tiny.model(torch.zeros(ROWS, dtype=torch.long))
            assert found == expected[number], (number, found)
    with runner.maybe_dummy_run_with_lora(
        runner.lora_config, np.array([4, 4]), np.array([1, 1]), num_active_loras=SLOTS
    ):
        assert (
            runner_module.get_num_active_loras_for_dispatch(runner.lora_config, runner.lora_state, [], True) == 3
        )
        with _launches(tiny) as found:
            tiny.model(torch.zeros(ROWS, dtype=torch.long))
    assert found == expected[3]


@case
def a_step_is_computed_as_without_them() -> None:
    """Rows of both, of one and of none, in turns; each by the graph of what its requests have."""
    import vllm.v1.worker.gpu.model_runner as runner_module

    with tempfile.TemporaryDirectory() as place:
        delta = request(1, write_delta(Path(place) / "delta", 1))
        adapter = request(2, write_adapter(Path(place) / "adapter", 2))
        plain, tiny = tiny_model(), tiny_model(is_newer_runner=True)
        state, tokens = tiny.runner.lora_state, torch.randint(0, VOCABULARY, (ROWS,))
        mixes = {0: [0] * ROWS, 1: [1, 0] * 4, 2: [2, 2, 0, 0] * 2, 3: [0, 1, 2, 1] * 2}
        for kind in (3, 1, 1, 2, 0, 1, 0, 2, 3):
            ids = mixes[kind]
            for row, one in enumerate(ids):
                state.add_request(str(row), row, {1: delta, 2: adapter}.get(one))
            names = [str(row) for row in range(ROWS)]
            chosen = runner_module.get_num_active_loras_for_dispatch(tiny.runner.lora_config, state, names, False)
            assert chosen == kind
            with _launches(tiny) as found:
                result = run(tiny, ids, [delta, adapter], tokens)
            assert found == {name for bit, name in ((1, "deltas"), (2, "adapters")) if kind & bit}
            assert torch.equal(result, run(plain, ids, [delta, adapter], tokens))
            for name in names:
                state.remove_request(name)


@case
def a_name_that_is_given_again_has_the_graph_of_both() -> None:
    """A delta runs whose name an adapter has by now, with an id of its own; then a step like the last one."""
    import vllm.v1.worker.gpu.model_runner as runner_module
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory() as place:
        delta, adapter = write_delta(Path(place) / "delta", 1), write_adapter(Path(place) / "adapter", 2)
        plain, tiny = tiny_model(graphs_by_kind=False), tiny_model(is_newer_runner=True)
        assert tiny_model(is_newer_runner=True, graphs_by_kind=False).runner.lora_capture_cases == [0, SLOTS + 1]
        state, tokens = tiny.runner.lora_state, torch.randint(0, VOCABULARY, (ROWS,))
        requests = [
            LoRARequest(lora_name="same", lora_int_id=number, lora_path=str(folder))
            for number, folder in ((1, delta), (2, adapter))
        ]
        ids = [1, 2, 0, 1] * 2
        for row, one in enumerate(ids):
            state.add_request(str(row), row, {1: requests[0], 2: requests[1]}.get(one))
        names = [str(row) for row in range(ROWS)]
        for one in (plain, tiny):
            for asked in requests:  # vLLM's set of a step's requests would hold the first alone
                assert one.runner.add_lora(asked)
        want = run(plain, ids, [], tokens)
        for _ in range(2):  # of a step like the one before nothing is routed
            assert runner_module.get_num_active_loras_for_dispatch(None, state, names, False) == 3
            assert torch.equal(run(tiny, ids, [], tokens), want)
        assert runner_module.get_num_active_loras_for_dispatch(None, state, [], False) == 0
        assert runner_module.get_num_active_loras_for_dispatch(None, state, [], True) == 3
        assert torch.equal(run(tiny, [2] * ROWS, [], tokens), run(plain, [2] * ROWS, [], tokens))


@case
def a_runner_without_such_keys_has_one_graph_for_all() -> None:
    tiny = tiny_model()
    with tempfile.TemporaryDirectory() as place:
        delta = request(1, write_delta(Path(place) / "delta", 1))
        with _launches(tiny) as found:
            run(tiny, [1] * ROWS, [delta], torch.zeros(ROWS, dtype=torch.long))
        assert found == {"deltas", "adapters"}
        assert tiny.manager.runtime.routes.graph_rows < 20
        with _launches(tiny) as found:  # no graph
            run(tiny, [1] * 20, [delta], torch.zeros(20, dtype=torch.long))
        assert found == {"deltas"}
