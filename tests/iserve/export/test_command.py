"""``plan --as``: what is printed is a command that a shell takes, or the file that a deploy would export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.engines.registry import get_engine
from iserve.demo import demo_model_path
from iserve.export.command import docker_command, server_command
from iserve.export.worker_container import exported_worker
from tests.golden_words import Golden
from tests.iserve.export.test_export import exported, gpus, launch_here
from tests.iserve.test_cli import Done, iserve, model

__all__ = ["iserve", "model"]

Run = Callable[..., Done]
TELLS = (
    f"#!{sys.executable}\n"
    "import json, os, sys\n"
    "print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ), 'cwd': os.getcwd()}))\n"
)


@pytest.fixture
def in_shell(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return what ``vllm`` and ``docker`` are started with when a shell reads the text; they report, and do
    nothing.
    """
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("vllm", "docker"):
        (programs / name).write_text(TELLS)
        (programs / name).chmod(0o755)

    def run(text: str) -> dict[str, Any]:
        (tmp_path / "there").mkdir(exist_ok=True)
        done = subprocess.run(
            ["sh", "-eu"],
            input=text,
            cwd=tmp_path / "there",
            env={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return dict(json.loads(done.stdout))

    return run


def asked(model: Callable[[str], Path], kind: str, *more: object) -> tuple[object, ...]:
    work = ("--batch", 4, "--intent", "min-latency", "--gpus", "a6000:8")
    return ("plan", model("Llama-2-13b"), *work, *more, "--as", kind)


def test_vllms_command_is_that_of_the_container_without_the_container(
    iserve: Run, model: Callable[[str], Path], in_shell: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    bare = in_shell(iserve(*asked(model, "vllm")).out)
    compose = yaml.safe_load(iserve(*asked(model, "compose", "--engine", "vllm")).out)
    (service,) = compose["services"].values()
    words = [word.replace("$$", "$") for word in service["command"]]
    swapped = {"/models/Llama-2-13b": str(model("Llama-2-13b")), "--host=0.0.0.0": "--host=127.0.0.1"}
    assert bare["argv"] == [swapped.get(word, word) for word in words]
    assert service["environment"].items() <= bare["env"].items()


def test_docker_gets_the_containers_command(
    iserve: Run, model: Callable[[str], Path], in_shell: Callable[[str], dict[str, Any]]
) -> None:
    words = in_shell(iserve(*asked(model, "docker", "--engine", "vllm")).out)["argv"]
    (service,) = yaml.safe_load(iserve(*asked(model, "compose", "--engine", "vllm")).out)["services"].values()
    image = words.index(service["image"])
    assert words[:3] == ["run", "--rm", "--init"]
    assert words[image + 1 :] == [word.replace("$$", "$") for word in service["command"]]
    options = dict(zip(words[3:image:2], words[4:image:2], strict=True))
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert options["--gpus"] == str(devices["count"])
    assert options["--entrypoint"] == "vllm"
    assert options["-v"] == f"{model('Llama-2-13b')}:/models/Llama-2-13b:ro"
    given = {words[i + 1] for i, word in enumerate(words[:image]) if word == "-e"}
    assert given == {f"{name}={value}" for name, value in service["environment"].items()}


def test_the_engines_files_are_written_where_docker_mounts_them(
    in_shell: Callable[[str], dict[str, Any]],
) -> None:
    worker = exported(launch_here(demo_model_path(), "torch", gpus(5, 2), pp=2))
    hostile = replace(worker, files=(*worker.files, ("notes.txt", "END\n$HOME `id` 'quoted'\nno line end")))
    told = in_shell(docker_command(hostile))
    there = Path(told["cwd"]) / worker.label
    assert {path.name: path.read_text() for path in there.iterdir()} == {
        **dict(worker.files),
        "notes.txt": "END\n$HOME `id` 'quoted'\nno line end\n",
    }
    assert f"./{worker.label}:/iserve:ro" in told["argv"]
    assert '"device=GPU-7,GPU-4"' in told["argv"]


def test_names_and_paths_reach_the_engine_as_they_are(
    tmp_path: Path, in_shell: Callable[[str], dict[str, Any]]
) -> None:
    launch = launch_here(demo_model_path(), "vllm", gpus(5, 2), pp=2)
    odd = replace(launch, worker=replace(launch.worker, served_model="a 'b' $HOME `id`"))
    worker = exported_worker(odd, get_engine("vllm"), elsewhere=False, start_timeout_s=900.0, bare=True)
    told = in_shell(server_command(worker))
    assert told["argv"][:2] == ["serve", str(demo_model_path())]
    assert "--served-model-name=a 'b' $HOME `id`" in told["argv"]
    assert told["env"]["CUDA_VISIBLE_DEVICES"] == "5,2"  # this node's own numbers, in the order of the stages


@pytest.mark.parametrize("kind", ["compose", "k8s"])
def test_a_file_is_the_exports(iserve: Run, model: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    printed = iserve(*asked(model, kind))
    assert (printed.code, printed.err) == (0, "")
    plan, *rest = asked(model, kind)
    written = iserve("deploy", *rest[:-2], "--export", kind, "-o", tmp_path / "file.yaml")
    assert (plan, written.code) == ("plan", 0)
    assert printed.out == (tmp_path / "file.yaml").read_text()


def test_what_is_printed_is_alone_on_standard_output(
    iserve: Run, model: Callable[[str], Path], golden: Golden
) -> None:
    done = iserve(*asked(model, "vllm"))
    assert done.out.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID \\\n")
    assert all(line.startswith("# ") for line in done.err.splitlines())
    golden("cli", done.err)
    assert "image" not in done.err


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("vllm", ("--engine", "torch")),
        ("vllm", ("--replicas", "2")),
        ("docker", ("--replicas", "2")),
        ("compose", ("--replicas", "2")),
        ("k8s", ("--json",)),
        ("k8s", ("--refused", "--plot")),
    ],
    ids=repr,
)
def test_what_cannot_be_printed_so_is_a_usage_error(
    iserve: Run, model: Callable[[str], Path], kind: str, more: tuple[str, ...], golden: Golden
) -> None:
    done = iserve(*asked(model, kind, *more))
    assert (done.code, done.out) == (2, "")
    golden("cli", " ".join(done.err.replace("│", " ").split()))


def test_nothing_is_printed_of_what_a_deploy_would_refuse(
    iserve: Run, model: Callable[[str], Path], golden: Golden
) -> None:
    refused = iserve("plan", model("Llama-2-70b"), "--gpus", "a6000:1", "--as", "vllm")
    golden("cli", refused.line)


@pytest.mark.parametrize(("complete", "skipped"), [(False, False), (True, True)])
def test_a_model_whose_weights_are_elsewhere_is_started_with_the_tokenizer_that_lies_there(
    iserve: Run, model: Callable[[str], Path], tmp_path: Path, complete: bool, skipped: bool, golden: Golden
) -> None:
    """A folder with weights and no tokenizer has none; a config.json alone says nothing of it."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_bytes((demo_model_path() / "config.json").read_bytes())
    if complete:
        (folder / "model.safetensors").symlink_to(demo_model_path() / "model.safetensors")
    for kind in ("vllm", "docker"):
        done = iserve("plan", folder, "--gpus", "a6000:1", "--engine", "vllm", "--as", kind)
        assert done.code == 0
        assert ("--skip-tokenizer-init" in done.out) == skipped
        assert ("the tokenizer" in " ".join(done.err.split())) == (not complete)
        golden("cli", done.err)
