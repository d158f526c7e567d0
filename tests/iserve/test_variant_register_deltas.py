"""Deltas in the register over the REST API, in this process: stored, named, routed to engines that serve them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm import release
from daemon.worker_spec import WorkerSpec
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig, SlotFormat
from fingerprint.delta import read_delta
from fingerprint.delta.slots import misfit
from fingerprint.errors import ConfigError, ConflictError
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from iserve.api_types import DeployBody
from iserve.quality.facts import weights_stamp
from tests.bad_input.conftest import Api, api
from tests.daemon.engines.standin import make_vllm
from tests.daemon.tiny_deltas import write_fine_tune, write_tiny_delta
from tests.fingerprint.small_fine_tunes import tiny_tensors, write_model
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.test_quality_kept import of_model
from tests.iserve.test_variant_register import (
    VARIANTS,
    add,
    body,
    command,
    content,
    deploy,
    empty,
    routes,
    store,
    worker,
)
from tests.waiting import wait_until

__all__ = ["api", "command", "deploy", "empty", "iserve"]  # fixtures


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and a delta of a fine-tune of it."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "base", tiny_tensors())
    write_tiny_delta(folder / "base", folder, "int2", seed=1)
    return folder


@pytest.fixture
def base(api: Api, folders: Path) -> Path:
    """The base where this API may read it."""
    folder = api.folder / "base-of-deltas"
    return folder if folder.exists() else shutil.copytree(folders / "base", folder)


def with_room(spec: WorkerSpec, engine: str, delta_mib: int) -> WorkerSpec:
    return replace(spec, config=replace(spec.config, engine=engine, delta_mib=delta_mib))


@pytest.mark.slow
def test_a_delta_is_added_loaded_and_removed(api: Api, base: Path, folders: Path) -> None:
    manifest = read_delta(folders / "delta").manifest
    added = add(api, base, folders / "delta")
    assert (added["rank"], added["num_modules"]) == (0, len(manifest.changed))
    assert added["content_hash"] == manifest.content_hash
    assert added["new_bytes"] == added["size_bytes"] > added["disk_bytes"]
    assert read_delta(store(api).loadable(added["content_hash"])).manifest.content_hash == manifest.content_hash
    assert add(api, base, folders / "delta")["new_bytes"] == 0
    assert api.ask("DELETE", f"{VARIANTS}/style") == (204, "")
    wait_until(lambda: content(api) == set())


def test_it_is_served_where_the_engine_can_and_a_slot_has_room(
    api: Api, base: Path, folders: Path, deploy: Callable[..., None], golden: Golden
) -> None:
    reasons = []
    add(api, base, folders / "delta")
    for name, engine, delta_mib in (("nowhere", "", 0), ("on-vllm", "vllm", 0), ("no-room", "torch", 0)):
        if engine:
            deploy(name, with_room(worker(1, base), engine, delta_mib))
        found = api.ask("GET", f"{VARIANTS}/style")[1]
        assert found["deployments"] == []
        reasons.append(f"{name}: {found['why_not_served'].replace(str(base), 'BASE')}")
    golden("variant", "\n".join(reasons))
    deploy("served", with_room(worker(2, base), "torch", 1))
    assert api.ask("GET", f"{VARIANTS}/style")[1]["deployments"] == ["served"]
    assert {name: [v.name for v in route.variants] for name, route in routes(api).items()} == {
        "on-vllm": [],
        "no-room": [],
        "served": ["style"],
    }


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_an_engine_that_serves_no_deltas_is_answered_with_the_command_that_merges(
    engine: str,
    api: Api,
    base: Path,
    folders: Path,
    command: Callable[..., Done],
    deploy: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
) -> None:
    """vLLM of a release that was not run with deltas, and TensorRT-LLM: `add` itself says what to run next."""
    monkeypatch.setattr(release, "RUN_WITH_DELTAS", frozenset())
    deploy("elsewhere", with_room(worker(1, base), engine, 0))
    done = command("variant", "add", "style", "--base", base, folders / "delta")
    assert done.code == 0, done.err
    (line,) = (line for line in done.out.splitlines() if line.startswith("not served"))
    golden("variant", line.replace(str(base), "BASE"))


def changed_file(folder: Path) -> None:
    file = folder / "delta-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def truncated_file(folder: Path) -> None:
    file = folder / "delta-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


def missing_file(folder: Path) -> None:
    (folder / "delta-00001.safetensors").unlink()


def broken_manifest(folder: Path) -> None:
    (folder / "delta.json").write_text("{")


def other_version(folder: Path) -> None:
    manifest = json.loads((folder / "delta.json").read_text())
    (folder / "delta.json").write_text(json.dumps(manifest | {"version": 99}))


@pytest.mark.parametrize(
    "damage",
    [changed_file, truncated_file, missing_file, broken_manifest, other_version],
    ids=lambda f: f.__name__,
)
def test_a_damaged_one_is_refused_and_leaves_nothing(
    damage: Callable[[Path], Any], api: Api, base: Path, folders: Path, tmp_path: Path, golden: Golden
) -> None:
    folder = shutil.copytree(folders / "delta", tmp_path / "delta")
    damage(folder)
    status, answer = api.ask("POST", VARIANTS, body(base, folder))
    assert 400 <= status < 500
    golden("variant", answer["message"].replace(str(tmp_path), "TMP"))
    assert content(api) == set()
    assert api.ask("GET", VARIANTS) == (200, [])


def test_one_of_another_base_is_refused_by_the_first_tensor_that_differs(
    api: Api, base: Path, folders: Path, tmp_path: Path
) -> None:
    """A large matrix differs: every tensor is compared here."""
    one = "model.layers.1.mlp.up_proj.weight"
    write_fine_tune(folders / "base", tmp_path / "other", 3, is_changed=lambda name: name == one)
    delta = write_tiny_delta(tmp_path / "other", tmp_path, "int2", seed=1)
    status, answer = api.ask("POST", VARIANTS, body(base, delta))
    assert 400 <= status < 500
    assert one in answer["message"]
    assert content(api) == set()


def test_one_whose_tensors_have_other_shapes_than_the_bases_is_refused(
    api: Api, base: Path, folders: Path, tmp_path: Path
) -> None:
    """All hashes agree: two names are exchanged in a folder that no command of ours wrote."""
    folder = shutil.copytree(folders / "delta", tmp_path / "delta")
    exchanged = {"mlp.up_proj": "mlp.down_proj", "mlp.down_proj": "mlp.up_proj"}

    def other(text: str) -> str:
        return re.sub("|".join(exchanged), lambda found: exchanged[found[0]], text)

    manifest = json.loads((folder / "delta.json").read_text())
    for matrix in manifest["matrices"]:
        matrix["name"] = other(matrix["name"])
    (folder / "delta.json").write_text(json.dumps(manifest))
    for file in folder.glob("*.safetensors"):
        checkpoint = Checkpoint.of_file(file)
        outputs = [
            OutputTensor(other(name), entry.dtype, entry.shape, entry.num_bytes, partial(checkpoint.chunks, name))
            for name, entry in checkpoint.tensors.items()
        ]
        write_safetensors(tmp_path / "file", outputs)
        (tmp_path / "file").rename(file)
    assert read_delta(folder).manifest.changed  # sound by itself
    status, answer = api.ask("POST", VARIANTS, body(base, folder))
    assert 400 <= status < 500
    assert "mlp.up_proj.weight" in answer["message"]
    assert content(api) == set()


def test_an_empty_one_is_refused(api: Api, base: Path, folders: Path, tmp_path: Path) -> None:
    delta = write_tiny_delta(folders / "base", tmp_path, "int2", seed=1, is_changed=lambda name: False)
    status, answer = api.ask("POST", VARIANTS, body(base, delta))
    assert 400 <= status < 500
    assert "changes nothing" in answer["message"]


@pytest.mark.parametrize(
    "option",
    [
        ("--format", "int2"),
        ("--calibration", "nosuch.txt"),
        ("--max-error", "0.1"),
        ("--max-quality-loss", "1"),
        ("--device", "cuda:0"),
    ],
)
def test_options_of_a_compression_are_refused_where_nothing_is_compressed(
    command: Callable[..., Done], base: Path, folders: Path, golden: Golden, option: tuple[str, str]
) -> None:
    texts = ("--text", folders / "no.txt") if option[0] == "--max-quality-loss" else ()
    done = command("variant", "add", "style", "--base", base, folders / "delta", *option, *texts)
    assert done.code == 2
    golden("variant", " ".join(done.err.split()))
    assert command("variant", "ls", "--json").document == []


def test_files_of_the_fine_tune_that_are_not_used_are_named(
    command: Callable[..., Done], base: Path, tmp_path: Path, golden: Golden
) -> None:
    tuned = write_fine_tune(base, tmp_path / "tuned", 1, is_changed=lambda name: name == "model.norm.weight")
    (tuned / "chat_template.jinja").write_text("{{ messages }}")
    delta = tmp_path / "delta"
    assert command("variant", "compress", base, tuned, delta).code == 0
    done = command("variant", "add", "style", "--base", base, delta)
    assert done.code == 0
    golden("variant", done.err)


def with_format(spec: WorkerSpec, format_: SlotFormat, **config: Any) -> WorkerSpec:
    made = {"engine": "vllm", "adapter_slots": 4, "adapter_rank": 0, "delta_mib": 0, "delta_format": format_}
    return replace(spec, config=replace(spec.config, **(made | config)))


class TestSlotsWithAFormat:
    """Slots of vLLM, which have one format for all linears and take neither biases nor norms of every kind."""

    def test_a_delta_in_it_is_routed_with_the_base_that_is_to_be_checked(
        self, api: Api, base: Path, folders: Path, deploy: Callable[..., None], golden: Golden
    ) -> None:
        added = add(api, base, folders / "delta")
        deploy("int1", with_format(worker(1, base), SlotFormat.INT1))
        found = api.ask("GET", f"{VARIANTS}/style")[1]
        assert found["deployments"] == []
        golden("variant", found["why_not_served"].replace(str(base), "BASE"))
        assert routes(api)["int1"].variants == ()
        deploy("int2", with_format(worker(2, base), SlotFormat.INT2))
        assert api.ask("GET", f"{VARIANTS}/style")[1]["deployments"] == ["int2"]
        (route,) = routes(api)["int2"].variants
        assert (route.engine_name, route.base_directory) == (added["engine_name"], str(base.resolve()))
        assert (routes(api)["int2"].adapter_slots, routes(api)["int2"].loaded_adapters) == (4, 4)

    def test_a_result_of_one_that_no_slot_holds_is_kept(
        self, api: Api, base: Path, folders: Path, deploy: Callable[..., None]
    ) -> None:
        """A deployment that cannot serve it says nothing of the configuration that was measured."""
        content_hash = add(api, base, folders / "delta")["content_hash"]
        stamp, config = weights_stamp(base.resolve()), DeploymentConfig()
        result = of_model(variant_hash=content_hash, weights_stamp=stamp, config=config, engine_version=None)
        deploy("int1", with_format(worker(1, base), SlotFormat.INT1))
        assert api.controller.quality.keep(result) == result
        deploy("int2", with_format(worker(2, base), SlotFormat.INT2))
        with pytest.raises(ConflictError, match="is served by"):
            api.controller.quality.keep(result)

    def test_slots_that_could_have_a_format_and_have_none_are_named(
        self,
        api: Api,
        base: Path,
        folders: Path,
        deploy: Callable[..., None],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        golden: Golden,
    ) -> None:
        """A deployment for adapters alone, on a release that was run with deltas."""
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", "0.33.0")))
        monkeypatch.setattr(release, "RUN_WITH_DELTAS", frozenset({(0, 33)}))
        add(api, base, folders / "delta")
        deploy("alone", with_format(worker(1, base), SlotFormat.NONE, adapter_rank=16))
        golden("variant", api.ask("GET", f"{VARIANTS}/style")[1]["why_not_served"].replace(str(base), "BASE"))

    def test_a_stored_output_layer_that_is_tied_needs_no_slots(
        self, api: Api, deploy: Callable[..., None], tmp_path: Path
    ) -> None:
        """The delta has its change in the embeddings' format, for exports alone."""
        tied = write_model(api.folder / "tied", tiny_tensors(), tie_word_embeddings=True)
        delta = write_tiny_delta(tied, tmp_path, "int2", seed=1)
        assert "lm_head.weight" in {matrix.name for matrix in read_delta(delta).manifest.matrices}
        add(api, tied, delta)
        deploy("int2", with_format(worker(1, tied), SlotFormat.INT2))
        assert api.ask("GET", f"{VARIANTS}/style")[1]["deployments"] == ["int2"]

    def test_the_embedded_engine_checks_by_itself(
        self, api: Api, base: Path, folders: Path, deploy: Callable[..., None]
    ) -> None:
        add(api, base, folders / "delta")
        deploy("served", with_room(worker(1, base), "torch", 1))
        (route,) = routes(api)["served"].variants
        assert route.base_directory is None

    @pytest.mark.parametrize(
        ("family", "changed"),
        [
            ("gemma2", lambda name: name == "model.norm.weight"),
            ("gemma2", lambda name: name.endswith("q_proj.weight")),
            ("llama", lambda name: name == "model.norm.weight"),
            ("llama", lambda name: name == "model.embed_tokens.weight"),
        ],
        ids=["gemma-norm", "gemma-linear", "norm", "embeddings"],
    )
    def test_norms_of_other_kinds_are_named(
        self, folders: Path, tmp_path: Path, family: str, changed: Callable[[str], bool], golden: Golden
    ) -> None:
        manifest = read_delta(
            write_tiny_delta(folders / "base", tmp_path, "int3", seed=1, is_changed=changed)
        ).manifest
        golden("variant", str(misfit(manifest, SlotFormat.INT3, family)))

    def test_biases_and_mixed_formats_are_named(self, folders: Path, golden: Golden) -> None:
        manifest = read_delta(folders / "delta").manifest
        assert misfit(manifest, SlotFormat.INT2, "llama") is None
        first, *rest = manifest.matrices
        finer = replace(manifest, matrices=(replace(first, format="int3"), *rest))
        golden("variant", str(misfit(finer, SlotFormat.INT2, "llama")), "finer")
        assert misfit(finer, SlotFormat.INT3, "llama") is misfit(finer, SlotFormat.INT4, "llama") is None
        sparse = replace(manifest, matrices=(replace(first, format="sparse24-int4"), *rest))
        golden("variant", str(misfit(sparse, SlotFormat.INT4, "llama")), "sparse")
        norm = manifest.exact[0]
        for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.router.weight"):
            other = replace(manifest, exact=(replace(norm, name=name),))
            golden("variant", str(misfit(other, SlotFormat.INT2, "qwen2")), name)


def test_a_deployment_whose_variants_were_all_deltas_may_have_none_again() -> None:
    body = DeployBody(variants=20, variant_rank=0, delta_format=SlotFormat.INT2)
    with_deltas, without = (
        replace(body, variants=number).options(default_policy="joint", load_threshold=0.5).intent.traffic
        for number in (20, 0)
    )
    assert (with_deltas.variant_rank, with_deltas.delta_format) == (0, SlotFormat.INT2)
    assert (without.variants, without.delta_format) == (0, SlotFormat.NONE)
    with pytest.raises(ConfigError, match="rank 1"):
        replace(body, delta_format=SlotFormat.NONE).options(default_policy="joint", load_threshold=0.5)
    with pytest.raises(ConfigError, match="--delta-mib"):
        replace(body, delta_mib=2).options(default_policy="joint", load_threshold=0.5)
