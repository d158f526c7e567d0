"""A deployment without --batch and --context serves 32 requests of 4,000 tokens that arrive at once."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fingerprint.families import load_spec
from iserve.demo import demo_model_path
from iserve.state.store import Store
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

__all__ = ["all_served", "know_as_demo", "long_model"]

PROMPTS, PROMPT_TOKENS = 32, 4000


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """The demo model with a context of 8,192 tokens."""
    folder = tmp_path / "long-demo"
    shutil.copytree(demo_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def know_as_demo(state: Path, model: Path) -> None:
    """Keep the demo model's profile as that of ``model``, which differs in nothing that was measured."""
    with closing(sqlite3.connect(state)) as database:
        (key,) = database.execute("SELECT DISTINCT machine_key FROM profiles").fetchone()
    store = Store.open(state)
    (profile,) = store.profiles()
    store.put_profile(replace(profile, spec=load_spec(model)), key)
    store.close()


def all_served(home: Any, model: str) -> None:
    def ask(number: int) -> Any:
        prompt = [65 + number % 26] * PROMPT_TOKENS
        return home.openai().completions.create(
            model=model,
            prompt=prompt,
            max_tokens=2,
            temperature=0,
            extra_body={"ignore_eos": True},
            timeout=PATIENCE_S,
        )

    with ThreadPoolExecutor(PROMPTS) as pool:
        answers = list(pool.map(ask, range(PROMPTS)))
    assert [answer.usage.prompt_tokens for answer in answers] == [PROMPT_TOKENS] * PROMPTS
    assert {answer.usage.completion_tokens for answer in answers} == {2}


def test_the_embedded_engine(
    profiled: Path, long_model: Path, make_installation: Callable[..., Any], golden: Golden
) -> None:
    home = make_installation(profiled)
    know_as_demo(home.home / "state.db", long_model)
    shown = " ".join(home.run("deploy", long_model, "--name", "long").stdout.split())
    plan = home.get("/api/v1/deployments/long/plan")
    capacity = plan["capacity"]
    assert (plan["workload"]["batch"], plan["workload"]["longest_tokens"]) == (1, 0)
    assert (capacity["requests_at_once"], capacity["context_tokens"]) == (8, 8192)
    golden("cli", re.findall(r"Serves up to .*? each|the figures are for .*? output tokens", shown))
    all_served(home, "long")
