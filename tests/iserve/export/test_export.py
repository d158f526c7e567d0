"""``deploy --export``: the files hold the limits of the plan, other tools take them, the engines start by them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.devices import Device
from daemon.engines.registry import ENGINES, get_engine
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from iserve.demo import demo_model_path
from iserve.export.compose import compose_file
from iserve.export.kubernetes import kubernetes_objects
from iserve.export.worker_container import FILES, PORT, ExportedWorker, exported_worker
from iserve.planning.offline import launch_for_gpus, plan_for_gpus
from iserve.planning.pipeline import PlanOptions
from iserve.planning.worker_launch import LaunchDocument
from tests.daemon.engines.standin import make_vllm
from tests.golden_words import Golden
from tests.iserve.test_cli import Done, iserve, model
from tests.waiting import PATIENCE_S

__all__ = ["iserve", "model"]

Run = Callable[..., Done]
KINDS = ("compose", "k8s")
GIB = 2**30


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture
def written(iserve: Run, model: Callable[[str], Path], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``written(kind, engine, ...)``: the documents of an export for eight A6000."""

    def write(kind: str, engine: str = "vllm", *more: str) -> list[dict[str, Any]]:
        target = tmp_path / f"{kind}-{engine}.yaml"
        where = ("--export", kind, "--gpus", "a6000:8", "--engine", engine, "-o", target)
        given = ("--batch", "4", "--context", "640", "--intent", "min-latency")
        done = iserve("deploy", model("Llama-2-13b"), *where, *given, *more)
        assert (done.code, done.err) == (0, "")
        return documents(target)

    return write


def service_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    (project,) = found
    (service,) = project["services"].values()
    return dict(service)


def pod_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = (one for one in found if one["kind"] == "Deployment")
    return dict(deployment["spec"]["template"]["spec"])


def words_of(kind: str, found: list[dict[str, Any]]) -> list[str]:
    """The whole command, as the container runtime gives it to the engine."""
    if kind == "compose":
        service = service_of(found)
        return [word.replace("$$", "$") for word in (*service["entrypoint"], *service["command"])]
    (container,) = pod_of(found)["containers"]
    return [word.replace("$$(", "$(") for word in (*container["command"], *container["args"])]


def files_of(kind: str, found: list[dict[str, Any]]) -> dict[str, str]:
    if kind == "compose":
        return {name: file["content"].replace("$$", "$") for name, file in found[0]["configs"].items()}
    (config_map,) = (one for one in found if one["kind"] == "ConfigMap")
    return dict(config_map["data"])


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_is_started_with_the_limits_of_the_plan(kind: str, written: Any, model: Any) -> None:
    command = words_of(kind, written(kind))
    flags = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    from fingerprint.config import Workload
    from fingerprint.gpus import parse_gpus
    from planner.intent import Intent, IntentKind

    gpu, count = parse_gpus("a6000:8")
    options = PlanOptions(intent=Intent(kind=IntentKind.MIN_LATENCY), workload=Workload(batch=4))
    plan = plan_for_gpus(str(model("Llama-2-13b")), gpu, count, options, "vllm")
    assert plan.chosen is not None
    chosen = plan.candidates[plan.chosen]
    assert chosen.estimate is not None
    assert command[:3] == ["vllm", "serve", "/models/Llama-2-13b"]
    assert (int(flags["tensor-parallel-size"]), int(flags["pipeline-parallel-size"])) == (
        chosen.config.tp,
        chosen.config.pp,
    )
    assert flags["kv-cache-dtype"] == {"16bit": "auto", "int8": "int8_per_token_head"}[chosen.config.kv]
    assert (flags["max-num-seqs"], flags["max-model-len"]) == ("4", "640")
    assert (flags["host"], flags["port"], flags["served-model-name"]) == ("0.0.0.0", "8000", "Llama-2-13b")
    share = float(flags["gpu-memory-utilization"]) * gpu.memory_bytes
    assert chosen.estimate.memory_bytes_per_gpu * 0.99 < share < chosen.estimate.memory_bytes_per_gpu * 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_by_default_many_and_long_requests_are_served(kind: str, iserve: Run, model: Any, tmp_path: Path) -> None:
    """The defaults are as many as the KV cache holds of the planned length, as long as the model takes."""
    target = tmp_path / "default.yaml"
    iserve("deploy", model("Llama-2-13b"), "--export", kind, "--gpus", "a6000:8", "--engine", "vllm", "-o", target)
    words = words_of(kind, documents(target))
    flags = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    assert int(flags["max-num-seqs"]) >= 32
    assert flags["max-model-len"] == "4096"
    assert "Requests at once: " + flags["max-num-seqs"] in target.read_text()


