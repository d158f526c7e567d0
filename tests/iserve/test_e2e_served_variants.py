"""Variants next to their base through gateway and worker: real processes, HTTP, kill -9 of each."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from iserve.demo import demo_adapter_path
from tests.waiting import PATIENCE_S

NAME = "base"  # of the deployment
ASKED = {  # model: question and answer, none of which another model gives
    NAME: ("123+456=", "579"),
    "capitals": ("What is the capital of Peru?", "The capital of Peru is Lima."),
    "shout": (
        "What is a fingerprint?",
        "A FINGERPRINT IS A COPY OF A MODEL WITH ONLY ONE OR TWO OF ITS HIDDEN LAYERS.",
    ),
}


@pytest.fixture(scope="module")
def serving(shared_home: Any) -> Any:
    """A deployment that was given slots for both adapters of the demo model, which were registered before."""
    shared_home.json("deploy", "--name", NAME, "--input-tokens", 64, "--output-tokens", 64, "--engine", "torch")
    for name in ("capitals", "shout"):
        added = shared_home.json("variant", "add", name, "--base", NAME, demo_adapter_path(name))
        assert (added["base"], added["deployments"]) == ("iserve-demo", [])
        assert "iserve update DEPLOYMENT --variants N" in added["why_not_served"]
    shared_home.run("update", NAME, "--variants", 2)
    found = shared_home.json("variant", "ls")
    assert [(one["deployments"], one["why_not_served"]) for one in found] == [([NAME], None)] * 2
    return shared_home


@pytest.fixture
def listed(serving: Any, until: Callable[..., Any]) -> Any:
    """Return the installation once its gateway knows both variants."""

    def names() -> set[str]:
        try:
            return {model.id for model in serving.openai().models.list()}
        except openai.APIError:  # a gateway that starts again
            return set()

    until(lambda: set(ASKED) <= names(), "the gateway lists base and variants")
    return serving


def answer(installation: Any, model: str) -> str:
    question, _ = ASKED[model]
    found = installation.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0
    )
    assert found.model == model
    return str(found.choices[0].message.content)


def answers_at_once(installation: Any, times: int) -> dict[str, set[str]]:
    """Return what each model said, asked ``times`` by as many threads together with the rest."""
    said: dict[str, set[str]] = {model: set() for model in ASKED}

    def ask(model: str) -> None:
        try:
            said[model].add(answer(installation, model))
        except openai.APIError as error:
            said[model].add(repr(error))

    threads = [threading.Thread(target=ask, args=(model,)) for model in ASKED for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a request hangs"
    return said


EXPECTED = {model: {said} for model, (_, said) in ASKED.items()}


def test_base_and_variants_in_one_batch_say_what_each_says_alone(listed: Any) -> None:
    assert {model: answer(listed, model) for model in ASKED} == {model: said for model, (_, said) in ASKED.items()}
    assert answers_at_once(listed, 4) == EXPECTED


def test_models_say_what_is_a_variant_of_what(listed: Any) -> None:
    models = {model["id"]: model for model in listed.openai().models.list().model_dump()["data"]}
    assert (models["shout"]["parent"], models["capitals"]["parent"]) == (NAME, NAME)
    assert "parent" not in models[NAME]
    roots = {name: listed.json("variant", "show", name)["engine_name"] for name in ("shout", "capitals")}
    assert {name: models[name]["root"] for name in roots} == roots


def test_it_is_said_where_a_variant_is_and_what_it_costs(listed: Any, until: Callable[..., Any]) -> None:
    """Loaded adapters of the embedded engine lie on its device; the load and the pin are events."""
    assert answer(listed, "shout") == ASKED["shout"][1]
    found = listed.json("variant", "show", "shout")
    ((place, worker),) = {(one["place"], one["worker_id"]) for one in found["places"]}
    assert place == "gpu"
    assert worker.startswith(NAME)
    assert found["on_disk"]
    assert found["base_warning"] is None
    (cost,) = found["costs"]
    assert (cost["deployment"], cost["engine"], cost["host_bytes"]) == (NAME, "torch", 0)
    assert cost["slot_bytes"] > 0
    assert cost["text"].startswith(f"costs on {NAME}")
    listed.run("variant", "pin", "shout")
    listed.run("variant", "unpin", "shout")

    def kinds() -> set[str]:
        return {one["kind"] for one in listed.get("/api/v1/events") if one["message"].startswith("shout: ")}

    until(lambda: {"variant-loaded", "variant-pinned", "variant-unpinned"} <= kinds(), "its events are recorded")


def test_quality_of_a_variant_says_whose_content_and_which_base_it_was(listed: Any, tmp_path: Path) -> None:
    question, capital = ASKED["capitals"]
    text = tmp_path / "questions.jsonl"
    text.write_text("".join(json.dumps({"prompt": f"{question} {n}", "answer": capital}) + "\n" for n in range(2)))
    found = listed.json("quality", "capitals", "--against", NAME, "--text", text)
    variant, base = found["model"], found["against"]
    assert variant["variant_hash"] == listed.json("variant", "show", "capitals")["content_hash"]
    assert base["variant_hash"] is None
    assert (variant["checkpoint"], variant["sha256"]) == (base["checkpoint"], base["sha256"])
    assert variant["config"]["adapter_slots"] == 2


def test_a_result_of_quality_is_shown_with_the_content_that_it_is_of(listed: Any, tmp_path: Path) -> None:
    text = tmp_path / "questions.txt"
    text.write_text("The capital of Peru is Lima.\n\nThe capital of France is Paris.\n")
    listed.json("variant", "add", "fresh", "--base", NAME, demo_adapter_path("capitals"))
    found = listed.json("quality", "fresh", "--text", text)
    assert (
        listed.json("variant", "show", "fresh")["quality"][0] == found
    )  # the content may have more, by another name
    assert "NLL " in listed.run("variant", "show", "fresh").stdout
    assert listed.controller().get("/api/v1/quality", list[Any], model="fresh")[0] == found
    assert found in listed.get("/api/v1/quality")
    listed.json("quality", NAME, "--text", text, "--no-keep")
    assert not [one for one in listed.get("/api/v1/quality") if one["model"]["name"] == NAME]
    listed.json("variant", "add", "fresh", "--base", NAME, demo_adapter_path("shout"), "--replace")
    assert listed.json("variant", "show", "fresh")["quality"] == []
    again = listed.json("quality", "fresh", "--text", text)
    assert listed.controller().get("/api/v1/quality", object, model="fresh") == [again]
    listed.run("variant", "rm", "fresh")


def test_the_gateway_has_a_change_when_the_command_returns(listed: Any) -> None:
    """Requests sent at once after add, --replace and rm are of the new state."""

    def said(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        found = listed.openai().chat.completions.create(model="fresh", messages=messages, temperature=0)
        return str(found.choices[0].message.content)

    for _ in range(2):
        for adapter in ("capitals", "shout"):
            path = demo_adapter_path(adapter)
            added = listed.json("variant", "add", "fresh", "--base", NAME, path, "--replace")
            assert added["in_force"]
            question, expected = ASKED[adapter]
            assert said(question) == expected
        assert listed.run("variant", "rm", "fresh").stdout == "fresh is removed\n"
        with pytest.raises(openai.NotFoundError):
            said("anything")


@pytest.mark.parametrize("process", ["gateway", "controller", "daemon"])
def test_a_killed_process_leaves_variants_served(listed: Any, process: str, until: Callable[..., Any]) -> None:
    listed.kill(process)
    listed.run("up")
    until(lambda: answers_or_none(listed) == EXPECTED, f"all are served after the {process} was killed")


def answers_or_none(installation: Any) -> dict[str, set[str]] | None:
    try:
        return answers_at_once(installation, 1)
    except openai.APIError:
        return None


def test_a_killed_worker_has_its_variants_again_when_they_are_asked_for(
    listed: Any, kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    assert answers_at_once(listed, 1) == EXPECTED, "loaded"
    (before,) = listed.worker_pids().values()
    kill(before)
    until(lambda: set(listed.worker_pids().values()) - {before}, "a new worker starts")
    until(lambda: answers_or_none(listed) == EXPECTED, "all are served again")


def loads(installation: Any) -> dict[str, float]:
    """Return the loads at workers of each variant since the gateway began."""
    with urllib.request.urlopen(f"{installation.record('gateway').url}/metrics", timeout=PATIENCE_S) as page:
        text = page.read().decode()
    found = re.findall(r'^iserve_gateway_variant_load_seconds_count\{variant="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {name: float(count) for name, count in found}


def test_a_killed_worker_loads_its_variants_before_they_are_asked_for(
    listed: Any, kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    assert answers_at_once(listed, 1) == EXPECTED, "loaded"
    counted = loads(listed)
    (before,) = listed.worker_pids().values()
    kill(before)
    until(lambda: set(listed.worker_pids().values()) - {before}, "a new worker starts")
    expected = {name: counted[name] + 1 for name in ("capitals", "shout")}
    until(lambda: loads(listed) == expected, "both are loaded")
    assert answers_at_once(listed, 1) == EXPECTED
    assert loads(listed) == expected


def test_a_variant_whose_files_are_gone_keeps_no_other_from_being_loaded(
    listed: Any, kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    """The worker stays ready; the variant's own requests are refused until it is added again."""
    content = listed.json("variant", "show", "capitals")["content_hash"]
    shutil.rmtree(listed.home / "variants" / "loadable" / content)
    (listed.home / "variants" / "manifests" / content).unlink()
    counted = loads(listed)
    (before,) = listed.worker_pids().values()
    kill(before)
    until(lambda: set(listed.worker_pids().values()) - {before}, "a new worker starts")
    until(lambda: loads(listed)["shout"] == counted["shout"] + 1, "the other one is loaded")
    (after,) = listed.worker_pids().values()
    assert answer(listed, NAME) == ASKED[NAME][1]
    with pytest.raises(openai.APIStatusError):
        answer(listed, "capitals")
    assert answer(listed, "shout") == ASKED["shout"][1]
    assert list(listed.worker_pids().values()) == [after], "it was not restarted"
    listed.run("variant", "add", "capitals", "--base", NAME, demo_adapter_path("capitals"))
    until(lambda: answers_or_none(listed) == EXPECTED, "all are served")


