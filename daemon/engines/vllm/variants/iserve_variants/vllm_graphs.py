"""Graphs of their own for steps with deltas, with adapters and with both, in vLLM's newer model runner.

vLLM captures a graph of each size for steps without adapters and one for those with any. The number of adapters
in a step is part of a graph's key there, for kernels whose launch depends on it; here the kind of the step takes
its place. The older runner has no such list of keys: one graph serves every step with a variant there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from iserve_variants.step_routes import StepKind, StepRoutes

__all__ = ["GraphKinds", "tell_kinds_apart"]

_KINDS = "iserve_graph_kinds"  # attribute of a runner's state of adapters


class GraphKinds:
    """Choice of the graph that computes a step, by the kind of the variants in it.

    Args:
        is_delta: of a request's adapter, whether it is a delta.
        forget: make the next step be routed, whether or not its rows are those of the one before.
    """

    def __init__(self, routes: StepRoutes, is_delta: Callable[[Any], bool], forget: Callable[[], None]) -> None:
        self._routes, self._is_delta, self._forget = routes, is_delta, forget

    def chosen(self, adapters: Sequence[Any]) -> StepKind:
        """Return the kind of a step with requests of ``adapters``, which is routed next."""
        kind = StepKind.BASE
        for adapter in adapters:
            kind |= StepKind.DELTAS if self._is_delta(adapter) else StepKind.ADAPTERS
        self._routes.expect(kind)
        return kind

    def capture(self, kind: StepKind) -> None:
        """Have what runs next launch what steps of ``kind`` do, though nothing is routed."""
        self._routes.launch_as(kind)
        self._forget()

    def of_dummy(self) -> StepKind:
        """Return the kind of a step that vLLM makes up, which it routed before."""
        self._routes.expect(None)
        return StepKind.BOTH


def tell_kinds_apart(runner: Any, kinds: GraphKinds) -> None:
    """Have a runner whose model is loaded capture graphs of each kind, unless it is the older one."""
    if not hasattr(runner, "lora_capture_cases"):
        return
    from vllm.v1.worker.gpu import model_runner

    _patch_runner(model_runner)
    setattr(runner.lora_state, _KINDS, kinds)
    runner.lora_capture_cases = list(range(StepKind.BOTH + 1))


def _patch_runner(model_runner: ModuleType) -> None:
    """Replace what tells graphs apart in the newer runner's module, for runners with kinds; once in a process."""
    if hasattr(model_runner, _KINDS):
        return
    theirs, their_hook = model_runner.get_num_active_loras_for_dispatch, model_runner.create_lora_capture_hook

    def get_num_active_loras_for_dispatch(
        lora_config: Any, lora_state: Any, req_ids: Sequence[str], dummy_run: bool
    ) -> int:
        kinds: GraphKinds | None = getattr(lora_state, _KINDS, None)
        if kinds is None:
            return int(theirs(lora_config, lora_state, req_ids, dummy_run))
        if dummy_run:
            return int(kinds.of_dummy())
        # Not vLLM's set of them: it holds one of two that had the same name, one after the other.
        adapters = {one.lora_int_id: one for one in map(lora_state.lora_requests.get, req_ids) if one is not None}
        return int(kinds.chosen(list(adapters.values())))

    def create_lora_capture_hook(lora_config: Any, runner: Any) -> Callable[[int, int, int], None] | None:
        hook: Callable[[int, int, int], None] | None = their_hook(lora_config, runner)
        kinds: GraphKinds | None = getattr(runner.lora_state, _KINDS, None)
        if hook is None or kinds is None:
            return hook

        def before_capture(number: int, num_reqs: int, num_tokens: int) -> None:
            hook(lora_config.max_loras + 1 if number else 0, num_reqs, num_tokens)
            kinds.capture(StepKind(number))

        return before_capture

    setattr(model_runner, _KINDS, True)
    model_runner.get_num_active_loras_for_dispatch = get_num_active_loras_for_dispatch  # type: ignore[attr-defined]
    model_runner.create_lora_capture_hook = create_lora_capture_hook  # type: ignore[attr-defined]