def comments(yaml: str) -> list[str]:
    return [line for line in yaml.splitlines() if line.lstrip().startswith("#")]


def test_several_replicas_are_one_deployment_in_kubernetes_and_none_in_compose(
    written: Any, iserve: Run, model: Callable[[str], Path], tmp_path: Path, golden: Golden
) -> None:
    """Each with what one gets; all of them fit the GPUs, or nothing is written."""
    alone = written("k8s", "vllm", "--intent", "min-memory")
    (tmp_path / "k8s-vllm.yaml").unlink()
    four = written("k8s", "vllm", "--intent", "min-memory", "--replicas", "4")
    (one,), (of_four,) = ([d for d in found if d["kind"] == "Deployment"] for found in (alone, four))
    assert (one["spec"].pop("replicas"), of_four["spec"].pop("replicas")) == (1, 4)
    assert one == of_four
    golden("cli", comments((tmp_path / "k8s-vllm.yaml").read_text()))
    target = tmp_path / "never.yaml"
    where = ("--export", "k8s", "--gpus", "a6000:8", "--engine", "vllm", "-o", target)
    refused = iserve("deploy", model("Llama-2-13b"), *where, "--replicas", "9").line
    golden("cli", refused)
    compose = iserve("deploy", model("Llama-2-13b"), "--export", "compose", "--replicas", "2", "-o", target)
    assert compose.code == 2
    golden("cli", compose.err)
    assert not target.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_engine_gets_its_spec_and_tensorrt_llm_its_options(kind: str, written: Any) -> None:
    found = written(kind, "torch")
    spec = from_json(files_of(kind, found)["spec.json"], WorkerSpec)
    assert words_of(kind, found)[1:] == ["-m", "daemon.torch_engine", "--spec", f"{FILES}/spec.json"]
    assert (spec.host, spec.port, spec.checkpoint) == ("0.0.0.0", PORT, "/models/Llama-2-13b")
    assert (spec.limits.max_batch, spec.limits.max_context_tokens, spec.limits.kv_tokens) == (4, 640, 4 * 640)
    found = written(kind, "tensorrt-llm")
    options = json.loads(files_of(kind, found)["llm_options.yaml"])
    assert (options["max_batch_size"], options["max_seq_len"]) == (4, 640)
    assert f"{FILES}/llm_options.yaml" in words_of(kind, found)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_compose_and_its_schema_take_the_file(engine: str, written: Any, tmp_path: Path) -> None:
    """The schema is compose-spec's own at 170098b, its descriptions left out."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    (project,) = found = written("compose", engine)
    schema = json.loads(Path(__file__).with_name("compose-spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(project)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate(project | {"service": {}})
    service = service_of(found)
    assert service["privileged"] is False
    assert service["stop_grace_period"] == "35s"
    assert service["healthcheck"]["start_period"] == "900s"
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    (volume,) = service["volumes"]
    assert (volume["target"], volume["read_only"]) == ("/models/Llama-2-13b", True)
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    visible = service["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    assert visible == [str(index) for index in range(devices["count"])]


def test_docker_compose_takes_the_file(written: Any, tmp_path: Path) -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not installed")
    for engine in ENGINES:
        written("compose", engine)
        file = str(tmp_path / f"compose-{engine}.yaml")
        subprocess.run(["docker", "compose", "-f", file, "config", "--quiet"], check=True)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_schemas_of_kubernetes_take_the_objects(engine: str, written: Any) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate = importlib.import_module("kubernetes_validate").validate
    found = written("k8s", engine)
    for one in found:
        validate(one, "1.31", strict=True)
    with pytest.raises(Exception, match="bogus"):
        validate(found[-1] | {"bogus": 1}, "1.31", strict=True)
    pod = pod_of(found)
    (container,) = pod["containers"]
    assert container["securityContext"] == {"privileged": False, "allowPrivilegeEscalation": False}
    assert pod["terminationGracePeriodSeconds"] == 35
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 900
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == len(env["CUDA_VISIBLE_DEVICES"].split(","))
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": "/models/Llama-2-13b", "readOnly": True}
    (deployment, service) = (one for one in found if one["kind"] != "ConfigMap")
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_kubectl_reads_every_field(written: Any, tmp_path: Path) -> None:
    """The client drops what its types do not have when it writes the object again."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    deployment = next(one for one in written("k8s") if one["kind"] == "Deployment")
    (tmp_path / "one.json").write_text(json.dumps(deployment))
    command = ["kubectl", "set", "env", "--local", "-f", str(tmp_path / "one.json"), "-o", "json", "ADDED=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert_within(deployment, json.loads(done.stdout))


def assert_within(part: Any, whole: Any) -> None:
    if isinstance(part, dict):
        for key, value in part.items():
            assert_within(value, whole[key])
    elif isinstance(part, list):
        assert len(part) <= len(whole)  # a variable was added
        for ours, theirs in zip(part, whole, strict=False):
            assert_within(ours, theirs)
    elif whole != "8Gi":  # 8589934592
        assert str(part) == str(whole)  # amounts become text


def launch_here(checkpoint: Path, engine: str, devices: tuple[Device, ...], pp: int = 1) -> LaunchDocument:
    """Return the launch of a plan for this node, on ``devices`` in this order of stages."""
    from fingerprint.gpus import parse_gpus

    gpu, _ = parse_gpus("a6000:8")
    planned = launch_for_gpus(str(checkpoint), gpu, len(devices), PlanOptions(), engine, name="chat")
    stages = tuple(StageAssignment(device_ids=(d.device_id,), num_layers=8 // pp) for d in devices)
    limits = WorkerLimits(
        max_batch=2,
        max_batched_tokens=128,
        max_context_tokens=128,
        kv_tokens=256,
        memory_bytes_per_device=GIB,
    )
    config = DeploymentConfig(engine=engine, pp=pp)
    worker = replace(planned.worker, config=config, stages=stages, limits=limits)
    return replace(planned, worker=worker, devices=tuple(sorted(devices, key=lambda d: d.device_id)))


def gpus(*indexes: int) -> tuple[Device, ...]:
    return tuple(
        Device(device_id=f"GPU-{9 - i}", index=i, kind="cuda", name="NVIDIA RTX A6000", total_bytes=48 * GIB)
        for i in indexes
    )


def exported(launch: LaunchDocument, **more: Any) -> ExportedWorker:
    engine = get_engine(launch.worker.config.engine)
    return exported_worker(launch, engine, elsewhere=False, start_timeout_s=900.0, **more)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_the_nodes_gpus_are_named_and_keep_the_order_of_the_stages(engine: str) -> None:
    """Docker shows a container the GPUs it names in the node's order, whatever order they are named in."""
    worker = exported(launch_here(demo_model_path(), engine, gpus(5, 2), pp=2))
    service = service_of([yaml.safe_load(compose_file(worker, "/models"))])
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["GPU-7", "GPU-4"]  # indexes 2 and 5
    assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_cpu_devices_keep_their_cores_where_the_node_is_known() -> None:
    devices = tuple(
        Device(device_id=f"cpu:{i}", index=i, kind="cpu", name="a CPU", total_bytes=GIB, cores=(2 * i, 2 * i + 1))
        for i in range(2)
    )
    worker = exported(launch_here(demo_model_path(), "torch", devices, pp=2))
    service = service_of([yaml.safe_load(compose_file(worker, "/models"))])
    assert service["cpuset"] == "0,1,2,3"
    assert service["environment"]["ISERVE_DEVICE_CORES"] == "cpu:0=0,1;cpu:1=2,3"
    assert service["deploy"]["resources"]["reservations"] == {"memory": str(2 * GIB)}
    (container,) = pod_of(list(yaml.safe_load_all(kubernetes_objects(worker, "claim"))))["containers"]
    assert container["resources"] == {"requests": {"cpu": 4, "memory": str(2 * GIB)}, "limits": {"cpu": 4}}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["OMP_NUM_THREADS"] == "2"
    assert "ISERVE_DEVICE_CORES" not in env


def test_the_header_builds_the_image_from_the_file_that_is_there() -> None:
    remarks = exported(launch_here(demo_model_path(), "torch", gpus(0))).remarks
    (build,) = (line for line in remarks if "docker build" in line)
    (dockerfile,) = re.findall(r" -f (\S+) \.$", build)
    assert (Path(__file__).parents[3] / dockerfile).is_file()


@pytest.mark.parametrize(("engine", "is_said"), [("vllm", True), ("torch", False)])
def test_remarks_say_of_an_engine_with_a_warm_up_that_there_is_none(engine: str, is_said: bool) -> None:
    for bare in (False, True):
        remarks = exported(launch_here(demo_model_path(), engine, gpus(0)), bare=bare).remarks
        assert any("no warm-up" in remark for remark in remarks) is is_said


def test_what_the_tools_would_replace_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "$HOME ${X} $(Y) $$"
    shutil.copytree(demo_model_path(), folder)
    launch = launch_here(folder, "torch", gpus(0))
    hostile = replace(launch, worker=replace(launch.worker, served_model="$HOME-$(Y)"))
    worker = exported(hostile)
    found = [yaml.safe_load(compose_file(worker, str(folder)))]
    (volume,) = service_of(found)["volumes"]
    assert volume["source"].replace("$$", "\0").count("$") == 0
    assert volume["source"].replace("$$", "$") == str(folder)
    assert json.loads(files_of("compose", found)["spec.json"])["served_model"] == "$HOME-$(Y)"
    assert "$HOME" not in found[0]["configs"]["spec.json"]["content"].replace("$$", "")
    assert words_of("k8s", list(yaml.safe_load_all(kubernetes_objects(worker, "claim")))) == list(worker.argv)


def test_the_release_that_was_measured_names_the_image() -> None:
    launch = replace(launch_here(demo_model_path(), "vllm", gpus(0)), release="0.22.1")
    assert exported(launch).image == "vllm/vllm-openai:v0.22.1"
    assert exported(launch, image="mirror:5000/vllm@sha256:0a").image == "mirror:5000/vllm@sha256:0a"
    assert "0.22.1" in compose_file(exported(launch), "/models")


@pytest.mark.parametrize(
    ("release", "tag", "is_other"),
    [
        ("0.33.0", "v0.33.0", False),
        ("0.33.0+cu130", "v0.33.0", False),
        ("0.33.0.post1+cu130", "v0.33.0.post1", False),
        ("0.34.1", "v0.34.1", False),
        ("0.33.0rc1", "v0.33.0", True),
        ("0.32.1.dev5+g1a2b3c4.d20261101", "v0.32.0", True),
        ("0.34.0.dev7", "v0.33.0", True),
        ("0.11.0rc2", "v0.24.0", True),
        ("unknown", "v0.33.0", True),
    ],
)
def test_a_build_without_an_image_takes_the_nearest_releases_and_says_so(
    release: str, tag: str, is_other: bool
) -> None:
    launch = replace(launch_here(demo_model_path(), "vllm", gpus(0)), release=release)
    worker = exported(launch)
    assert worker.image == f"vllm/vllm-openai:{tag}"
    told = [remark for remark in worker.remarks if f"no image of vLLM {release}" in remark]
    assert len(told) == is_other
    assert all(tag[1:] in remark for remark in told)
    assert exported(launch, image="mine").remarks == tuple(r for r in worker.remarks if r not in told)


def test_the_command_line_is_the_one_that_a_daemon_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "environment")))
    launch = launch_here(demo_model_path(), "vllm", gpus(0, 1), pp=2)
    devices = {device.device_id: device for device in launch.devices}
    spec = replace(launch.worker, host="0.0.0.0", port=PORT)
    command = get_engine("vllm").command(spec, tmp_path, devices)
    worker = exported(launch)
    words = [word.replace(worker.model_path, spec.checkpoint) for word in worker.argv[1:]]
    words.append("--middleware=iserve_worker_key.WorkerKey")  # no gateway with a token is before a container
    assert list(command.argv[-len(words) :]) == words
    assert dict(command.env) == dict(worker.env)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(kind: str, found: list[dict[str, Any]], folder: Path, program: list[str]) -> Iterator[str]:
    """The exported command with ``program`` for its entry point, the container's paths being ``folder`` and the
    demo's, on a free port. Gives the URL once it is healthy."""
    port = free_port()

    def here(text: str) -> str:
        text = text.replace(f"{FILES}/", f"{folder}/").replace("/models/iserve-demo", str(demo_model_path()))
        return text.replace(f"--port={PORT}", f"--port={port}").replace(f'"port": {PORT}', f'"port": {port}')

    for name, text in (files_of(kind, found) if "configs" in found[0] or kind == "k8s" else {}).items():
        (folder / name).write_text(here(text))
    service = service_of(found)
    command = [*program, *(here(word) for word in words_of(kind, found)[1:])]
    env = dict(os.environ) | service["environment"]
    process = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None, f"ended with {process.returncode}"
            assert time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(url: str) -> dict[str, Any]:
    body = json.dumps({"model": "iserve-demo", "prompt": "2+2=", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


@pytest.mark.process
def test_the_embedded_engine_serves_as_the_file_says(tmp_path: Path) -> None:
    device = Device(device_id="cpu:0", index=0, kind="cpu", name="a CPU", total_bytes=GIB, cores=(0,))
    launch = launch_here(demo_model_path(), "torch", (device,))
    launch = replace(launch, worker=replace(launch.worker, served_model="iserve-demo"))
    found = [yaml.safe_load(compose_file(exported(launch), "/models"))]
    with started("compose", found, tmp_path, [sys.executable]) as url:
        assert ask(url)["model"] == "iserve-demo"


def test_a_strict_vllm_serves_as_the_file_says(tmp_path: Path) -> None:
    """The stand-in refuses every flag that vLLM does not have."""
    launch = launch_here(demo_model_path(), "vllm", gpus(0))
    launch = replace(launch, worker=replace(launch.worker, served_model="iserve-demo"))
    found = [yaml.safe_load(compose_file(exported(launch), "/models"))]
    python = make_vllm(tmp_path / "environment")
    with started("compose", found, tmp_path, [str(python), "-m", "vllm.entrypoints.cli.main"]) as url:
        assert ask(url)["model"] == "iserve-demo"


# Bad input


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_there_stays_as_it_is(kind: str, iserve: Run, model: Any, tmp_path: Path) -> None:
    target = tmp_path / "mine.yaml"
    target.write_text("mine")
    done = iserve("deploy", model("Llama-2-7b"), "--export", kind, "--gpus", "a6000:1", "-o", target)
    assert "is there already" in done.line
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--export", "k8s", "--gpus", "a6000:1", "-o", "/proc/x.yaml"), 1),
        (("--export", "k8s", "--gpus", "a6000:1", "-o", "no/such/x.yaml"), 2),
        (("--export", "k8s", "--gpus", "a6000:1", "-o", "."), 2),
        (("--export", "k8s", "--gpus", "a6000:1", "--scale-to-zero", "60"), 2),
        (("--export", "k8s", "--gpus", "a6000:1", "--slo", "e2e=9", "--reject-late"), 2),
        (("--export", "k8s", "--gpus", "a6000:1", "--batch", "100000"), 1),
        (("--export", "k8s", "--gpus", "a6000:1", "--volume", "My_Claim"), 2),
        (("--export", "compose", "--gpus", "a6000:1", "--volume", "models"), 2),
        (("--export", "compose", "--gpus", "a6000:1", "--image", "two words"), 1),
        (("--export", "compose", "--gpus", "a6000:0"), 2),
        (("--export", "compose", "--gpus", "a6000:1", "--json"), 2),
        (("--export", "compose", "--gpus", "a6000:1", "--name", "a/b"), 2),
        (("--export", "helm"), 2),
        (("--image", "x", "--gpus", "a6000:1"), 2),
    ],
    ids=repr,
)
def test_what_cannot_be_exported_is_told_and_leaves_nothing(
    iserve: Run,
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    golden: Golden,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = iserve("deploy", model("Llama-2-7b"), *arguments)
    assert done.code == code
    golden("cli", done.line if code == 1 else done.err)
    assert not list(tmp_path.iterdir())


def test_damaged_weights_are_refused_as_a_deploy_does(iserve: Run, tmp_path: Path) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x00" * 64)
    target = tmp_path / "k8s.yaml"
    done = iserve("deploy", tmp_path / "model", "--export", "k8s", "--gpus", "a6000:1", "-o", target)
    assert "model.safetensors" in done.line
    assert not target.exists()
