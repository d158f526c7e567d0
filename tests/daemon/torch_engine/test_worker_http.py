"""The worker's HTTP face over real sockets, with the official client; the model is scripted."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import iserve.demo
from daemon.torch_engine.api import chat_template
from daemon.torch_engine.api.tokenizer import load_text_codec
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

DEMO = Path(iserve.demo.__file__).parent / "model"
CODEC = load_text_codec(DEMO)
BOS, END = 0, 1


def tokens(text: str) -> list[int]:
    """Return one token a byte."""
    ids = CODEC.encode(text, 10_000)
    assert len(ids) == len(text.encode())
    return ids


ANSWERS = {
    (*[BOS] * prompt.startswith("Q"), *tokens(prompt)): [*tokens(reply), END]
    for prompt, reply in {
        "ab": "hello",
        "long": "x" * 1000,
        "euro": "1€ 2€",
        "Q: hi\nA: ": "hello there",
        "Q: fill\nA: ": "y" * 1000,
    }.items()
}


def answer(history: tuple[int, ...]) -> int:
    """The next token of the reply to the prompt that ``history`` begins with, then the end for ever."""
    for prompt, reply in ANSWERS.items():
        if history[: len(prompt)] == prompt:
            return (reply + [END] * len(history))[len(history) - len(prompt)]
    return END


@pytest.fixture
def served(serve):
    return serve(answer)


def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def test_completion(served) -> None:
    done = client(served).completions.create(model="demo", prompt="ab", temperature=0, max_tokens=50)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("hello", "stop")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (2, 6, 8)
    assert (done.object, done.model) == ("text_completion", "demo")


def test_a_text_that_the_tokenizer_fails_on_is_refused_and_never_retried(serve, tmp_path: Path) -> None:
    """The tokenizer's panic is no Exception: it took the connection down, which the gateway takes for a lost
    worker.
    """
    shutil.copytree(DEMO, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    change = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    worker = client(serve(answer, checkpoint=str(tmp_path / "model")))
    with pytest.raises(openai.BadRequestError, match="tokenizer"):
        worker.completions.create(model="demo", prompt="ab")
    with pytest.raises(openai.BadRequestError, match="tokenizer"):
        worker.chat.completions.create(model="demo", messages=[{"role": "user", "content": "ab"}])


def test_completion_defaults_to_16_tokens(served) -> None:
    done = client(served).completions.create(model="demo", prompt="long", temperature=0)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("x" * 16, "length")


def test_chat_defaults_to_the_rest_of_the_context(served) -> None:
    messages = [{"role": "user", "content": "fill"}]
    done = client(served).chat.completions.create(model="demo", messages=messages, temperature=0)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.total_tokens == 128
    assert done.choices[0].message.content == "y" * (128 - done.usage.prompt_tokens)
    assert done.choices[0].message.role == "assistant"


def test_streams(served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(
        client(served).chat.completions.create(
            model="demo", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "hello there"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (10, 12)
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_several_prompts_stream_side_by_side(served) -> None:
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    finishes = []
    for chunk in client(served).completions.create(
        model="demo", prompt=["ab", "euro", "ab"], temperature=0, max_tokens=50, stream=True
    ):
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            finishes.append((chunk.choices[0].index, chunk.choices[0].finish_reason))
    assert texts == {0: "hello", 1: "1€ 2€", 2: "hello"}
    assert sorted(finishes) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_the_wire_format_of_a_stream(served) -> None:
    """Server-sent events, one JSON each, closed by [DONE]; pieces of "€" never show."""
    body = {"prompt": "euro", "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    *frames, rest = response.read().decode().split("\n\n")
    connection.close()
    assert rest == ""
    assert frames[-1] == "data: [DONE]"
    texts = [json.loads(frame.removeprefix("data: "))["choices"][0]["text"] for frame in frames[:-1]]
    assert texts == ["1", "€", " ", "2", "€", ""]


@pytest.mark.parametrize(
    ("stop", "text"),
    [(["lo"], "hel"), (["zz", "ell"], "h"), ("hello", ""), (["o there"], "hello"), (["l", "e"], "h")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_met_across_tokens_and_cut(served, stop: Any, text: str, stream: bool) -> None:
    done = client(served).completions.create(
        model="demo", prompt="ab", stop=stop, temperature=0, max_tokens=50, stream=stream
    )
    choices = [chunk.choices[0] for chunk in done] if stream else [done.choices[0]]
    assert "".join(choice.text for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    served.until(lambda stats: stats["running"] == 0)


@pytest.mark.parametrize(("min_tokens", "text"), [(4, "hel"), (5, "hello")])
def test_a_stop_string_before_min_tokens_does_not_count(served, min_tokens: int, text: str) -> None:
    """The third and fourth characters are "l", and "lo" is complete with the fifth token."""
    done = client(served).completions.create(
        model="demo", prompt="ab", stop=["l", "lo"], temperature=0, extra_body={"min_tokens": min_tokens}
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text, "stop")


def test_extras_that_vllm_has(served) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    done = client(served).completions.create(
        model="demo", prompt="ab", temperature=0, max_tokens=8, extra_body=extra
    )
    assert done.choices[0].finish_reason == "length"
    assert done.choices[0].token_ids == [*tokens("hello"), END, END, END]
    extra = {"stop_token_ids": tokens("l")}
    done = client(served).completions.create(model="demo", prompt="ab", temperature=0, extra_body=extra)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("he", "stop")


def test_token_ids_as_prompts(served) -> None:
    ids = tokens("ab")
    for prompt, count in ((ids, 1), ([ids, ids], 2)):
        done = client(served).completions.create(model="demo", prompt=prompt, temperature=0)
        assert [choice.text for choice in done.choices] == ["hello"] * count


def test_who_leaves_frees_the_slot(serve) -> None:
    """Both a stream and a plain request; and what waited for the slot then runs."""
    gate = threading.Semaphore(0)
    served = serve(answer, prepare=lambda runner: setattr(runner, "gate", gate))
    connections = []
    for stream in (True, False):
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S
        )
        body = json.dumps({"prompt": ["long", "long"], "max_tokens": 100, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connections.append(connection)
        there = 2 * len(connections)
        served.until(lambda stats, there=there: stats["running"] + stats["waiting"] == there)
    gate.release(2)
    served.until(lambda stats: stats["running"] == 4)
    for connection in connections:
        connection.close()
    gate.release(1)
    served.until(lambda stats: stats["running"] == stats["waiting"] == 0)
    gate.release(1000)
    assert client(served).completions.create(model="demo", prompt="ab", temperature=0).choices[0].text == "hello"
    metrics = metric_values(served)
    assert metrics["iserve_worker_requests_total", "completions", "cancelled"] == 2


def metric_values(served) -> dict[tuple[str, ...], float]:
    connection = http.client.HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items(), reverse=True))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_and_stats_agree(served) -> None:
    client(served).completions.create(model="demo", prompt="ab", temperature=0)
    metrics = metric_values(served)
    status, stats = served.request("GET", "/stats")
    assert status == 200
    assert stats["busy"] == [{"device_id": "cpu:0", "busy_s": pytest.approx(6 * 0.25)}]
    assert metrics["iserve_worker_busy_seconds_total", "cpu:0"] == pytest.approx(1.5)
    assert metrics["iserve_worker_prompt_tokens_total",] == stats["prompt_tokens"] == 2
    assert metrics["iserve_worker_output_tokens_total",] == stats["output_tokens"] == 6
    assert metrics["iserve_worker_ttft_seconds_count",] == 1
    assert metrics["iserve_worker_requests_total", "completions", "ok"] == 1
    assert metrics["iserve_worker_memory_bytes", "0", "kv"] == stats["memory"][0]["kv_bytes"] == 2
    assert (stats["kv_tokens_total"], stats["kv_tokens_free"]) == (512, 512)


def test_models_and_health(served) -> None:
    assert [(m.id, m.max_model_len) for m in client(served).models.list()] == [("demo", 128)]
    assert served.request("GET", "/health") == (200, {"status": "ok"})


@pytest.mark.slow
def test_errors_as_the_official_client_sees_them(served) -> None:
    api = client(served)
    with pytest.raises(openai.NotFoundError) as unknown:
        api.completions.create(model="other", prompt="ab")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model="demo", prompt="z" * 200)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert "128" in long.value.message
    assert "200" in long.value.message
    with pytest.raises(openai.BadRequestError) as much:
        api.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=119)
    for endless in (
        lambda: api.completions.create(model="demo", prompt="z" * 2**20),
        lambda: api.chat.completions.create(model="demo", messages=[{"role": "user", "content": "z" * 2**20}]),
        lambda: api.completions.create(model="demo", prompt=[0] * 2**18),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            endless()
        assert refused.value.code == "context_length_exceeded"
    assert much.value.code == "context_length_exceeded"
    assert "129" in much.value.message
    with pytest.raises(openai.BadRequestError) as many:
        api.completions.create(model="demo", prompt="ab", n=2)
    assert many.value.param == "n"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/v1/completions", b"{", {}, 400),
        ("POST", "/v1/completions", {"prompt": [258]}, {}, 400),
        ("POST", "/v1/completions", {"prompt": [-1]}, {}, 400),
        ("POST", "/v1/completions", {"prompt": [[]]}, {}, 400),
        ("POST", "/v1/completions", {"prompt": "a"}, {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/completions", {"prompt": "a"}, {"Content-Length": str(2**26)}, 413),
        ("GET", "/v1/completions", None, {}, 405),
        ("GET", "/v1/nothing", None, {}, 404),
        ("POST", "/profile/run", {}, {}, 404),
    ],
)
def test_refusals(served, method: str, path: str, body: Any, headers: dict, status: int, golden: Golden) -> None:
    got, document = served.request(method, path, body, headers)
    assert got == status
    golden("daemon", document["error"]["message"])
    assert set(document["error"]) == {"message", "type", "param", "code"}


@pytest.mark.slow
def test_others_are_answered_while_a_chat_template_runs_without_end(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A checkpoint brings its template; health, stats and prompts do not wait for it, and it is given up."""
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1)
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO, checkpoint)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (checkpoint / "chat_template.jinja").write_text(loops)
    served = serve(answer, checkpoint=str(checkpoint))
    with ThreadPoolExecutor(1) as pool:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        endless = pool.submit(served.request, "POST", "/v1/chat/completions", chat)
        while not served.worker.codec._template._one_at_a_time.locked():
            assert not endless.done()
        assert served.request("GET", "/health") == (200, {"status": "ok"})
        done = client(served).completions.create(model="demo", prompt="ab", temperature=0)
        assert done.choices[0].text == "hello"
        assert not endless.done()
        status, document = endless.result()
    assert status == 400
    golden("daemon", document["error"]["message"])


