"""Text alone, images and own code, from the command line and the REST bodies to plans, launches and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import CheckpointError, ConfigError, UnsupportedModelError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.towers import WithTowers
from fingerprint.gpus import gpu_spec
from fingerprint.model_use import ModelUse
from iserve.api_types import DeployBody, LaunchBody, PlanBody
from iserve.cli.app import make_app
from iserve.controller.stored_values import read_request
from iserve.model_source import ModelSource, resolve
from iserve.planning.document import PlanDocument
from iserve.planning.model_use import check_same_code, used, with_images
from iserve.rest_bodies import UpdateBody
from tests.fingerprint.small_checkpoints import TOWER_PARAMS, write_llama, write_llava, write_own
from tests.golden_words import Golden
from tests.iserve.test_deploy_command import deploy_body

USES = {
    ("--text-only",): {"text_only": True},
    ("--images", "2"): {"images": 2},
    ("--images", "2", "--image-tokens", "64"): {"images": 2, "image_tokens": 64},
    ("--trust-remote-code",): {"trust_remote_code": True},
}
ON_ONE = ("--gpus", "h200:1", "--engine", "vllm")


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    return write_llava(tmp_path / "llava")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write_own(tmp_path / "own")


def run(*words: object) -> Result:
    return CliRunner().invoke(make_app(), [str(word) for word in words])


def said(result: Result) -> str:
    return " ".join(f"{result.output} {result.exception or ''}".split())


class TestRoundTrip:
    @pytest.mark.parametrize("options", USES)
    def test_the_options_are_those_of_the_body(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
    ) -> None:
        posted = deploy_body(monkeypatch, tmp_path, *options)
        body = read_request(to_json(posted).decode())
        assert body.use == ModelUse(**USES[options])
        assert body.engine_options.use == body.use
        assert LaunchBody(**USES[options]).engine_options.use == PlanBody(**USES[options]).use == body.use

    def test_without_them_the_body_is_as_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        posted = deploy_body(monkeypatch, tmp_path)
        assert not {"text_only", "images", "image_tokens", "trust_remote_code"} & posted.keys()

    @pytest.mark.parametrize("options", USES)
    def test_a_stored_request_keeps_them_through_an_update(self, options: tuple[str, ...]) -> None:
        stored = to_json(DeployBody(model="/models/mine", name="mine", **USES[options])).decode()
        wish, _ = UpdateBody(replicas=2).applied_to(read_request(stored))
        assert wish.use == ModelUse(**USES[options])

    def test_requests_that_were_stored_before_are_read(self) -> None:
        body = json.loads(to_json(DeployBody(model="/models/mine")).decode())
        for field in ("text_only", "images", "image_tokens", "trust_remote_code"):
            del body[field]
        assert read_request(json.dumps(body)).use == ModelUse()

    def test_permission_ends_with_another_model(self) -> None:
        wish = DeployBody(model="/models/mine", trust_remote_code=True)
        same, _ = UpdateBody(model="/models/mine").applied_to(wish)
        other, _ = UpdateBody(model="/models/other").applied_to(wish)
        again, _ = UpdateBody(model="/models/other", trust_remote_code=True).applied_to(wish)
        taken, _ = UpdateBody(trust_remote_code=False).applied_to(wish)
        assert [one.trust_remote_code for one in (same, other, again, taken)] == [True, False, True, False]

    def test_permission_is_for_the_folder_that_it_was_given_for(
        self, own: Path, tmp_path: Path, golden: Golden
    ) -> None:
        other = write_own(tmp_path / "other")
        source = used(resolve(str(other)), ModelUse(trust_remote_code=True))
        check_same_code(source, [str(other)])
        with golden.raises("controller", ConfigError):
            check_same_code(source, [str(own)])
        check_same_code(used(resolve(str(other)), ModelUse()), [str(own)])

    def test_another_models_images_have_a_length_of_their_own(self) -> None:
        wish = DeployBody(model="/models/mine", images=2, image_tokens=64)
        other, _ = UpdateBody(model="/models/other").applied_to(wish)
        assert other.use == ModelUse(images=2)

    def test_no_images_any_more_have_no_length(self) -> None:
        wish, _ = UpdateBody(images=0).applied_to(DeployBody(images=2, image_tokens=64))
        assert wish.use == ModelUse()

    @pytest.mark.parametrize("field", ["text_only", "images", "trust_remote_code"])
    def test_null_changes_nothing(self, field: str, golden: Golden) -> None:
        with golden.raises("controller", ConfigError):
            UpdateBody.model_validate({field: None}).applied_to(DeployBody())

    @pytest.mark.parametrize(
        "options",
        [("--text-only", "--images", "1"), ("--image-tokens", "5"), ("--images", "1001")],
        ids=" ".join,
    )
    def test_what_cannot_be_starts_no_controller(self, options: tuple[str, ...], golden: Golden) -> None:
        for command in (("deploy", "iserve-demo"), ("plan", "iserve-demo", *ON_ONE)):
            refused = run(*command, *options)
            assert refused.exit_code == 2
            golden("cli-usage-errors", said(refused))


class TestTextOnly:
    def test_the_towers_bytes_are_planned_unless_they_are_left_out(self, llava: Path) -> None:
        whole = resolve(str(llava))
        config = DeploymentConfig(engine="vllm")

        def held_bytes(source: ModelSource) -> float:
            estimate = RooflineEstimator(source.spec, gpu_spec("h200")).estimate(config, Workload())
            return estimate.memory.per_gpu_bytes((2,))

        left_out = held_bytes(whole) - held_bytes(used(whole, ModelUse(text_only=True)))
        assert left_out == pytest.approx(2 * TOWER_PARAMS, rel=1e-3)

    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
    def test_every_end_of_a_pipeline_holds_the_towers(self, llava: Path, tp: int, pp: int) -> None:
        text = resolve(str(llava)).spec.text_alone
        base = RooflineEstimator(text, gpu_spec("h200"))
        config = DeploymentConfig(tp=tp, pp=pp, engine="vllm")
        before = base.estimate(config, Workload()).memory
        after = WithTowers(base, TOWER_PARAMS).estimate(config, Workload()).memory
        stages = [after.stage(i, 1).weights_bytes - before.stage(i, 1).weights_bytes for i in range(pp)]
        assert stages == [2 * TOWER_PARAMS // tp] * pp

    def test_a_plan_says_what_the_towers_take_and_how_to_leave_them_out(self, llava: Path, golden: Golden) -> None:
        golden("controller", said(run("plan", llava, *ON_ONE)))
        golden("controller", said(run("plan", llava, *ON_ONE, "--text-only")))

    def test_a_model_without_towers_is_refused_in_one_line(self, tmp_path: Path, golden: Golden) -> None:
        folder = write_llama(tmp_path / "llama")
        for option in (("--text-only",), ("--images", "1")):
            refused = run("plan", folder, *ON_ONE, *option)
            assert isinstance(refused.exception, UnsupportedModelError)
            golden("controller", said(refused))
            assert f"leave {option[0]} out" in said(refused)

    def test_an_engine_that_cannot_is_refused(self, llava: Path, golden: Golden) -> None:
        for command in (("plan", llava, "--gpus", "h200:1"), ("estimate", llava, "--gpu", "h200")):
            refused = run(*command, "--engine", "torch", "--text-only")
            golden("controller", said(refused))


class TestImages:
    def test_their_tokens_are_said_in_text_and_json(self, llava: Path, golden: Golden) -> None:
        golden("controller", said(run("plan", llava, *ON_ONE, "--images", 2)))
        planned = from_json(run("plan", llava, *ON_ONE, "--images", 2, "--json").stdout, PlanDocument)
        work = planned.workload
        assert (work.images, work.tokens_per_image, work.input_tokens) == (2, 576, 512 + 2 * 576)
        given = run("plan", llava, *ON_ONE, "--images", 3, "--image-tokens", 10, "--json").stdout
        assert from_json(given, PlanDocument).workload.input_tokens == 512 + 30

    def test_an_estimate_counts_them(self, llava: Path) -> None:
        found = json.loads(run("estimate", llava, "--gpu", "h200", "--images", 2, "--json").stdout)
        assert found["workload"]["input_tokens"] == 512 + 2 * 576
        plain = json.loads(run("estimate", llava, "--gpu", "h200", "--json").stdout)
        assert found["estimate"]["ttft_s"]["value"] > plain["estimate"]["ttft_s"]["value"]

    def test_where_config_does_not_tell_it_the_line_says_what_to_give(self, llava: Path, golden: Golden) -> None:
        config = json.loads((llava / "config.json").read_text())
        (llava / "config.json").write_text(json.dumps({**config, "model_type": "llava_next"}))
        refused = run("plan", llava, *ON_ONE, "--images", 2)
        golden("controller", said(refused))
        assert run("plan", llava, *ON_ONE, "--images", 2, "--image-tokens", 900).exit_code == 0

    def test_a_context_that_does_not_hold_them_is_refused(self, llava: Path, golden: Golden) -> None:
        refused = run("plan", llava, *ON_ONE, "--images", 2, "--context", 700)
        golden("controller", said(refused))
        refused = run("plan", llava, *ON_ONE, "--images", 7)
        golden("controller", said(refused))

    def test_a_worker_holds_a_prompt_with_them(self, llava: Path) -> None:
        source = used(resolve(str(llava)), ModelUse(images=2))
        assert with_images(Workload(), source).context_tokens == 512 + 2 * 576 + 128
        command = run(
            "plan", llava, *ON_ONE, "--images", 2, "--batch", 1, "--context", 1792, "--as", "vllm"
        ).stdout
        assert "--max-model-len=1792" in command
        assert "'--limit-mm-per-prompt={\"image\": 2}'" in command


class TestOwnCode:
    def test_it_is_planned_with_a_note_and_never_run(self, own: Path, golden: Golden) -> None:
        planned = run("plan", own, *ON_ONE)
        assert planned.exit_code == 0
        golden("controller", said(planned))
        estimated = said(run("estimate", own, "--gpu", "h200", "--engine", "vllm"))
        golden("controller", estimated)
        assert not (own / "ran").exists()

    def test_a_launch_takes_permission(self, own: Path, golden: Golden) -> None:
        refused = run("plan", own, *ON_ONE, "--as", "vllm")
        assert isinstance(refused.exception, ConfigError)
        golden("controller", said(refused))
        given = run("plan", own, *ON_ONE, "--as", "vllm", "--trust-remote-code")
        assert "--trust-remote-code" in given.stdout.split()
        assert not (own / "ran").exists()

    def test_the_embedded_engine_says_that_it_never_runs_it(self, own: Path, golden: Golden) -> None:
        planned = run("plan", own, "--gpus", "h200:1", "--engine", "torch")
        assert planned.exit_code == 1
        golden("controller", said(planned))
        refused = run("plan", own, "--gpus", "h200:1", "--engine", "torch", "--trust-remote-code")
        golden("controller", said(refused))

    def test_files_that_are_named_have_to_be_there_where_they_are_to_run(self, own: Path, golden: Golden) -> None:
        (own / "modeling_own.py").unlink()
        assert resolve(str(own)).spec.own_code
        with golden.raises("controller", CheckpointError):
            resolve(str(own), need_code=True)

    def test_a_plan_says_which_files_are_not_there(self, own: Path, golden: Golden) -> None:
        assert "not here" not in said(run("plan", own, *ON_ONE))
        (own / "modeling_own.py").write_text("from .kernels import k\n")
        for permission in ((), ("--trust-remote-code",)):
            golden("controller", said(run("plan", own, *ON_ONE, *permission)))
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "else/where--a.B"}}))
        planned = run("plan", own, *ON_ONE)
        assert planned.exit_code == 0
        golden("controller", said(planned))


@pytest.mark.parametrize("kind", ["compose", "k8s"])
@pytest.mark.parametrize(
    ("model", "option", "word"),
    [
        (write_llava, ("--text-only",), "--language-model-only"),
        (write_llava, ("--images", "2"), "--limit-mm-per-prompt="),
        (write_own, ("--trust-remote-code",), "--trust-remote-code"),
    ],
)
def test_exports_start_the_same(
    tmp_path: Path, kind: str, model: Any, option: tuple[str, ...], word: str, golden: Golden
) -> None:
    folder, target = model(tmp_path / "model"), tmp_path / "file.yaml"
    plain = run("deploy", folder, *ON_ONE, "--export", kind, "--output", tmp_path / "plain.yaml")
    assert plain.exit_code == (0 if model is write_llava else 1)
    done = run("deploy", folder, *ON_ONE, *option, "--export", kind, "--output", target)
    assert done.exit_code == 0, said(done)
    arguments = [line for line in target.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in arguments if word in line]
    if model is write_llava:
        assert word not in (tmp_path / "plain.yaml").read_text()
    else:
        golden("controller", [line for line in target.read_text().splitlines() if line.lstrip().startswith("#")])


def test_uses_are_json(tmp_path: Path) -> None:
    use = ModelUse(images=2, image_tokens=64)
    assert from_json(to_json(use), ModelUse) == use
