"""Selection of the engine on a node: which are measured for it, and what busy devices change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import DeviceStatus, NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig
from fingerprint.errors import NotMeasuredError
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from iserve.api_types import DeployBody
from iserve.controller import deployer as deployer_module
from iserve.controller import engine_selection
from iserve.controller.deployer import Deployer
from iserve.controller.engine_selection import SelectedEngine, select_engine
from iserve.controller.standalone_plans import Plans
from iserve.model_source import ModelSource, resolve
from iserve.planning.engine_choice import nothing_feasible_on
from iserve.planning.pipeline import PlanOptions, datasheet_estimator
from iserve.settings import Settings
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile
from tests.golden_words import Golden
from tests.iserve.test_report import LLAMA_2_7B

A10G = gpu_spec("a10g")  # 24 GiB: fp8 needs a later GPU, so that vLLM has 16 bits only
DEPTHS = {"fits": 32, "int8 fits": 64, "too large": 400}


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = take_profile(SyntheticMachine(llama()))
    return replace(found, machine=replace(found.machine, device=A10G))


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[[str], ModelSpec]:
    def spec(size: str) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B | {"num_hidden_layers": DEPTHS[size]}))
        return resolve(str(tmp_path), {}, need_weights=False).spec

    return spec


def node_with(*, held_bytes: int = 0) -> NodeStatus:
    """Return a node with one GPU, of which a worker was promised some memory."""
    device = DeviceStatus(
        device_id="GPU-0",
        index=0,
        kind="cuda",
        name="NVIDIA A10G",
        total_bytes=A10G.memory_bytes,
        free_bytes=A10G.memory_bytes - held_bytes,
        load_fraction=0.0,
    )
    worker = WorkerStatus(
        spec=WorkerSpec(
            worker_id="other-1",
            served_model="other",
            checkpoint="/other",
            config=DeploymentConfig(engine="vllm"),
            stages=(StageAssignment(device_ids=("GPU-0",), num_layers=2),),
            limits=WorkerLimits(
                max_batch=1,
                max_batched_tokens=64,
                max_context_tokens=64,
                kv_tokens=64,
                memory_bytes_per_device=held_bytes,
            ),
        ),
        state=WorkerState.READY,
        url="http://127.0.0.1:1",
        pid=1,
        restarts=0,
        started_at="2026-11-23T00:00:00+00:00",
    )
    return NodeStatus(node_id="n", observed_at=0.0, devices=(device,), workers=(worker,) if held_bytes else ())


class Selection:
    """Selects an engine where all are installed and a profile says what datasheets do; notes what was profiled."""

    def __init__(self, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
        self._profile = profile
        self.profiled: list[tuple[str, tuple[str, ...]]] = []
        tables = [replace(table, unavailable=None) for table in capabilities_for("auto")]
        self._engines = {
            t.engine: SimpleNamespace(name=t.engine, capabilities=lambda t=t: t, versions=tuple) for t in tables
        }
        for engine in self._engines.values():
            engine.pinned = lambda _, engine=engine: engine
        monkeypatch.setattr(engine_selection, "ENGINES", self._engines)
        monkeypatch.setattr(engine_selection, "get_engine", self._engines.__getitem__)

    def of(self, name: str, spec: ModelSpec, node: NodeStatus) -> SelectedEngine:
        def profile_of(engine: Any, notes: tuple[str, ...]) -> Profile:
            self.profiled.append((engine.name, notes))
            return replace(self._profile, engine=engine.name)

        return select_engine(
            name,
            None,
            spec,
            node,
            PlanOptions(),
            profile_of=profile_of,
            estimator_of=lambda _, engine, __: datasheet_estimator(spec, A10G, [engine.capabilities()]),
        )


@pytest.fixture
def selection(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> Selection:
    return Selection(profile, monkeypatch)


def test_what_vllm_can_run_is_measured_on_vllm_alone(selection: Selection, spec_of) -> None:
    selected = selection.of("auto", spec_of("fits"), node_with())
    assert (selected.engine.name, selected.profile.engine, selected.notes) == ("vllm", "vllm", ())
    assert selection.profiled == [("vllm", ())]


def test_where_nothing_is_feasible_on_vllm_the_embedded_engine_is_measured_and_taken(
    selection: Selection, spec_of, golden: Golden
) -> None:
    selected = selection.of("auto", spec_of("int8 fits"), node_with())
    assert (selected.engine.name, selected.profile.engine) == ("torch", "torch")
    assert [name for name, _ in selection.profiled] == ["vllm", "torch"]
    assert selected.notes[0] == selection.profiled[1][1][0]
    golden("controller", selected.notes[0])


def test_an_engine_that_is_named_is_kept_and_no_other_measured(selection: Selection, spec_of) -> None:
    selected = selection.of("vllm", spec_of("int8 fits"), node_with())
    assert selected.engine.name == "vllm"
    assert selection.profiled == [("vllm", ())]


def test_nothing_is_measured_on_an_engine_on_which_nothing_fits_by_datasheet(
    selection: Selection, spec_of
) -> None:
    """The refusal is the preferred engine's."""
    assert selection.of("auto", spec_of("too large"), node_with()).engine.name == "vllm"
    assert selection.profiled == [("vllm", ())]