def test_a_body_of_no_type_is_refused_as_by_the_gateway(served) -> None:
    """A web page may send one anywhere, unasked."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "ab"}))
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_beyond_the_limit_is_cut_off(served) -> None:
    """The limit holds also when the length is not given beforehand."""
    connection = http.client.HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]), timeout=PATIENCE_S)
    pieces = (b"x" * 2**20 for _ in range(33))
    connection.request(
        "POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_a_full_queue_is_429(serve) -> None:
    gate = threading.Semaphore(0)
    served = serve(answer, prepare=lambda runner: setattr(runner, "gate", gate))
    room = 512 + 4
    bodies = [{"prompt": ["ab"] * n, "max_tokens": 1} for n in (128, 128, 128, 128, 4)]
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(served.request, "POST", "/v1/completions", body) for body in bodies]
        served.until(lambda stats: stats["running"] + stats["waiting"] == room)
        status, document = served.request("POST", "/v1/completions", {"prompt": "ab"})
        assert (status, document["error"]["type"]) == (429, "rate_limit_error")
        gate.release(10_000)
        assert {future.result()[0] for future in waiting} == {200}


def test_a_failing_engine_ends_streams_in_an_error_frame(serve) -> None:
    served = serve(answer, prepare=lambda runner: setattr(runner, "fail_at_step", 3))
    stream = client(served).completions.create(model="demo", prompt="long", stream=True, max_tokens=50)
    assert [next(stream).choices[0].text for _ in range(3)] == ["x"] * 3
    with pytest.raises(openai.APIError, match="rank 1 is gone"):
        next(stream)
    assert served.request("GET", "/health") == (503, {"status": "failed", "error": "rank 1 is gone"})
    status, document = served.request("POST", "/v1/completions", {"prompt": "ab"})
    assert (status, document["error"]["code"]) == (503, "unavailable")
    assert len(served.failures) == 1


def test_a_failure_before_the_first_token_has_a_status(serve) -> None:
    served = serve(answer, prepare=lambda runner: setattr(runner, "fail_at_step", 0))
    with pytest.raises(openai.InternalServerError, match="rank 1 is gone"):
        client(served).completions.create(model="demo", prompt="ab", stream=True)


def test_draining_refuses_and_finishes(serve) -> None:
    gate = threading.Semaphore(0)
    served = serve(answer, prepare=lambda runner: setattr(runner, "gate", gate))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.request, "POST", "/v1/completions", {"prompt": "ab", "temperature": 0})
        served.until(lambda stats: stats["running"] + stats["waiting"] == 1)
        served.worker.engine.begin_drain()
        assert served.request("GET", "/health") == (503, {"status": "draining"})
        status, document = served.request("POST", "/v1/completions", {"prompt": "ab"})
        assert (status, document["error"]["type"]) == (503, "service_unavailable_error")
        gate.release(100)
        assert running.result()[1]["choices"][0]["text"] == "hello"


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(serve, tmp_path) -> None:
    served = serve(lambda history: 5, checkpoint=str(tmp_path))
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True, "temperature": 0}
    status, document = served.request("POST", "/v1/completions", body)
    assert status == 200
    assert (document["choices"][0]["token_ids"], document["choices"][0]["text"]) == ([5] * 4, "")
    for path, text in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, document = served.request("POST", path, text)
        assert status == 400
        assert "no tokenizer" in document["error"]["message"]


def test_a_burst_of_clients_each_get_their_answer(served) -> None:
    """More at once than slots, mixed streams and plain requests."""

    def ask(number: int) -> str:
        if number % 2:
            chunks = client(served).completions.create(
                model="demo", prompt="euro", temperature=0, max_tokens=30, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in chunks)
        return client(served).completions.create(model="demo", prompt="ab", temperature=0).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(24))) == ["hello", "1€ 2€"] * 12
