"""Deltas that are merged and served by deployments of their own: real processes, HTTP, killed commands."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import export_delta, read_delta
from iserve.demo import DEMO_MODEL_NAME, demo_adapter_path, demo_model_path
from iserve.merged_keys import merged_key
from iserve.variants import merge_variant
from tests.daemon.tiny_deltas import write_tiny_delta
from tests.golden_words import Golden
from tests.waiting import wait_until

NAME = "tuned"
QUESTION = "What is the capital of Peru?"


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two deltas of the demo model."""
    folder = tmp_path_factory.mktemp("deltas")
    first, second = (
        write_tiny_delta(
            demo_model_path(),
            folder / str(seed),
            "int2",
            seed,
            is_changed=lambda tensor: tensor.endswith("o_proj.weight"),
            change=2.0,
        )
        for seed in (1, 2)
    )
    return first, second


def answer(home: Any, model: str) -> str:
    found = home.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=12
    )
    assert found.model == model
    return str(found.choices[0].message.content)


def add(home: Any, delta: Path, *more: object) -> Any:
    return home.json("variant", "add", NAME, "--base", DEMO_MODEL_NAME, delta, *more)


def merged(home: Any) -> list[str]:
    """Names in the folder of merged checkpoints."""
    folder = home.home / "merged"
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def key_of(delta: Path) -> str:
    return merged_key(read_delta(delta).manifest.content_hash, str(demo_model_path()))


