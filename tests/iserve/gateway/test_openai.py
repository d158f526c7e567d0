"""The gateway as the official OpenAI client sees it."""

from __future__ import annotations

import time
from dataclasses import replace

import openai
import pytest

from iserve.keys import new_key
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

CHAT = [{"role": "user", "content": "count"}]


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def worker(gateway, make_worker, make_route):
    worker = make_worker()
    gateway.publish(make_route(worker.target()))
    return worker


def test_chat(client, worker) -> None:
    answer = client.chat.completions.create(model="m", messages=CHAT)
    assert answer.choices[0].message.content == "one two three"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 5)


def test_text(client, worker) -> None:
    assert client.completions.create(model="m", prompt="count").choices[0].text == "one two three"


def test_stream(client, worker) -> None:
    chunks = list(client.chat.completions.create(model="m", messages=CHAT, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["one ", "two ", "three"]


def test_stream_with_usage(gateway, client, worker) -> None:
    before = gateway.metric('iserve_gateway_completion_tokens_total{deployment="m"}')
    stream = client.completions.create(model="m", prompt="x", stream=True, stream_options={"include_usage": True})
    last = list(stream)[-1]
    assert last.choices == []
    assert last.usage.total_tokens == 12
    # The gateway counts after the last frame has left, so wait for what must follow.
    deadline = time.monotonic() + PATIENCE_S
    while gateway.metric('iserve_gateway_completion_tokens_total{deployment="m"}') != before + 5:
        assert time.monotonic() < deadline


def test_models(client, worker) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created, model.owned_by) == ("m", "model", 1_700_000_000, "iserve")
    assert client.models.retrieve("m").id == "m"


def test_model_names_with_a_slash(gateway, client, make_worker, make_route) -> None:
    gateway.publish(make_route(make_worker().target(), name="org/name-7b"))
    assert client.models.retrieve("org/name-7b").id == "org/name-7b"
    assert client.completions.create(model="org/name-7b", prompt="x").choices[0].text == "one two three"


def test_unknown_model_is_404(client, worker) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=CHAT)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_the_workers_own_refusal_passes_unchanged(client, worker) -> None:
    worker.mode = "bad-request"
    with pytest.raises(openai.BadRequestError, match="too long") as caught:
        client.completions.create(model="m", prompt="x" * 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_cut_stream_raises_in_the_client(client, worker, golden: Golden) -> None:
    """Never a short answer that looks complete."""
    worker.mode = "die-mid-stream"
    stream = client.chat.completions.create(model="m", messages=CHAT, stream=True)
    assert next(stream).choices[0].delta.content == "one "
    with golden.raises("rest-errors", openai.APIError):
        next(stream)


def test_a_worker_is_sent_its_own_token_and_no_client_s_key(gateway, make_worker, make_route) -> None:
    worker, (key, record) = make_worker(), new_key("inference")
    route = make_route(replace(worker.target(), token="secret"))
    gateway.publish(route, keys=(record,), auth_required=True)
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0) as client:
        client.completions.create(model="m", prompt="x")
    gateway.publish(make_route(worker.target()), keys=(record,), auth_required=True)  # an older release started it
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0) as client:
        client.completions.create(model="m", prompt="x")
    assert worker.authorizations == ["Bearer secret", None]


def test_keys(gateway, make_worker, make_route) -> None:
    key, record = new_key("inference")
    route = make_route(make_worker().target())
    gateway.publish(route, keys=(record,), auth_required=True)
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key=key, max_retries=0) as known:
        assert known.completions.create(model="m", prompt="x").choices[0].text == "one two three"
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="isk-wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError) as caught:
                stranger.models.list()
            assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
        gateway.publish(route, keys=(), auth_required=True)  # revoked
        with pytest.raises(openai.AuthenticationError):
            known.completions.create(model="m", prompt="x")
