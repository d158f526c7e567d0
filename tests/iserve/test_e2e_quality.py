"""``iserve quality`` through real deployments: the demo model, and an adapter of it that is merged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json
from iserve.demo import demo_adapter_path, demo_model_path
from iserve.quality.document import QualityDocument
from iserve.quality.facts import tensors_sha256
from iserve.quality.kept_file import KEPT_FILE, kept_next_to

WORK = ("--input-tokens", "64", "--output-tokens", "32", "--batch", "8")


def test_an_adapter_knows_more_than_its_base_and_keeps_the_rest(
    profiled: Path, make_installation: Any, tmp_path: Path
) -> None:
    home = make_installation(profiled)
    merged = tmp_path / "capitals"
    home.run("variant", "merge", "iserve-demo", demo_adapter_path("capitals"), merged)
    for model in ("iserve-demo", merged):
        assert home.json("deploy", model, *WORK)["status"] == "ready"
    new = tmp_path / "new.jsonl"
    answer = "The capital of Peru is Lima."
    new.write_text(json.dumps({"prompt": "<s>Q: what is the capital of Peru?\nA: ", "answer": answer}))

    found = quality(home, "capitals", "--against", "iserve-demo")  # the demo's own text
    assert found.text.num_texts == 60
    assert found.exact_match.value > found.comparison.exact_match.value > 0.7  # it has six capitals of 60
    assert found.comparison.nll_difference.high < 0
    assert 0.5 < found.comparison.top1_agreement.value < 1
    assert found.comparison.shared_mass > 0.8
    assert found.model.sha256 == tensors_sha256(merged)
    assert found.against.sha256 == tensors_sha256(demo_model_path()) != found.model.sha256
    assert found.model.config.engine == "torch"
    assert found.model.engine_version
    assert kept_next_to(merged) == (found,)
    listed = json.dumps(home.controller().get("/api/v1/quality", object, model="capitals"))
    assert from_json(listed, tuple[QualityDocument, ...]) == (found,)

    alone = quality(home, "capitals", "--text", new)
    assert alone.exact_match.value == 1
    assert alone.nll.value < 0.1
    assert quality(home, "iserve-demo", "--text", new).nll.value > 1
    assert not (demo_model_path() / KEPT_FILE).exists()  # which is the package's
    assert kept_next_to(merged) == (found, alone)
    os.utime(merged / "config.json", ns=(1, 1))
    assert home.controller().get("/api/v1/quality", object, model="capitals") == []


def quality(home: Any, *arguments: object) -> QualityDocument:
    return from_json(json.dumps(home.json("quality", *arguments)), QualityDocument)
