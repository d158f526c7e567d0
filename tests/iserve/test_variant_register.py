"""The register of variants over the REST API and the commands, in this process: what is added is stored, named and
routed; what is refused leaves nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.variants.store import VariantStore
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from fingerprint.lora import read_adapter
from iserve.api_documents import ProgressDocument, VariantDocument
from iserve.cli.progress import StepDisplay
from iserve.controller.reconcile import ROUTES_FILE, Reconciler
from iserve.controller.variant_serving import why_not_served
from iserve.controller.variants import Variants
from iserve.model_source import resolve
from iserve.rest_bodies import VariantBody
from iserve.route_table import Route, RouteTable
from iserve.settings import Settings
from iserve.state.store import Store
from tests.bad_input.conftest import NODE, Api, api
from tests.fingerprint.small_adapters import HIDDEN, Q0, V1, VOCAB, factors, values, write_adapter, write_base
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.waiting import wait_until

__all__ = ["api", "iserve"]  # fixtures

VARIANTS = "/api/v1/variants"


@pytest.fixture
def base(api: Api) -> Path:
    folder = api.folder / "base"
    return folder if folder.exists() else write_base(folder)


@pytest.fixture(autouse=True)
def empty(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds and leaves no variant and no file in the store but its locks."""
    monkeypatch.setattr("iserve.controller.variants._DROP_AFTER_S", 0.0)
    monkeypatch.setattr(api.controller.followed_routes, "_patience_s", 0.0)  # no gateway runs here
    yield
    for row in api.controller.store.variants.all():
        api.controller.variants.remove(row.name)
    wait_until(lambda: all(file.endswith(".lock") for _, _, names in os.walk(store(api).root) for file in names))


def store(api: Api) -> VariantStore:
    return VariantStore(api.controller.settings.variant_folder)


def content(api: Api) -> set[str]:
    return {each.content_hash for each in store(api).contents()}


def body(base: Path, path: Path, name: str = "style", **more: Any) -> dict[str, Any]:
    return {"name": name, "base": str(base), "path": str(path), **more}


def add(api: Api, base: Path, path: Path, name: str = "style", **more: Any) -> dict[str, Any]:
    status, answer = api.ask("POST", VARIANTS, body(base, path, name, **more))
    assert status == 201, answer
    found: dict[str, Any] = answer
    return found


def test_a_variant_is_added_shown_pinned_and_removed(api: Api, base: Path, tmp_path: Path) -> None:
    added = add(api, base, write_adapter(tmp_path / "a"))
    size = sum(array.nbytes for array in factors(dict.fromkeys(["model.layers.0.self_attn.q_proj"], 4)).values())
    assert added["engine_name"] == f"style@{added['content_hash'][:16]}"
    assert (added["rank"], added["num_modules"], added["base_directory"]) == (4, 4, str(base))
    assert added["new_bytes"] == added["size_bytes"] > size
    assert (
        added["disk_bytes"]
        == added["size_bytes"]
        == sum(f.stat().st_size for f in (store(api).root / "tensors").rglob("*") if f.is_file())
    )
    assert (added["trained_on"], added["pinned"], added["deployments"]) == ("example/base", False, [])
    assert "iserve deploy" in added["why_not_served"]
    assert api.ask("GET", f"{VARIANTS}/style") == (200, added | {"new_bytes": None})
    assert api.ask("GET", VARIANTS) == (200, [added | {"new_bytes": None}])
    assert api.ask("PATCH", f"{VARIANTS}/style", {"pinned": True})[1]["pinned"]
    read_adapter(store(api).loadable(added["content_hash"]))
    assert api.ask("DELETE", f"{VARIANTS}/style") == (204, "")
    assert api.ask("GET", f"{VARIANTS}/style")[0] == 404
    kinds = [event.kind for event in api.controller.store.events()]
    assert kinds[-3:] == ["variant-added", "variant-pinned", "variant-removed"]
    wait_until(lambda: content(api) == set())


