"""Parts of the deltas' plug-in that need no vLLM: settings, placement of tensors, routes of steps, products."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import ADAPTER_RANKS, DeploymentConfig, SlotFormat
from tests.daemon.engines.recorded_kernels import recorded_kernels
from tests.daemon.variant_kernels import VARIANTS_PATH, variant_module
from tests.golden_words import Golden

background = variant_module("background")
folder = variant_module("folder")
formats = variant_module("formats")
placement = variant_module("placement")
products = variant_module("products")
reference = variant_module("reference")
settings_module = variant_module("settings")
slots_module = variant_module("slots")
Settings, read_settings = settings_module.Settings, settings_module.read_settings
step_routes = variant_module("step_routes")
SEGMENT_ROWS, StepKind, StepRoutes = step_routes.SEGMENT_ROWS, step_routes.StepKind, step_routes.StepRoutes
Kind, Place, Places = placement.Kind, placement.Place, placement.Places
INT2 = formats.FORMATS["int2"]
SLOTS, GRAPH_ROWS, MERGED = 4, 8, 6


def _routes(merged_from_rows: int | None = MERGED) -> Any:
    made = StepRoutes(
        slots=SLOTS, max_rows=64, device="cpu", graph_rows=GRAPH_ROWS, merged_from_rows=merged_from_rows
    )
    made.wants_samples = True
    return made


def _routed(route: Any) -> dict[int, int]:
    """Return the slot of each routed row."""
    found = {}
    for slot, first, count, _ in route.segments[: int(route.num_segments)].tolist():
        assert 0 < count <= SEGMENT_ROWS
        found |= dict.fromkeys(route.order[first : first + count].tolist(), slot)
    return found


def test_vllm_finds_the_plug_in_where_its_folder_is_on_the_path() -> None:
    (found,) = importlib.metadata.distributions(path=[VARIANTS_PATH])
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == (
        "vllm.general_plugins",
        "iserve_variants",
        "iserve_variants.plugin:register",
    )
    assert callable(variant_module("plugin").register)


def test_settings_are_read_as_they_were_given() -> None:
    given_settings = Settings(format="int3", embedding_format="int4", norms=True, merged_from_rows=None)
    assert read_settings(given_settings.to_config()) == given_settings
    assert read_settings({}) is None
    assert read_settings({"others": {}}) is None
    assert read_settings({"iserve_deltas": {}}) == Settings()


@pytest.mark.parametrize(
    "given_value",
    [
        pytest.param({"format": "int5"}, id="format"),
        pytest.param({"form": "int2"}, id="name"),
        pytest.param({"revision": 7}, id="revision"),
        pytest.param({"merged_from_rows": 0}, id="rows"),
        pytest.param({"arena_mib": -1}, id="arena"),
        pytest.param("int2", id="text"),
    ],
)
def test_settings_that_are_none_are_refused(given_value: object, golden: Golden) -> None:
    with golden.raises("engines", ValueError):
        read_settings({"iserve_deltas": given_value})


@pytest.mark.parametrize("slot_rank", ADAPTER_RANKS)
def test_the_gateway_counts_the_shares_of_places_that_the_worker_keeps(slot_rank: int) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=4, adapter_rank=slot_rank)
    shares = [settings_module.place_share(rank, slot_rank) for rank in range(1, slot_rank + 1)]
    assert shares == [config.place_share(rank) for rank in range(1, slot_rank + 1)]
    assert shares == sorted(shares)
    assert all(rank / slot_rank <= share for rank, share in enumerate(shares, 1))
    assert (shares[0], shares[-1]) == (1 / settings_module.PER_PLACE, 1.0)
    assert replace(config, delta_format=SlotFormat.INT2).place_share(1) == 1.0


class TestPlacement:
    PLACES = Places(
        taken={
            "layers.0.q_proj": Place(kind=Kind.LINEAR, module="layers.0.q_proj", shape=(64, 128), format="int2"),
            "norm": Place(kind=Kind.NORM, module="norm", shape=(128,)),
            "embed": Place(kind=Kind.OUTPUT, module="lm_head", shape=(64, 128), format="int4"),
        },
        refused={"layers.0.experts": "experts take none"},
        elsewhere=("layers.1",),
    )

    @staticmethod
    def _delta(**tensors: str) -> Any:
        """Return a delta of tensors by name, each of a format, or exact."""
        matrices, exact = {}, {}
        for name, format_name in tensors.items():
            if format_name == "exact":
                exact[name] = torch.zeros(128)
                continue
            format_ = formats.FORMATS[format_name]
            matrices[name] = folder.PackedMatrix(
                format=format_,
                format_name=format_name,
                shape=(64, 128),
                codes=torch.zeros(format_.codes_shape(64, 128), dtype=torch.int16),
                scales=torch.zeros(format_.scales_shape(64, 128)),
            )
        return folder.ServedDelta(matrices=matrices, exact=exact)

    def test_each_tensor_has_its_module(self) -> None:
        delta = self._delta(**{"layers.0.q_proj.weight": "int2", "norm.weight": "exact", "embed.weight": "int4"})
        pairs = placement.place_tensors(delta, self.PLACES)
        assert pairs.keys() == {"layers.0.q_proj", "norm", "lm_head"}
        assert pairs["layers.0.q_proj"][0] is delta.matrices["layers.0.q_proj.weight"].codes
        assert pairs["norm"] == (delta.exact["norm.weight"],) * 2

    def test_another_stages_tensors_are_left_to_it(self) -> None:
        delta = self._delta(**{"layers.1.q_proj.weight": "int4", "layers.1.q_proj.bias": "exact"})
        assert placement.place_tensors(delta, self.PLACES) == {}

    def test_a_checkpoints_names_are_those_of_the_model_once_renamed(self) -> None:
        delta = self._delta(**{"model.norm.weight": "exact"})
        pairs = placement.place_tensors(delta, self.PLACES, lambda name: name.removeprefix("model."))
        assert pairs.keys() == {"norm"}

    @pytest.mark.parametrize(
        ("name", "format_name"),
        [
            ("layers.0.q_proj.weight", "int4"),
            ("layers.0.q_proj.weight", "exact"),
            ("layers.0.q_proj.bias", "exact"),
            ("norm.weight", "int2"),
            ("layers.0.experts.weight", "int2"),
            ("layers.10.q_proj.weight", "int2"),
            ("layers.0.sinks", "exact"),
        ],
    )
    def test_what_has_no_place_is_refused(self, name: str, format_name: str, golden: Golden) -> None:
        with golden.raises("engines", ValueError):
            placement.place_tensors(self._delta(**{name: format_name}), self.PLACES)

    def test_another_shape_is_refused(self, golden: Golden) -> None:
        places = Places(
            taken={"a": Place(kind=Kind.LINEAR, module="a", shape=(64, 256), format="int2")}, refused={}
        )
        with golden.raises("engines", ValueError):
            placement.place_tensors(self._delta(**{"a.weight": "int2"}), places)


class TestStepRoutes:
    @given(
        steps=st.lists(
            st.tuples(
                st.lists(st.integers(0, 6), min_size=1, max_size=40),
                st.permutations(range(SLOTS)),
                st.integers(0, SLOTS),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_every_row_of_a_delta_is_routed_or_merged(self, steps: list[Any]) -> None:
        """Whatever steps ran before, in the same buffers; ids 1 to 6 have slots or are adapters."""
        routes = _routes()
        for ids, order, deltas in steps:
            slot_of_delta = {number + 1: order[number] for number in range(deltas)}
            wanted = [slot_of_delta.get(one, -1) for one in ids]
            routes.update(ids, ids, slot_of_delta)
            assert routes.token_slots.tolist() == wanted + [-1] * (64 - len(ids))
            merged = {run.slot for run in routes.runs} - {-1}
            expected = {row: slot for row, slot in enumerate(wanted) if slot >= 0 and slot not in merged}
            assert _routed(routes.token_route) == expected
            sampled = {row: slot for row, slot in enumerate(wanted) if slot >= 0}
            assert _routed(routes.sample_route) == sampled
            assert bool(routes.kind) == any(ids)
            assert routes.launches_adapters(64) == any(one and one not in slot_of_delta for one in ids)
            assert routes.changes_embeddings(64) == any(one in slot_of_delta for one in ids)
            assert routes.has_routed == bool(expected)
            assert merged == {
                slot for slot in {*wanted} - {-1} if wanted.count(slot) >= MERGED and len(ids) > GRAPH_ROWS
            }
            if merged:
                rows = [
                    (row, run.slot) for run in routes.runs for row in range(run.start, run.end)
                ]  # each row once, in order
                assert rows == [(row, slot if slot in merged else -1) for row, slot in enumerate(wanted)]

    @given(
        ids=st.lists(st.integers(0, 4), min_size=1, max_size=40),
        slot_of_delta=st.dictionaries(st.integers(1, 4), st.integers(0, SLOTS - 1), max_size=3),
        places=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    )
    def test_logits_of_prompts_have_the_deltas_of_their_tokens(
        self, ids: list[int], slot_of_delta: dict[int, int], places: tuple[int, int]
    ) -> None:
        """Rows from anywhere in the step, the last of which is sampled; afterwards samples have theirs."""
        routes = _routes()
        routes.update(ids, ids[-1:], slot_of_delta)
        sampled = routes.logits_route
        assert (sampled is routes.sample_route) == (ids[-1] in slot_of_delta)
        first, end = sorted(min(place, len(ids)) for place in places)
        with routes.of_prompts(first, end - first):
            wanted = {row: slot_of_delta[one] for row, one in enumerate(ids[first:end]) if one in slot_of_delta}
            found = routes.logits_route
            assert ({} if found is None else _routed(found)) == wanted
            assert (found is None) == (not wanted)
        assert routes.logits_route is sampled

    def test_what_a_graph_launches_does_not_depend_on_the_mix(self) -> None:
        routes = _routes()
        for ids, slot_of_delta in (([1, 2], {1: 0}), ([2, 2], {1: 0}), ([1, 1], {})):
            routes.update(ids, ids, slot_of_delta)
            assert routes.launches(GRAPH_ROWS)
        routes.update([2] * 20, [2], {1: 0})
        assert not routes.launches(20)  # adapters alone, outside graphs
        routes.update([0, 0], [0], {1: 0})
        assert not routes.launches(GRAPH_ROWS)

    def test_a_graph_of_one_kind_launches_what_its_rows_need(self) -> None:
        routes = _routes()
        steps = {StepKind.BASE: [0, 0], StepKind.DELTAS: [1, 0], StepKind.ADAPTERS: [2, 2], StepKind.BOTH: [1, 2]}
        for kind, ids in steps.items():
            for expected in StepKind.__members__.values():
                routes.expect(expected)
                if kind & ~expected:
                    with pytest.raises(RuntimeError):
                        routes.update(ids, ids, {1: 0})
                    continue
                routes.update(ids, ids, {1: 0})
                assert routes.launches(GRAPH_ROWS) == bool(expected & StepKind.DELTAS)
                assert routes.changes_embeddings(GRAPH_ROWS) == bool(expected & StepKind.DELTAS)
                assert routes.launches_adapters(GRAPH_ROWS) == bool(expected & StepKind.ADAPTERS)
            routes.update(ids, ids, {1: 0})  # what was expected is of one step
            assert routes.kind == (StepKind.BOTH if kind else StepKind.BASE)

    def test_a_step_like_the_one_before_writes_nothing(self) -> None:
        routes = _routes()
        for ids in ([1, 3, 1], [0] * 5):
            routes.update(ids, ids, {1: 0, 3: 2})
            written = routes.token_slots, routes.sample_slots, routes.token_route.order, routes.sample_route.order
            for one in written:
                one.fill_(77)
            routes.update(ids, ids, {1: 0, 3: 2, 4: 1})  # another delta has a slot now
            assert all((one == 77).all() for one in written)
            routes.update([2], [2], {2: 3})
            assert routes.token_slots.tolist() == routes.sample_slots.tolist() == [3] + [-1] * 63

    def test_buffers_keep_their_addresses(self) -> None:
        routes = _routes()

        def addresses() -> list[int]:
            kept = [routes.token_slots, routes.sample_slots]
            for route in (routes.token_route, routes.sample_route):
                kept += [route.order, route.segments, route.num_segments, route.num_rows]
            return [one.data_ptr() for one in kept]

        before = addresses()
        for ids in ([1] * 40, [0], [1, 2, 3]):
            routes.update(ids, ids, {1: 0, 3: 2})
        assert addresses() == before


def test_steps_have_routes_of_each_tiling() -> None:
    tilings = variant_module("tilings")
    for count in (1, 8, 32, 33, 8192):
        assert tilings.choose_tiling(count).rows == SEGMENT_ROWS
        warm = {tilings.choose_tiling(one) for one in tilings.rows_of_each_tiling(count)}
        assert warm == {tilings.choose_tiling(one) for one in range(1, count + 1)}


class TestWarmUp:
    """Kernels that steps reach, by all that Triton compiles one anew for, without Triton."""

    @staticmethod
    def _products(reached: set[Any], merged_elements: int) -> Any:
        return products.TritonProducts(
            torch.device("cpu"),
            max_segments=64,
            max_tiles=8,
            merged_elements=merged_elements,
            kernels=recorded_kernels(reached),
        )

    @given(
        slices=st.sampled_from([(64,), (128, 64, 64), (192, 192)]),
        groups=st.integers(1, 5),
        vocabulary=st.integers(1, 300),
        hidden=st.integers(1, 300),
        format_name=st.sampled_from(sorted(formats.FORMATS)),
        merges=st.booleans(),
        data=st.data(),
    )
    @settings(max_examples=40, deadline=None)
    def test_steps_reach_no_kernel_that_is_not_warm(
        self,
        slices: tuple[int, ...],
        groups: int,
        vocabulary: int,
        hidden: int,
        format_name: str,
        merges: bool,
        data: st.DataObject,
    ) -> None:
        format_, reached = formats.FORMATS[format_name], set[Any]()
        linear = slots_module.LinearSlots(
            slots=SLOTS, slices=slices, inputs=128 * groups, format_=format_, device="cpu"
        )
        output = slots_module.EmbeddingSlots(
            slots=SLOTS, shape=(vocabulary, hidden), format_=format_, device="cpu"
        )
        outputs, inputs = sum(slices), 128 * groups
        routes, made = _routes(MERGED if merges else None), self._products(reached, outputs * inputs)
        variant_module("warming").warm_up(made, routes, [linear], [output], merges=merges)
        assert int(routes.token_route.num_rows) == int(routes.sample_route.num_rows) == 0
        assert (routes.token_slots == -1).all()
        warm = set(reached)
        for rows in data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=6)):
            ids = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
            routes.update(ids, ids, {1: 0, 2: 3, 3: 1})
            x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
            if wider := data.draw(st.sampled_from([0, 1, 8, 64])):
                x = torch.zeros(rows, inputs + wider, dtype=torch.bfloat16)[:, wider % 8 : inputs + wider % 8]
            made.add(torch.zeros(rows, outputs, dtype=torch.bfloat16), x, linear, routes.token_route)
            for run in routes.runs:
                if run.slot >= 0:
                    made.merge(torch.zeros(outputs, inputs, dtype=torch.bfloat16), linear, run.slot)
            padded = -(-vocabulary // 64) * 64
            logits = torch.zeros(rows, data.draw(st.sampled_from([vocabulary, padded])))[:, :vocabulary]
            logits = logits.to(data.draw(st.sampled_from([torch.bfloat16, torch.float32])))
            states = torch.zeros(rows, hidden + 8, dtype=torch.bfloat16)[:, :hidden]
            states = data.draw(st.sampled_from([states, states.clone()]))
            made.add(logits, states, output, routes.sample_route)
        assert reached == warm

    def test_what_is_not_made_at_the_start_is_seen(self) -> None:
        reached = set[Any]()
        linear = slots_module.LinearSlots(slots=1, slices=(64,), inputs=128, format_=INT2, device="cpu")
        made = self._products(reached, 0)
        routes = _routes(None)
        made.warm_up([linear], routes.token_route, 1, merges=False, has_padding=False)
        warm = set(reached)
        made.add(
            torch.zeros(40, 64, dtype=torch.bfloat16),
            torch.zeros(40, 128, dtype=torch.bfloat16),
            linear,
            routes.token_route,
        )
        assert len(reached - warm) == 1


def test_products_of_a_step_are_those_of_each_row_and_its_delta() -> None:
    torch.manual_seed(0)
    slots = slots_module.LinearSlots(slots=SLOTS, slices=(64, 64), inputs=128, format_=INT2, device="cpu")
    slots.codes.random_(-(2**15), 2**15)
    slots.scales.copy_(torch.rand(slots.scales.shape) * 0.02)
    ids = [0, 3, 1, 1, 2, 3]
    routes = _routes(None)
    routes.update(ids, ids, {1: 2, 3: 0})
    x, base = torch.randn(6, 128).bfloat16(), torch.randn(6, 128).bfloat16()
    y = base.clone()
    found = products.products_for(torch.device("cpu"), max_segments=1, max_tiles=1, merged_elements=0)
    found.add(y, x, slots, routes.token_route)
    change = reference.delta_product(x, slots.codes, slots.scales, torch.tensor([-1, 0, 2, 2, -1, 0]), INT2)
    torch.testing.assert_close(y.float(), (base.float() + change).bfloat16().float(), rtol=1e-2, atol=1e-2)
    assert torch.equal(y[[0, 4]], base[[0, 4]])
    weight = torch.randn(128, 128).bfloat16()
    merged = found.merge(weight, slots, 2)
    want = weight.float() + reference.dequantize(slots.codes[2], slots.scales[2], INT2)
    torch.testing.assert_close(merged.float(), want, rtol=1e-2, atol=1e-2)


class TestBackground:
    """Loads that run ahead, of numbers instead of deltas."""

    @staticmethod
    def _loader(folders: dict[Path, object]) -> tuple[Any, threading.Event, list[object]]:
        go, filled = threading.Event(), list[object]()

        def read(asked: Path) -> object:
            assert go.wait(60)
            found = folders[asked]
            if isinstance(found, Exception):
                raise found
            return found

        return background.BackgroundLoader(read, filled.append), go, filled

    def test_a_folder_is_ready_once_it_is_in_the_spare_place(self) -> None:
        one, two = Path("one"), Path("two")
        first, second = object(), object()
        loader, go, filled = self._loader({one: first, two: second})
        assert not loader.is_ready(one)
        assert not loader.is_ready(one)
        assert not loader.is_ready(two)  # one at a time
        assert loader.taken(one) is None
        go.set()
        loader.wait()
        assert loader.is_ready(one)
        assert loader.taken(one) is first
        assert loader.taken(two) is None
        assert loader.holds(first)
        assert filled == [first]
        loader.release()
        assert not loader.holds(first)
        assert not loader.is_ready(two)
        loader.wait()
        assert loader.is_ready(two)
        assert not loader.is_ready(one)  # the second is dropped
        loader.wait()
        assert not loader.holds(second)
        assert filled == [first, second, first]

    def test_the_thread_gives_the_interpreter_back_before_it_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = list[str]()
        clock = SimpleNamespace(
            perf_counter=time.perf_counter,
            monotonic=time.monotonic,
            sleep=lambda seconds: done.append(f"{seconds > 0} {threading.current_thread().name}"),
        )
        monkeypatch.setattr(background, "time", clock)
        loader = background.BackgroundLoader(lambda folder: done.append(folder), lambda found: None)
        assert not loader.is_ready("read")
        loader.wait()
        assert done == ["True iserve-delta", "read"]

    def test_what_reading_raised_is_raised_once(self) -> None:
        folder, error = Path("one"), ValueError("tensor x of this delta cannot be served")
        loader, go, filled = self._loader({folder: error})
        go.set()
        for _ in range(2):
            assert not loader.is_ready(folder)
            loader.wait()
            with pytest.raises(ValueError, match="tensor x"):
                loader.is_ready(folder)
        assert filled == []

    @given(st.lists(st.integers(0, 3), max_size=12))
    def test_exchanges_keep_each_place_with_one_slot(self, slots: list[int]) -> None:
        places = background.SlotPlaces(SLOTS, has_spare=True)
        for slot in slots:
            before, spare = [places.of(one) for one in range(SLOTS)], places.spare
            places.exchange(slot)
            after = [places.of(one) for one in range(SLOTS)]
            assert (after[slot], places.spare) == (spare, before[slot])
            assert sorted([*after, places.spare]) == list(range(SLOTS + 1))
        assert background.SlotPlaces(SLOTS, has_spare=False).count == SLOTS


def test_names_of_modules_are_those_of_the_last_start_unless_they_are_taken() -> None:
    runtime = variant_module("runtime")
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    names = [runtime.own_name(runtime.LINEARS, "layers.0", module) for module in (one, two)]
    assert names == ["layers.0.iserve_delta", "layers.0.iserve_delta_"]
    assert runtime.LINEARS[names[1]] is two
    del one, two
    assert not set(names) & set(runtime.LINEARS)
    assert runtime.runtime_being_built() is None
    with runtime.building(SimpleNamespace()) as _:
        assert runtime.runtime_being_built() is not None
    assert runtime.runtime_being_built() is None