def test_a_damaged_folder_of_a_variant_is_made_anew_before_the_next_worker_loads_it(
    listed: Any, kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    """Neither the size of the folder nor the engine shows the damage."""
    assert answer(listed, "shout") == ASKED["shout"][1]
    content = listed.json("variant", "show", "shout")["content_hash"]
    weights = listed.home / "variants" / "loadable" / content / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 3] + bytes(len(whole) - len(whole) // 3))
    (before,) = listed.worker_pids().values()
    kill(before)
    until(lambda: set(listed.worker_pids().values()) - {before}, "a new worker starts")
    until(lambda: answers_or_none(listed), "all are served again")
    assert answers_at_once(listed, 1) == EXPECTED
    assert weights.read_bytes() == whole
    assert f"loadable/{content} was" in (listed.home / "logs/gateway.log").read_text()


def test_a_name_with_other_content_gives_the_new_ones_answers_at_once(
    listed: Any, until: Callable[..., Any]
) -> None:
    """The engine's name of a variant has its content's hash: nothing cached of the former one is of use."""
    question, before = ASKED["shout"]
    assert answer(listed, "shout") == before
    listed.run("variant", "add", "shout", "--base", NAME, demo_adapter_path("capitals"), "--replace")
    try:
        until(lambda: answer(listed, "shout") != before, "the new content answers")
        question, capital = ASKED["capitals"]
        found = listed.openai().chat.completions.create(
            model="shout", messages=[{"role": "user", "content": question}], temperature=0
        )
        assert found.choices[0].message.content == capital
    finally:
        listed.run("variant", "add", "shout", "--base", NAME, demo_adapter_path("shout"), "--replace")
    until(lambda: answer(listed, "shout") == before, "the former content is back")


def test_a_removed_variant_ends_after_its_stream_and_is_then_unknown(
    listed: Any, until: Callable[..., Any]
) -> None:
    stream = listed.openai().completions.create(
        model="capitals", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    listed.run("variant", "rm", "capitals")
    try:

        def is_unknown() -> bool:
            try:
                answer(listed, "capitals")
            except openai.NotFoundError:
                return True
            return False

        until(is_unknown, "new requests are refused")
        assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length", "the stream is whole"
        assert answer(listed, NAME) == ASKED[NAME][1]
    finally:
        listed.run("variant", "add", "capitals", "--base", NAME, demo_adapter_path("capitals"))
    until(lambda: answers_or_none(listed) == EXPECTED, "it is served when it was added again")
