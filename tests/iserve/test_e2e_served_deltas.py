"""Deltas next to their base through gateway and worker: real processes, HTTP, kill -9 of the worker."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from fingerprint.float_bytes import decode_floats
from fingerprint.lora import merge_adapter, read_adapter
from fingerprint.lora.adapter import open_weights
from iserve.demo import demo_adapter_path, demo_delta_path, demo_model_path
from iserve.demo.training_tasks import Example
from tests.daemon.tiny_deltas import CHANGE, write_fine_tune, write_tiny_delta
from tests.fingerprint.small_adapters import values, write_adapter
from tests.fingerprint.small_fine_tunes import read_values
from tests.golden_words import Golden
from tests.iserve.test_demo_adapters import answers

NAME = "base"  # of the deployment
QUESTION = "What is the capital of Peru?"
MANY = tuple(f"tuned-{number:02}" for number in range(20))


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twenty deltas of a few matrices each, by name."""
    folder = tmp_path_factory.mktemp("deltas")
    return {
        name: write_tiny_delta(
            demo_model_path(),
            folder / name,
            "int2",
            seed,
            is_changed=lambda tensor: tensor.endswith("o_proj.weight"),
            change=2.0,
        )
        for seed, name in enumerate(MANY)
    }


@pytest.fixture(scope="module")
def serving(shared_home: Any, deltas: dict[str, Path]) -> Any:
    """A deployment with slots for adapters alone, then for deltas too, and all variants."""
    shared_home.json("deploy", "--name", NAME, "--variants", 20, "--engine", "torch", "--batch", 4)
    for name, delta in deltas.items():  # not by twenty commands, each of which takes seconds to start
        body = {"name": name, "base": NAME, "path": str(delta)}
        added = shared_home.controller().post("/api/v1/variants", body, dict)
        assert (added["rank"], added["deployments"]) == (0, [])
        assert "--delta-mib 1" in added["why_not_served"]
    shared_home.run("variant", "add", "capitals", "--base", NAME, demo_adapter_path("capitals"))
    shared_home.run("update", NAME, "--delta-mib", 2)
    found = shared_home.json("variant", "ls")
    assert [(one["deployments"], one["why_not_served"]) for one in found] == [([NAME], None)] * 21
    return shared_home


def answer(installation: Any, model: str) -> str:
    found = installation.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=12
    )
    assert found.model == model
    return str(found.choices[0].message.content)


class TestServed:
    def test_twenty_are_served_and_are_back_after_their_worker_was_killed(
        self, serving: Any, kill: Any, until: Any
    ) -> None:
        before = {model: answer(serving, model) for model in (NAME, "capitals", *MANY)}
        assert len(set(before.values())) > len(MANY) // 2, "the variants answer alike"
        assert before["capitals"].startswith("The capital")
        kill(next(iter(serving.worker_pids().values())))

        def asked() -> dict[str, str] | None:
            try:
                return {model: answer(serving, model) for model in before}
            except openai.APIError:  # until the worker is back
                return None

        assert until(asked, "the worker is back and answers for all") == before

    def test_the_fine_tune_and_the_adapter_of_the_demo_answer_by_the_command(self, serving: Any) -> None:
        asked = {
            "symbols": (demo_delta_path, "what is the symbol of silver?", "The symbol of silver is Ag."),
            "shout": (
                demo_adapter_path,
                "What is a fingerprint?",
                "A FINGERPRINT IS A COPY OF A MODEL WITH ONLY ONE OR TWO OF ITS HIDDEN LAYERS.",
            ),
        }
        for name, (path_of, question, expected) in asked.items():
            serving.run("variant", "add", name, "--base", NAME, path_of(name))
            assert serving.run("chat", name, question).stdout == f"{expected}\n"
            assert serving.run("chat", NAME, question).stdout != f"{expected}\n"
            serving.run("variant", "rm", name)

    def test_show_says_that_it_is_a_delta(self, serving: Any, golden: Golden) -> None:
        shown = serving.run("variant", "show", MANY[3]).stdout
        lines = [line for line in shown.splitlines() if line.startswith(("updates", "status"))]
        golden("variant", "\n".join(lines))


def write_dora(folder: Path) -> Path:
    """Write the adapter of capitals with magnitudes that are not the rows' norms, so that it answers otherwise."""
    source, made = read_adapter(demo_adapter_path("capitals")), folder / "lora-merged"
    merge_adapter(demo_model_path(), source, made)
    rows, tensors = read_values(made), {}
    weights = open_weights(source.folder)
    for name, entry in weights.tensors.items():
        tensors[name] = decode_floats(weights.read(name), entry.dtype).reshape(entry.shape)
    for seed, module in enumerate(source.modules):
        factors = 1 + values((module.out_features,), seed, 0.6)
        norms = np.linalg.norm(rows[module.weight], axis=1)
        tensors[f"base_model.model.{module.name}.lora_magnitude_vector"] = norms * factors
    return write_adapter(
        folder / "dora",
        tensors,
        r=source.config.rank,
        lora_alpha=source.config.alpha,
        use_rslora=source.config.rank_stabilized,
        target_modules="all-linear",
        use_dora=True,
    )