def test_the_same_request_again_changes_nothing_and_other_content_needs_replace(
    api: Api, base: Path, tmp_path: Path
) -> None:
    first, second = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", lora_alpha=32)
    added = add(api, base, first, pinned=True)
    assert add(api, base, first) == added | {"new_bytes": 0}
    status, answer = api.ask("POST", VARIANTS, body(base, second))
    assert (status, answer["error"]) == (409, "ConflictError")
    assert "--replace" in answer["message"]
    wait_until(lambda: content(api) == {added["content_hash"]}, "what was refused is not kept")
    replaced = add(api, base, second, replace=True)
    assert replaced["engine_name"] != added["engine_name"]
    assert replaced["pinned"]
    wait_until(lambda: content(api) == {replaced["content_hash"]}, "the former content is removed")


def test_a_full_register_takes_what_does_not_make_it_grow(
    api: Api, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", lora_alpha=32)
    added = add(api, base, first)
    monkeypatch.setattr("iserve.state.variant_table.MAX_VARIANTS", 1)
    assert add(api, base, first)["content_hash"] == added["content_hash"]
    assert add(api, base, second, replace=True)["content_hash"] != added["content_hash"]
    status, answer = api.ask("POST", VARIANTS, body(base, first, "new"))
    assert (status, answer["error"]) == (409, "ConflictError")
    assert "1 variants already" in answer["message"]
    assert [one["name"] for one in api.ask("GET", VARIANTS)[1]] == ["style"]


def test_content_that_two_variants_have_stays_until_both_are_gone(api: Api, base: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    one, two = add(api, base, path, "one"), add(api, base, path, "two")
    assert (one["content_hash"], two["new_bytes"]) == (two["content_hash"], 0)
    other = add(api, base, write_adapter(tmp_path / "b", factors({Q0: 4})), "other")
    for name in ("one", "other"):
        api.ask("DELETE", f"{VARIANTS}/{name}")
    wait_until(lambda: other["content_hash"] not in content(api), "the second of the removals is done")
    store(api).loadable(two["content_hash"])


def test_content_stays_until_the_gateway_has_the_routes_without_it(
    api: Api, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iserve.controller.variants._DROP_AFTER_S", 1e6)
    settings = Settings(home=tmp_path / "home")
    state = Store.open(settings.state)
    variants = Variants(settings, state, resolve, dict)
    added = variants.add(VariantBody(name="style", base=str(base), path=str(write_adapter(tmp_path / "a"))))
    variants.remove("style")
    assert VariantStore(settings.variant_folder).has(added.content_hash)
    variants.close()
    state.close()


def test_one_name_means_one_model(api: Api, base: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    models = "/api/v1/models"
    assert api.ask("POST", models, {"name": "llama", "directory": str(base)})[0] == 201
    api.controller.store.add_deployment("chat", b"{}")
    for name, owner in (("llama", "registered model"), ("chat", "deployment"), ("iserve-demo", "bundled model")):
        status, answer = api.ask("POST", VARIANTS, body(base, path, name, replace=True))
        assert (status, answer["error"]) == (409, "ConflictError")
        assert owner in answer["message"]
    assert add(api, Path("llama"), path)["base"] == "llama"
    for url, asked in (
        (models, {"name": "style", "directory": str(base)}),
        ("/api/v1/deployments", {"name": "style", "model": str(base)}),
    ):
        status, answer = api.ask("POST", url, asked)
        assert (status, answer["error"]) == (409, "ConflictError"), answer
        assert "variant" in answer["message"]
    api.ask("DELETE", f"{models}/llama")
    api.controller.store.delete_deployment(api.controller.store.deployment("chat").id)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a" * 64, "a\n", "%2e%2e", "x@y"])
def test_names_that_lead_elsewhere_are_refused(api: Api, base: Path, tmp_path: Path, name: str) -> None:
    status, answer = api.ask("POST", VARIANTS, body(base, write_adapter(tmp_path / "a"), name))
    assert (status, answer["error"]) in {(400, "ConfigError"), (400, "BadInputError")}
    assert not store(api).root.exists() or content(api) == set()


def nan(tensors: dict[str, Any]) -> dict[str, Any]:
    next(iter(tensors.values()))[0, 0] = np.nan
    return tensors


def with_nan(folder: Path) -> Path:
    return write_adapter(folder, nan(factors({Q0: 4})))


def wrong_shape(folder: Path) -> Path:
    tensors = {name: np.concatenate([array, array], axis=1) for name, array in factors({Q0: 4}).items()}
    return write_adapter(folder, {name: a if "lora_A" in name else a[:, :4] for name, a in tensors.items()})


def pickled(folder: Path) -> Path:
    write_adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    return folder


def truncated(folder: Path) -> Path:
    write_adapter(folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return folder


def linked_out(folder: Path) -> Path:
    write_adapter(folder)
    file = folder / "adapter_model.safetensors"
    file.rename(folder.parent / "elsewhere.safetensors")
    file.symlink_to(folder.parent / "elsewhere.safetensors")
    return folder


def dora(folder: Path) -> Path:
    return write_adapter(folder, use_dora=True)


def of_the_head(folder: Path) -> Path:
    name = "base_model.model.lm_head.lora_{}.weight"
    tensors = {name.format("A"): values((4, HIDDEN), 1), name.format("B"): values((VOCAB, 4), 2)}
    return write_adapter(folder, tensors, target_modules=["lm_head"])


def of_rank_257(folder: Path) -> Path:
    return write_adapter(folder, factors({Q0: 257}), r=257)


def nothing(folder: Path) -> Path:
    return folder


REFUSED = [with_nan, wrong_shape, pickled, truncated, linked_out, dora, of_the_head, of_rank_257, nothing]


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    api: Api, base: Path, tmp_path: Path, golden: Golden, make: Callable[[Path], Path]
) -> None:
    status, answer = api.ask("POST", VARIANTS, body(base, make(tmp_path / "a")))
    assert status in {400, 404}
    golden("variant", f"{status} {answer['error']}: {answer['message']}".replace(str(base), "BASE"))
    assert api.ask("GET", VARIANTS) == (200, [])


def test_an_api_key_names_adapters_within_the_model_folders_only(
    api: Api, base: Path, tmp_path: Path, golden: Golden
) -> None:
    token = api.keys["admin"]
    inside = api.folder / "adapter"
    if not inside.exists():
        write_adapter(inside)
    outside = write_adapter(tmp_path / "a")
    for asked in (
        body(base, outside),
        body(base, tmp_path / "none"),
        body(tmp_path, inside),
        body(base, Path("a")),
    ):
        status, answer = api.ask("POST", VARIANTS, asked, token=token)
        assert status == 404, answer
        golden("variant", answer["message"])
    link = api.folder / "link"
    link.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (link / name).is_symlink():
            (link / name).symlink_to(outside / name)
    assert api.ask("POST", VARIANTS, body(base, link), token=token)[0] == 404
    assert api.ask("POST", VARIANTS, body(base, inside), token=token)[0] == 201


def test_a_full_disk_is_an_answer_and_leaves_nothing(
    api: Api, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(VariantStore, "_write", full)
    status, answer = api.ask("POST", VARIANTS, body(base, write_adapter(tmp_path / "a")))
    assert (status, answer["error"]) == (503, "UnavailableError")
    golden("variant", answer["message"])


def test_many_that_are_being_added_hold_nothing_else_up(
    api: Api, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the threads that answer requests."""
    path, go, began = write_adapter(tmp_path / "a"), threading.Event(), threading.Event()
    real = VariantStore.add

    def slow(self: VariantStore, *arguments: Any) -> Any:
        began.set()
        assert go.wait(300)
        return real(self, *arguments)

    monkeypatch.setattr(VariantStore, "add", slow)
    with ThreadPoolExecutor(60) as pool:
        added = [pool.submit(add, api, base, path, f"style-{number}") for number in range(60)]
        try:
            assert began.wait(300)
            assert api.ask("GET", VARIANTS) == (200, [])
            names = [f"style-{number}" for number in range(60)]
            shown = [api.ask("GET", f"{VARIANTS}/{name}/progress")[0] for name in names]
            assert shown.count(200) >= 1
        finally:
            go.set()
        assert len({each.result()["content_hash"] for each in added}) == 1
    assert len(api.ask("GET", VARIANTS)[1]) == 60


def test_too_many_that_wait_are_refused(
    api: Api, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iserve.controller.variants._MAX_WAITING", 0)
    status, answer = api.ask("POST", VARIANTS, body(base, write_adapter(tmp_path / "a")))
    assert (status, answer["error"]) == (503, "UnavailableError")


@pytest.mark.slow
def test_a_thousand_adapters(base: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    state = Store.open(settings.state)
    variants = Variants(settings, state, resolve, dict)

    def make(number: int) -> VariantDocument:
        tensors = factors({Q0: 1}, seed=1) | factors({V1: 1}, seed=number)
        folder = write_adapter(tmp_path / str(number), tensors, r=1)
        return variants.add(VariantBody(name=f"v{number}", base=str(base), path=str(folder)))

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, range(1000)))
    assert {one.name: one.content_hash for one in variants.all()} == {one.name: one.content_hash for one in made}
    kept = VariantStore(settings.variant_folder)
    assert {each.content_hash for each in kept.contents()} == {one.content_hash for one in made}
    shared = 4 * 2 * HIDDEN  # A and B of the first module, in every one
    assert min(one.size_bytes - (one.new_bytes or 0) for one in made[10:]) >= shared
    read_adapter(kept.loadable(made[-1].content_hash))
    variants.close()
    state.close()


# Routes


def worker(number: int, folder: Path, slots: int = 2, rank: int = 16) -> WorkerSpec:
    config = DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=rank if slots else 0)
    return WorkerSpec(
        worker_id=f"w-{number}",
        served_model="m",
        checkpoint=str(folder),
        config=config,
        stages=(StageAssignment(device_ids=("gpu:0",), num_layers=2),),
        limits=WorkerLimits(
            max_batch=1, max_batched_tokens=64, max_context_tokens=64, kv_tokens=64, memory_bytes_per_device=1000
        ),
    )


@pytest.fixture
def deploy(api: Api) -> Iterator[Callable[..., None]]:
    """``deploy(name, workers)``: a row of a deployment whose workers run."""
    names = []

    def make(name: str, *workers: WorkerSpec, phase: str = "ready") -> None:
        row = api.controller.store.add_deployment(name, b"{}")
        api.controller.store.update_deployment(row.id, workers=to_json(workers), phase=phase)
        names.append(name)

    yield make
    for name in names:
        api.controller.store.delete_deployment(api.controller.store.deployment(name).id)


def routes(api: Api) -> dict[str, Route]:
    Reconciler(api.controller).publish(api.controller.store.deployments(), NODE)
    table = from_json((api.controller.settings.run_folder / ROUTES_FILE).read_bytes(), RouteTable)
    return {route.name: route for route in table.routes}


def test_the_oldest_deployment_of_the_base_with_slots_serves_a_variant(
    api: Api, base: Path, tmp_path: Path, deploy: Callable[..., None]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(base)
    deploy("elsewhere", worker(0, tmp_path))
    deploy("no-slots", worker(1, base, slots=0))
    deploy("failed", worker(2, base), phase="failed")
    deploy("first", worker(3, link, rank=8), worker(4, base, rank=8))
    deploy("second", worker(5, base, slots=3, rank=64))
    deploy("mixed", worker(6, base), worker(7, base, slots=4))
    small = add(api, base, write_adapter(tmp_path / "a"), "small", pinned=True)
    large = add(api, base, write_adapter(tmp_path / "b", factors({Q0: 9}), r=9), "large")
    huge = add(api, base, write_adapter(tmp_path / "c", factors({Q0: 65}), r=65), "huge")
    assert (small["deployments"], small["why_not_served"]) == (["first", "second"], None)
    assert (large["deployments"], large["why_not_served"]) == (["second"], None)
    assert huge["deployments"] == []
    assert "65" in huge["why_not_served"]
    assert "64" in huge["why_not_served"]
    found = routes(api)
    assert {name: [v.name for v in route.variants] for name, route in found.items()} == {
        "elsewhere": [],
        "no-slots": [],
        "first": ["small"],
        "second": ["large"],
        "mixed": [],
    }
    assert {name: (route.adapter_slots, route.loaded_adapters) for name, route in found.items()} == {
        "elsewhere": (2, 8),
        "no-slots": (0, 0),
        "first": (2, 8),
        "second": (3, 12),
        "mixed": (0, 0),
    }
    (variant,) = found["first"].variants
    assert (variant.engine_name, variant.content_hash) == (small["engine_name"], small["content_hash"])
    assert (variant.num_bytes, variant.pinned) == (small["size_bytes"], True)
    assert variant.num_tensors == 2 * small["num_modules"]
    api.ask("PATCH", f"{VARIANTS}/large", {"pinned": True})
    assert [v.pinned for v in routes(api)["second"].variants] == [True]
    add(api, base, write_adapter(tmp_path / "d"), "another")
    assert [v.name for v in routes(api)["first"].variants] == ["another", "small"]
    api.ask("DELETE", f"{VARIANTS}/small")
    assert [v.name for v in routes(api)["first"].variants] == ["another"]


def test_a_variant_without_its_content_is_reported_and_not_routed(
    api: Api,
    base: Path,
    tmp_path: Path,
    deploy: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
) -> None:
    """Restored into another home, say; adding the adapter again mends it."""
    monkeypatch.setattr("iserve.controller.variants._ROUTES_KEPT_S", -1.0)
    deploy("chat", worker(0, base))
    path = write_adapter(tmp_path / "a")
    added = add(api, base, path)
    assert [v.name for v in routes(api)["chat"].variants] == ["style"]
    store(api).remove(added["content_hash"])
    shown = api.ask("GET", f"{VARIANTS}/style")[1]
    assert shown["deployments"] == []
    golden("variant", shown["why_not_served"])
    assert routes(api)["chat"].variants == ()
    api.controller.variants._collect()
    assert "variant style" in caplog.text
    assert add(api, base, path)["why_not_served"] is None
    assert [v.name for v in routes(api)["chat"].variants] == ["style"]


def test_the_way_out_is_a_command_that_can_be_run(api: Api, base: Path, tmp_path: Path, golden: Golden) -> None:
    add(api, base, write_adapter(tmp_path / "a"))
    row = replace(api.controller.store.variants.get("style"), base="/my models/llama")
    golden("variant", why_not_served(row, (), is_stored=True) or "")


def test_content_that_a_killed_controller_left_is_collected_after_its_grace(
    api: Api, base: Path, tmp_path: Path
) -> None:
    named = add(api, base, write_adapter(tmp_path / "a"))["content_hash"]
    old, new = (
        store(api).add(read_adapter(write_adapter(tmp_path / str(alpha), lora_alpha=alpha))).content_hash
        for alpha in (3, 5)
    )
    for content_hash in (named, old):
        os.utime(store(api).root / "manifests" / content_hash, (1.0, 1.0))
    variants = Variants(api.controller.settings, api.controller.store, api.controller.resolve, set)
    variants.collect_soon()
    wait_until(lambda: content(api) == {named, new}, "the old content is collected")
    variants.close()
    store(api).remove(new)


# Commands


@pytest.fixture
def command(api: Api, iserve: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command, which reaches the controller of this process."""
    from iserve.client import ControllerClient
    from tests.bad_input.conftest import TOKEN

    def ask(_: str, method: str, path: str, *, body: bytes | None, headers: dict[str, str], **__: Any) -> Any:
        answer = api.client.request(method, path, content=body, headers=headers)
        return answer.status_code, answer.content

    monkeypatch.setattr("daemon.json_http.exchange", ask)
    monkeypatch.setattr("iserve.client.connect", lambda *_, **__: ControllerClient("http://127.0.0.1:1", TOKEN))
    return iserve


def test_commands_of_the_register(
    command: Callable[..., Done], api: Api, base: Path, tmp_path: Path, golden: Golden, deploy: Callable[..., None]
) -> None:
    def said(*words: object) -> str:
        done = command("variant", *words)
        assert done.code == 0, done.err
        lines = done.out.replace(str(base), "BASE").splitlines()
        return "\n".join(" ".join(line.split()) for line in lines)  # a folder's length decides a column's width

    golden("variant", said("ls"), "ls of none")
    golden("variant", said("add", "style", "--base", base, write_adapter(tmp_path / "a")), "add")
    deploy("chat", worker(0, base))
    golden("variant", said("add", "tone", write_adapter(tmp_path / "b", lora_alpha=4), "--base", base), "shared")
    register = api.controller.store.variants
    register.put(replace(register.get("tone"), disk_bytes=1000))  # as an earlier store may have packed it
    golden("variant", said("pin", "tone"), "pin")
    golden("variant", said("show", "tone"), "show")
    golden("variant", said("ls"), "ls")
    golden("variant", said("unpin", "tone"), "unpin")
    golden("variant", said("rm", "tone"), "rm")
    assert command("variant", "show", "style", "--json").document["name"] == "style"
    assert [one["name"] for one in command("variant", "ls", "--json").document] == ["style"]
    again = command("variant", "add", "style", "--base", base, tmp_path / "a", "--pin", "--json").document
    assert (again["pinned"], again["new_bytes"]) == (True, 0)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("add", "../x", "--base", "iserve-demo", "a"), id="add-climbing"),
        pytest.param(("add", "iserve-demo", "--base", "iserve-demo", "a"), id="add-taken"),
        pytest.param(("add", "style", "--base", "iserve-demo", "owner/name"), id="add-hub-id"),
        pytest.param(("show", "../../healthz"), id="show-climbing"),
        pytest.param(("rm", "none"), id="rm-none"),
        pytest.param(("pin", "none"), id="pin-none"),
    ],
)
def test_commands_that_are_refused_say_so_in_one_line(
    command: Callable[..., Done], tmp_path: Path, golden: Golden, words: tuple[str, ...]
) -> None:
    golden("variant", command("variant", *words).line)


def test_progress_is_shown_where_the_terminal_is_one(
    command: Callable[..., Done], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[ProgressDocument | None] = []
    seen, real = threading.Event(), VariantStore.add

    def slow(self: VariantStore, *arguments: Any) -> Any:
        assert seen.wait(300)
        return real(self, *arguments)

    def show(_: StepDisplay, step: str, progress: ProgressDocument | None) -> None:
        assert step == "adding"
        shown.append(progress)
        seen.set()

    monkeypatch.setattr(VariantStore, "add", slow)
    monkeypatch.setattr(StepDisplay, "show", show)
    monkeypatch.setattr("iserve.cli.variant_register.is_terminal", lambda: True)
    assert command("variant", "add", "style", "--base", base, write_adapter(tmp_path / "a")).code == 0
    assert shown[0] is not None
    assert (shown[0].step, shown[0].done) == ("checking", 0)
