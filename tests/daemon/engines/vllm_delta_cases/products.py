"""Cases of what a step computes: rows of deltas, adapters and the base, in vLLM's own code."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.daemon.engines.recorded_kernels import recorded_kernels
from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    HIDDEN,
    VOCABULARY,
    case,
    changed_model,
    close,
    request,
    run,
    tiny_model,
    write_adapter,
    write_delta,
)


@case
def rows_of_deltas_are_those_of_the_changed_model() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        adapter = write_adapter(Path(place) / "adapter", 3)
        tiny = tiny_model()
        requests = [request(i + 1, folder) for i, folder in enumerate([*folders, adapter])]
        tokens = torch.randint(0, VOCABULARY, (12,))
        ids = [0, 1, 2, 1, 3, 0, 2, 2, 1, 3, 0, 1]
        found = run(tiny, ids, requests, tokens)
        base = run(tiny, [0] * 12, [], tokens)
        adapted = run(tiny, [3] * 12, requests, tokens)
        at = torch.tensor(ids)
        assert torch.equal(found[at == 0], base[at == 0])
        assert torch.equal(found[at == 3], adapted[at == 3])
        assert float((adapted - base).norm() / base.norm()) > 0.05
        for number, folder in enumerate(folders, start=1):
            want = run(changed_model(folder), [0] * 12, [], tokens)
            close(found[at == number], want[at == number])
            assert float((base - want).norm() / want.norm()) > 0.2  # the change is one


@case
def long_prompts_are_multiplied_with_merged_weights() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        ids = [0] * 5 + [1] * 30 + [2] * 9 + [0] * 3 + [1] * 20 + [2] * 2
        tokens = torch.randint(0, VOCABULARY, (len(ids),))
        merged, plain = tiny_model(merged_from_rows=40), tiny_model(merged_from_rows=None)
        found, want = (run(one, ids, requests, tokens) for one in (merged, plain))
        routes = merged.manager.runtime.routes
        slot = merged.manager.lora_index_to_id.index(1)
        assert [(run.slot, run.end - run.start) for run in routes.runs] == [
            (-1, 5), (slot, 30), (-1, 12), (slot, 20), (-1, 2)
        ]  # fmt: skip
        assert plain.manager.runtime.routes.runs == ()
        close(found, want)
        at = torch.tensor(ids)
        close(found[at == 0], want[at == 0], 1e-2)


@case
def slots_are_given_to_the_deltas_used_last() -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = [write_delta(Path(place) / str(seed), seed) for seed in range(1, 6)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tokens = torch.randint(0, VOCABULARY, (6,))
        for arena_mib in (0, 1, 64):  # none, one that has some of them, one that has all
            tiny = tiny_model(arena_mib=arena_mib)
            alone = [run(tiny, [number] * 6, requests, tokens) for number in range(1, 6)]
            for mix in ([1, 2, 3, 1, 2, 3], [4, 5, 1, 4, 0, 0], [2, 2, 3, 5, 0, 0], [3, 4, 5, 5, 4, 3]):
                found = run(tiny, mix, requests, tokens)
                for row, number in enumerate(mix):
                    if number:
                        close(found[row], alone[number - 1][row], 1e-2)
            arena = tiny.manager.folders.arena
            tiny.manager.folders.wait()
            assert bool(arena.taken_bytes()) == bool(arena_mib)
            assert all(not held.users for held in arena._kept.values())  # a slot has what it has


@case
def classes_without_adapters_of_their_vocabulary_take_its_deltas() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta, ids = write_delta(Path(place) / "delta", 1), [1, 0, 1, 1, 0, 0]
        tokens = torch.randint(0, VOCABULARY, (6,))
        with_adapters, without = (
            run(tiny_model(has_vocabulary=has), ids, [request(1, delta)], tokens) for has in (True, False)
        )
        close(without, with_adapters, 1e-2)


@case
def a_tied_output_layer_changes_with_its_embedding() -> None:
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1, leave=("lm_head",))
        ids, tokens = [1, 0, 1, 1, 0, 0], torch.randint(0, VOCABULARY, (6,))
        for has_head in (True, False):
            tiny = tiny_model(is_tied=True, has_head=has_head, output_format=None)
            found = run(tiny, ids, [request(1, delta)], tokens)
            assert "lm_head" not in {name for name, _ in tiny.manager.places.taken.items()}
            want = changed_model(delta, is_tied=True, has_head=has_head, output_format=None)
            at = torch.tensor(ids)
            close(found[at == 1], run(want, [0] * 6, [], tokens)[at == 1])
            base = run(tiny, [0] * 6, [], tokens)
            assert torch.equal(found[at == 0], base[at == 0])


@case
def a_stage_takes_its_own_part_of_a_delta() -> None:
    """The last of a pipeline, whose output layer is the first stage's embedding."""
    with tempfile.TemporaryDirectory() as place:
        delta = write_delta(Path(place) / "delta", 1, leave=("lm_head",))
        whole, stage = (
            tiny_model(is_tied=True, output_format=None, is_last_stage=is_last) for is_last in (False, True)
        )
        theirs = dict(whole.model.named_parameters(remove_duplicate=False))
        for name, value in stage.model.named_parameters():
            value.data.copy_(theirs[name].data)
        for name in ("layers.1.norm", "norm"):
            stage.manager.modules[name].deltas.table[:] = whole.manager.modules[name].deltas.table
        x, ids = torch.randn(4, HIDDEN).bfloat16(), (1, 0, 1, 0)
        found = []
        for one in (whole, stage):
            one.runner._set_active_loras(ids, ids, {request(1, delta)})
            hidden, residual = one.model.layers[1](x, None)
            found.append(one.model.compute_logits(one.model.norm(hidden, residual)[0]).float())
        close(found[1], found[0], 1e-6)
        loaded = stage.manager.list_adapters()[1].pairs
        assert {name.partition(".")[0] for name in loaded} == {"layers", "norm", "lm_head"}
        assert not any(name.startswith("layers.0") for name in loaded)


