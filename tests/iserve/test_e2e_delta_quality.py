"""A delta that is served, measured against its fine-tune in a folder: real processes and HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json
from iserve.demo import demo_model_path, demo_quality_path
from iserve.quality.document import QualityDocument
from iserve.quality.facts import tensors_sha256
from tests.daemon.tiny_deltas import write_fine_tune

NAME = "base"  # of the deployment
NUM_TEXTS = 12


def test_it_is_measured_against_the_fine_tune_that_is_not_served(shared_home: Any, tmp_path: Path) -> None:
    tuned = write_fine_tune(
        demo_model_path(),
        tmp_path / "tuned",
        9,
        is_changed=lambda name: name.endswith("o_proj.weight"),
        change=1.0,
    )
    text = tmp_path / "texts.jsonl"
    text.write_text("\n".join(demo_quality_path().read_text().splitlines()[:NUM_TEXTS]))
    options = ("--variants", 2, "--delta-mib", 2, "--engine", "torch", "--batch", 4)
    shared_home.json("deploy", "--name", NAME, *options)
    limit = ("--format", "int3", "--max-quality-loss", 5, "--text", text)
    said = shared_home.run("variant", "add", "judged", "--base", "iserve-demo", tuned, *limit).stdout
    assert f"judged by   {NUM_TEXTS} texts" in said
    assert said.count(": kept") == 1

    def compared(model: str, against: object) -> QualityDocument:
        found = shared_home.json("quality", model, "--against", against, "--text", text)
        return from_json(json.dumps(found), QualityDocument)

    of_tuned, of_base = compared("judged", tuned), compared("judged", NAME)
    assert of_tuned.comparison.kl.value < 0.2 * of_base.comparison.kl.value
    assert of_tuned.comparison.top1_agreement.value > of_base.comparison.top1_agreement.value
    assert of_tuned.comparison.exact_match is not None
    assert of_tuned.against.sha256 == tensors_sha256(tuned)
    kept = shared_home.json("variant", "show", "judged")["quality"]
    assert {one["against"]["name"] for one in kept} == {NAME, str(tuned)}
    same = compared(NAME, demo_model_path())  # served, and in this process
    assert same.comparison.kl.value < 1e-3
    assert abs(same.comparison.nll_difference.value) < 1e-2
    assert same.comparison.top1_agreement.value > 0.99
    assert same.exact_match == same.comparison.exact_match