def test_memory_that_another_worker_holds_does_not_change_the_engine(selection: Selection, spec_of) -> None:
    """The 16-bit model fits an idle GPU and not the rest of this one, where int8 would."""
    node = node_with(held_bytes=12 * 2**30)
    assert selection.of("auto", spec_of("fits"), node).engine.name == "vllm"
    assert selection.profiled == [("vllm", ())]


def test_a_deploy_profiles_each_engine_that_it_tries_and_notes_the_one_passed_over(
    selection: Selection,
    profile: Profile,
    spec_of,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
) -> None:
    spec, node, moved = spec_of("int8 fits"), node_with(), list[str]()
    profiler: Any = SimpleNamespace(
        ensure_links=lambda *_: None,
        enough=lambda *_: None,
        unused=lambda _source, engine, _node, batch: (f"a profile on {engine.name} is not used",),
        take=lambda _source, engine, _daemon, **_: replace(profile, engine=engine.name),
        estimator=lambda _, engine, __: datasheet_estimator(spec, A10G, [engine.capabilities()]),
    )
    monkeypatch.setattr(deployer_module, "ask_daemon", lambda *_: node)
    monkeypatch.setattr(deployer_module.Checkpoint, "open", lambda _: None)
    for engine in selection._engines.values():
        engine.check_options = lambda _: None
    nothing: Any = None
    deployer = Deployer(
        Settings(home=tmp_path),
        nothing,
        profiler,
        nothing,
        lambda _, **__: ModelSource("m", tmp_path, True, spec),
        lambda *_: None,
    )
    row: Any = SimpleNamespace(name="a")
    measured = deployer.measured(row, DeployBody(name="a"), moved.append)
    assert (measured.engine.name, measured.profile.engine) == ("torch", "torch")
    assert moved == ["resolving", "profiling", "profiling"]
    golden("controller", measured.notes[0])
    golden("controller", measured.notes)


def test_a_plan_that_lacks_the_next_engine_s_profile_does_not_name_the_one_passed_over(
    profile: Profile, spec_of, tmp_path: Path, golden: Golden
) -> None:
    """``deploy`` measures it; the other engine's profile is there and was of no use."""
    stored = {"vllm": profile, "tensorrt-llm": profile}
    profiler: Any = SimpleNamespace(
        stored=lambda _source, engine, _node, batch: stored.get(engine.name), unused=lambda *_, **__: ()
    )
    nothing: Any = None
    plans = Plans(Settings(home=tmp_path), profiler, nothing, nothing, nothing, nothing)
    source = ModelSource("m", tmp_path, True, spec_of("int8 fits"))
    with pytest.raises(NotMeasuredError) as refused:
        plans._stored(source, get_engine("torch"), (nothing_feasible_on("vllm"),), node_with(), 1)
    said = str(refused.value)
    golden("controller", said)
    assert "there is one on vllm" not in said