@case
def steps_reach_no_kernel_that_was_not_warm_at_the_start() -> None:
    """A storm of mixes and sizes: prompts that are merged and not, rows that are sampled, an adapter."""
    from iserve_variants import vllm_manager
    from iserve_variants.products import TritonProducts

    reached, generator = set[Any](), random.Random(0)

    def made(device: torch.device, **sizes: int) -> Any:
        return TritonProducts(device, **sizes, kernels=recorded_kernels(reached))

    with tempfile.TemporaryDirectory() as place, patch.object(vllm_manager, "products_for", made):
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        requests.append(request(3, write_adapter(Path(place) / "adapter", 3)))
        whole = requests[:2]
        tied = [request(1 + i, write_delta(Path(place) / f"tied{i}", i, leave=("lm_head",))) for i in range(2)]
        for settings in (
            {},
            {"is_tied": True, "output_format": None},
            {"format": "int4", "merged_from_rows": None},
        ):
            reached.clear()
            requests[:2] = tied if "is_tied" in settings else whole
            tiny = tiny_model(**{"merged_from_rows": 40, **settings})
            warm = set(reached)
            for _ in range(30):
                rows = generator.choice((1, 2, generator.randint(3, 32), generator.randint(33, 512)))
                ids = sorted(generator.choices(range(4), k=rows), key=lambda one: (one * 7 + rows) % 4)
                run(tiny, ids, requests, torch.randint(0, VOCABULARY, (rows,)))
            assert reached == warm, reached - warm
            merged = {key for key in warm if key[0] == "merge"}
            assert bool(merged) == (settings.get("merged_from_rows", 40) is not None)


@case
def the_compiler_traces_the_model_once_for_all_mixes() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def count(lowered: Any, _: Any) -> Any:
            graphs.append(lowered.code)
            return make_boxed_func(lowered.forward)

        return aot_autograd(fw_compiler=count)(graph, inputs)

    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folders = [write_delta(Path(place) / str(seed), seed) for seed in (1, 2)]
        requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
        tiny = tiny_model(has_vocabulary=False)
        eager, compiled = (
            tiny.model.forward,
            torch.compile(tiny.model.forward, fullgraph=True, dynamic=False, backend=backend),
        )
        for ids in ([0, 1, 2, 1], [0, 0, 0], [2] * 9, [1, 0, 2, 2, 1, 0]):
            tokens = torch.randint(0, VOCABULARY, (len(ids),))
            tiny.runner._set_active_loras(tuple(ids), tuple(ids), {requests[one - 1] for one in set(ids) - {0}})
            torch._dynamo.mark_dynamic(tokens, 0)  # the number of tokens alone, as vLLM does
            close(compiled(tokens), eager(tokens), 1e-2)
    assert len(graphs) == 1, len(graphs)
    assert graphs[0].count("ops.vllm.iserve_delta_linear.default(") == 8
    assert "layers.0.qkv_proj" not in graphs[0]  # names are inputs: pieces of all layers are one graph