def tensors(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {name: b"".join(checkpoint.chunks(name)) for name in checkpoint.tensors}


def test_one_command_merges_and_deploys_and_one_takes_both_down(
    shared_home: Any, deltas: tuple[Path, Path], tmp_path: Path, golden: Golden
) -> None:
    home = shared_home
    added = add(home, deltas[0], "--as-deployment")
    content = read_delta(deltas[0]).manifest.content_hash
    assert (added["deployments"], added["why_not_served"], added["content_hash"]) == ([NAME], None, content)
    key = key_of(deltas[0])
    assert merged(home) == [key]
    export_delta(demo_model_path(), read_delta(deltas[0]), tmp_path / "exported")
    assert tensors(home.home / "merged" / key) == tensors(tmp_path / "exported")
    for words in (("ps",), ("show", NAME)):
        assert key not in home.run(*words).stdout
    shown = home.json("show", NAME)
    assert shown["plan"]["model"] == f"{NAME}, merged into {DEMO_MODEL_NAME}"
    assert not any(key in event["message"] for event in shown["events"])
    assert answer(home, NAME) == answer(home, NAME)
    status = home.run("variant", "show", NAME).stdout.splitlines()
    golden("variant", next(line for line in status if line.startswith("status")))
    before = home.worker_pids()
    assert add(home, deltas[0], "--as-deployment")["deployments"] == [NAME]  # again: changes nothing
    assert home.worker_pids() == before
    other = home.run(*("variant", "add", NAME, "--base", DEMO_MODEL_NAME, deltas[1], "--replace"), check=False)
    assert other.returncode != 0
    golden("variant", other.stderr.strip())
    text = tmp_path / "text.txt"
    text.write_text("What is the capital of Peru?\n")
    home.run("quality", NAME, "--text", text)
    (kept,) = home.json("variant", "show", NAME)["quality"]
    assert Path(kept["model"]["checkpoint"]).name == key
    home.run("variant", "rm", NAME)
    assert (home.json("ps"), home.json("variant", "ls")) == ([], [])
    wait_until(lambda: merged(home) == [])
    assert home.worker_pids() == {}


def test_one_that_no_configuration_serves_leaves_the_variant_alone(
    shared_home: Any, deltas: tuple[Path, Path], golden: Golden
) -> None:
    home = shared_home
    add(home, deltas[0])
    shown = home.json("variant", "show", NAME)
    assert f"iserve variant deploy {NAME}" in shown["why_not_served"]
    impossible = ("--intent", "latency-slo", "--slo", "tpot=1e-9")
    done = home.run("variant", "deploy", NAME, *impossible, check=False)
    assert done.returncode == 1
    golden("variant", done.stderr.rpartition("; the variant")[2].strip())
    assert home.json("ps") == []
    wait_until(lambda: merged(home) == [])
    assert [one["name"] for one in home.json("variant", "ls")] == [NAME]
    refused = home.run("variant", "deploy", "no-such", check=False)
    golden("variant", refused.stderr.strip())
    named = home.run("variant", "deploy", NAME, "--name", "another", check=False)
    assert named.returncode == 2
    home.run("variant", "rm", NAME)


@pytest.mark.parametrize("left", ["nothing", "a part", "a whole checkpoint"])
def test_a_killed_command_goes_on(shared_home: Any, deltas: tuple[Path, Path], left: str) -> None:
    """Killed when its merged checkpoint appears, or before; what it had left is used, or removed."""
    home = shared_home
    key = key_of(deltas[0])
    folder = home.home / "merged"
    if left == "nothing":
        words = ("variant", "add", NAME, "--base", DEMO_MODEL_NAME, deltas[0], "--as-deployment")
        command = home.start(*words)
        wait_until(lambda: key in merged(home) or command.poll() is not None)
        command.send_signal(signal.SIGKILL)
        command.wait()
    elif left == "a part":
        (folder / f".{key}.0123abcd.part").mkdir(parents=True)
    else:
        export_delta(demo_model_path(), read_delta(deltas[0]), folder / key)
    kept = (folder / key).stat().st_ino if left == "a whole checkpoint" else None
    assert add(home, deltas[0], "--as-deployment")["deployments"] == [NAME]
    assert merged(home) == [key]
    assert kept in (None, (folder / key).stat().st_ino)
    assert answer(home, NAME)
    home.run("variant", "rm", NAME)
    wait_until(lambda: merged(home) == [])


def test_one_that_a_base_serves_too_is_served_by_its_own_deployment(
    shared_home: Any, deltas: tuple[Path, Path]
) -> None:
    home = shared_home
    home.json("deploy", "--name", "base", "--variants", 2, "--delta-mib", 2, "--engine", "torch", "--batch", 4)
    assert add(home, deltas[0])["deployments"] == ["base"]
    next_to_base = answer(home, NAME)
    assert home.json("variant", "deploy", NAME)["name"] == NAME

    def routed() -> dict[str, list[str]]:
        table = json.loads((home.home / "run" / "routes.json").read_text())
        return {route["name"]: [one["name"] for one in route["variants"]] for route in table["routes"]}

    wait_until(lambda: routed() == {"base": [], NAME: []})
    assert answer(home, NAME) == next_to_base
    home.run("rm", NAME)  # the deployment alone
    wait_until(lambda: routed() == {"base": [NAME]})
    assert answer(home, NAME) == next_to_base
    assert home.json("variant", "show", NAME)["deployments"] == ["base"]
    wait_until(lambda: merged(home) == [])
    home.run("variant", "rm", NAME)
    home.run("rm", "base")


def test_an_adapter_is_served_merged_as_well_and_is_there_after_a_restart(shared_home: Any) -> None:
    home, name = shared_home, "capitals"
    home.run("variant", "add", name, "--base", DEMO_MODEL_NAME, demo_adapter_path(name))
    assert home.json("variant", "deploy", name, "--engine", "torch")["config"]["adapter_slots"] == 0
    said = answer(home, name)
    assert said.startswith("The capital")
    home.run("down")
    home.run("up")
    wait_until(lambda: [one["status"] for one in home.json("ps")] == ["ready"])
    assert answer(home, name) == said
    (folder,) = (home.home / "merged" / one for one in merged(home))
    home.run("down")
    shutil.rmtree(folder)  # as of a home that was restored from a backup
    home.run("up")
    assert home.json("variant", "deploy", name, "--engine", "torch")["status"] == "ready"
    assert answer(home, name) == said
    home.run("variant", "rm", name)
    wait_until(lambda: merged(home) == [])


def test_one_adapter_on_two_bases_is_merged_into_each(shared_home: Any, tmp_path: Path) -> None:
    home, names = shared_home, ("first", "second")
    bases = (demo_model_path(), tmp_path / "base")
    shutil.copytree(*bases)
    (file,) = bases[1].glob("*.safetensors")
    changed = {name: one * 0.5 if "o_proj" in name else one for name, one in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    for name, base in zip(names, bases, strict=True):
        home.run("variant", "add", name, "--base", base, demo_adapter_path("capitals"))
        home.json("variant", "deploy", name, "--engine", "torch")
        merge_variant(str(base), str(demo_adapter_path("capitals")), str(tmp_path / name), {})
    served = {one["name"]: Path(one["model"]) for one in home.json("ps")}
    assert [name for name in names if tensors(served[name]) != tensors(tmp_path / name)] == []
    assert tensors(tmp_path / "first") != tensors(tmp_path / "second")
    for name in names:
        home.run("variant", "rm", name)
    wait_until(lambda: merged(home) == [])