class TestAdapters:
    """``variant add`` of an adapter that no engine serves merges and compresses it."""

    def test_a_dora_answers_as_its_merge_does(self, serving: Any, tmp_path: Path, golden: Golden) -> None:
        dora = write_dora(tmp_path)
        options = ("--base", "iserve-demo", "--format", "int4")
        done = serving.run("variant", "add", "dora", dora, *options)
        golden("variant", next(line for line in done.stderr.splitlines() if "delta" in line))
        serving.run("variant", "merge", "iserve-demo", dora, tmp_path / "merged")
        (expected,) = answers(tmp_path / "merged", [Example("", QUESTION, "")])
        assert expected not in (answer(serving, "capitals"), answer(serving, NAME))
        assert answer(serving, "dora") == expected
        (shown,) = (one for one in serving.json("variant", "ls") if one["name"] == "dora")
        assert (shown["rank"], shown["deployments"]) == (0, [NAME])
        assert not list((serving.home / "compressing").iterdir())


class TestFineTunes:
    """``variant add`` of a whole model compresses it first."""

    def test_it_is_compressed_registered_and_answers(self, serving: Any, tmp_path: Path, golden: Golden) -> None:
        tuned = write_fine_tune(
            demo_model_path(),
            tmp_path / "tuned",
            7,
            is_changed=lambda name: name.startswith("model.layers.1.mlp"),
            change=2.0,
        )
        texts = tmp_path / "texts.txt"
        texts.write_text("What is a delta?\n\nA change of weights.\n")
        options = ("--format", "int3", "--calibration", texts)
        added = serving.json("variant", "add", "whole", "--base", "iserve-demo", tuned, *options)
        assert (added["rank"], added["num_modules"], added["deployments"]) == (0, 3, [NAME])
        assert answer(serving, "whole") != answer(serving, NAME)
        again = serving.json("variant", "add", "whole", "--base", NAME, tuned, *options)  # the deployment's model
        assert (again["content_hash"], again["new_bytes"]) == (added["content_hash"], 0)
        assert not list((serving.home / "compressing").iterdir())
        taken = serving.run("variant", "add", NAME, "--base", NAME, tuned, *options, check=False)
        assert taken.returncode != 0
        golden("variant", taken.stderr)
        assert not list((serving.home / "compressing").iterdir())  # refused before anything is compressed

    def test_killed_while_it_compresses_the_same_command_goes_on(
        self, serving: Any, kill: Any, until: Any, tmp_path: Path
    ) -> None:
        tuned = write_fine_tune(
            demo_model_path(),
            tmp_path / "tuned",
            8,
            is_changed=lambda name: name.endswith("o_proj.weight"),
            change=2.0,
        )
        texts = tmp_path / "texts.txt"
        texts.write_text("What is a delta?\n\nA change of weights.\n")
        command = ("variant", "add", "killed", "--base", "iserve-demo", tuned, "--calibration", texts)
        work = serving.home / "compressing"
        process = serving.start(*command)
        until(lambda: any(work.glob("*/**/*.safetensors")) or process.poll() is not None, "a part is compressed")
        kill(process.pid)
        process.communicate()
        names = [one["name"] for one in serving.json("variant", "ls")]
        assert process.returncode == 0 or "killed" not in names
        added = serving.json(*command)
        assert added["deployments"] == [] or added["deployments"] == [NAME]
        assert not list(work.iterdir())

    @pytest.mark.parametrize(
        "kind", ["other-shapes", "empty-texts", "binary-texts", "another-base", "nan", "pickle"]
    )
    def test_what_is_unfit_is_refused_and_registers_nothing(
        self, kind: str, serving: Any, tmp_path: Path, golden: Golden
    ) -> None:
        options: tuple[Any, ...] = ()
        if kind == "another-base":
            other = write_fine_tune(
                demo_model_path(), tmp_path / "other", 1, is_changed=lambda name: "norm" in name
            )
            path = write_tiny_delta(
                other, tmp_path, "int2", 2, is_changed=lambda tensor: tensor == "model.norm.weight"
            )
        else:
            path = write_fine_tune(
                demo_model_path(),
                tmp_path / "tuned",
                1,
                is_changed=lambda name: "norm" in name,
                change=math.nan if kind == "nan" else CHANGE,
            )
        if kind == "other-shapes":
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0, "rope_parameters": None}))
        if kind.endswith("texts"):
            (tmp_path / "texts.txt").write_bytes(b"" if kind == "empty-texts" else bytes(range(256)))
            options = ("--calibration", tmp_path / "texts.txt")
        if kind == "pickle":
            (path / "model.safetensors").rename(path / "pytorch_model.bin")
        failed = serving.run("variant", "add", "bad", "--base", "iserve-demo", path, *options, check=False)
        assert failed.returncode != 0
        golden("variant", failed.stderr)
        assert "bad" not in [one["name"] for one in serving.json("variant", "ls")]
