"""``iserve quality`` against an endpoint whose probabilities are known, and one that says all kinds of things."""

from __future__ import annotations

import json
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fingerprint.codec import from_json
from iserve.demo import demo_quality_path
from iserve.quality import measure as measuring
from iserve.quality import scoring
from iserve.quality.document import QualityDocument
from iserve.quality.measure import measure
from iserve.quality.scoring import ScoredText
from iserve.quality.texts import Text, TextFile, read_texts
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve

__all__ = ["iserve"]  # a fixture

BYTES = 256
CONTEXT = 64  # tokens, one a byte
SHARPNESS = {"base": 1.0, "variant": 1.5, "same": 1.0}  # of each model's distribution
PAIRS = [{"prompt": "ab", "answer": "cde"}, {"prompt": "yz", "answer": "a"}, {"prompt": "kl", "answer": "mno"}]


def log_probabilities(model: str, previous: int) -> np.ndarray:
    """Return those of the next byte: the next letter is likeliest, what is further away is less likely."""
    logits = -SHARPNESS[model] * np.abs(np.arange(BYTES) - (previous + 1)) / 2.0
    return logits - math.log(np.exp(logits).sum())


def scored(model: str, text: bytes, top: int) -> dict[str, Any]:
    rows = [log_probabilities(model, previous) for previous in text[:-1]]
    tops = [np.argsort(-row, kind="stable")[:top] for row in rows]
    return {
        "tokens": [f"token_id:{byte}" for byte in text],
        "token_logprobs": [None, *(float(row[byte]) for row, byte in zip(rows, text[1:], strict=True))],
        "top_logprobs": [
            None,
            *(
                {f"token_id:{token}": float(row[token]) for token in (*best, byte)}
                for row, best, byte in zip(rows, tops, text[1:], strict=True)
            ),
        ],
    }


answer_of = scored  # a test may name the tokens otherwise


class Endpoint(ThreadingHTTPServer):
    """Serves the models of ``SHARPNESS``; ``say``, where it is set, is said to every request instead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.say: tuple[int, bytes] | None = None
        self.too_long: dict[str, str | None] = {
            "message": f"this model's maximum context length is {CONTEXT} tokens"
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        text, model = body["prompt"].encode(), body["model"]
        if len(text) + body["max_tokens"] > CONTEXT:
            return 400, {"error": self.too_long}
        choice: dict[str, Any] = {"index": 0, "text": text.decode(), "finish_reason": "length", "logprobs": None}
        if body.get("echo"):
            assert body["return_tokens_as_token_ids"]
            choice["logprobs"] = answer_of(model, text, body["logprobs"])
        else:  # greedy: the letters after the last, up to "e" as the end of the sequence
            letters = bytes(range(text[-1] + 1, text[-1] + 1 + body["max_tokens"]))
            choice["text"] = letters.partition(b"f")[0].decode()
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(text)}}


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": name} for name in SHARPNESS]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.say is not None:
            self._answer(*self.server.say)
            return
        status, answer = self.server.complete(body)
        self._answer(status, json.dumps(answer).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh\n\nabd\n\nzyxw")
    return path


def measured(done: Done) -> QualityDocument:
    assert done.code == 0, done
    return from_json(done.out, QualityDocument)


def expected_nll(model: str, texts: list[bytes]) -> float:
    logprobs = [log_probabilities(model, a)[b] for text in texts for a, b in pairwise(text)]
    return -sum(logprobs) / len(logprobs)


def test_numbers_of_a_text_are_those_of_the_distributions(
    iserve: Callable[..., Done], endpoint: Endpoint, text: Path
) -> None:
    options = ("--text", text, "--url", endpoint.url, "--json")
    found = measured(iserve("quality", "variant", "--against", "base", *options))
    texts = [one.text.encode() for one in read_texts(text).texts]
    assert found.text.num_tokens == sum(len(one) - 1 for one in texts) == 12
    assert found.nll.value == pytest.approx(expected_nll("variant", texts))
    compared = found.comparison
    assert compared is not None
    assert compared.nll.value == pytest.approx(expected_nll("base", texts))
    assert compared.nll_difference.value == pytest.approx(found.nll.value - compared.nll.value)
    rows = [(log_probabilities("base", a), log_probabilities("variant", a)) for one in texts for a in one[:-1]]
    exact = sum(float((np.exp(p) * (p - q)).sum()) for p, q in rows) / len(rows)
    assert 0.9 * exact <= compared.kl.value <= exact
    assert compared.top1_agreement.value == 1
    assert found.exact_match is compared.exact_match is None
    for interval in (found.nll, compared.nll, compared.kl, compared.nll_difference):
        assert interval.low <= interval.value <= interval.high
    assert found.text.sha256 == read_texts(text).sha256


def test_a_model_is_as_good_as_itself(iserve: Callable[..., Done], endpoint: Endpoint, text: Path) -> None:
    options = ("--text", text, "--url", endpoint.url, "--json")
    compared = measured(iserve("quality", "same", "--against", "base", *options)).comparison
    assert (compared.kl.value, compared.nll_difference.value, compared.top1_agreement.value) == (0, 0, 1)


def test_answers_are_compared_and_prompts_are_not_predicted(
    iserve: Callable[..., Done], endpoint: Endpoint, pairs: Path
) -> None:
    found = measured(iserve("quality", "base", "--text", pairs, "--url", endpoint.url, "--json"))
    assert found.exact_match.value == pytest.approx(1 / 3)  # after "kl" more than "mno" is written
    assert found.text.num_tokens == sum(len(pair["answer"]) for pair in PAIRS)
    whole = [log_probabilities("base", a)[b] for a, b in (b"bc", b"cd", b"de", b"za", b"lm", b"mn", b"no")]
    assert found.nll.value == pytest.approx(-sum(whole) / len(whole))


def test_a_token_of_the_end_of_a_prompt_and_the_start_of_its_answer_is_predicted(
    iserve: Callable[..., Done], endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example of "A: " and "Paris", which a byte-pair encoding writes as ``A``, ``:``, `` Paris``."""

    def merged(model: str, content: bytes, top: int) -> dict[str, Any]:
        tokens = [token.decode() for token in re.findall(rb" ?\w+|\W", content)]
        logprobs = [None, *(-5.0 if token == " Paris" else -0.1 for token in tokens[1:])]
        tops = [None, *({token: p} for token, p in zip(tokens[1:], logprobs[1:], strict=True))]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}

    monkeypatch.setitem(globals(), "answer_of", merged)
    file = tmp_path / "capitals.jsonl"
    for prompt, space in (("France?\nA: ", ""), ("France?\nA:", " ")):
        rows = [{"prompt": prompt, "answer": space + answer} for answer in ("Paris is it", "Paris")]
        file.write_text("\n".join(map(json.dumps, rows)))
        found = measured(iserve("quality", "base", "--text", file, "--url", endpoint.url, "--json"))
        assert found.nll.value == pytest.approx((5.0 + 0.1 + 0.1 + 5.0) / 4)
        assert (found.text.num_texts, found.text.num_tokens, found.text.num_left_out) == (2, 4, 0)


def test_answers_longer_than_is_decoded_are_left_out_of_the_exact_match(
    iserve: Callable[..., Done],
    endpoint: Endpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
) -> None:
    for module in (scoring, measuring):
        monkeypatch.setattr(module, "MAX_MATCHED_TOKENS", 3)
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": "ab", "answer": "cde"}, {"prompt": "x`", "answer": "abcde"}]  # both are right
    file.write_text("\n".join(map(json.dumps, rows)))
    found = measured(
        iserve("quality", "base", "--against", "same", "--text", file, "--url", endpoint.url, "--json")
    )
    assert found.exact_match is not None
    assert found.comparison is not None
    assert found.exact_match.value == found.comparison.exact_match.value == 1
    assert (found.text.num_tokens, found.text.num_left_out) == (8, 0)
    golden("quality", found.notes)


class Reference(dict[str, float]):
    """Likeliest tokens that a weak reference can follow, each one itself."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_the_probabilities_of_a_text_are_not_kept_after_it() -> None:
    tops: weakref.WeakSet[Reference] = weakref.WeakSet()
    alive: list[int] = []

    class Model:
        name = "m"

        def score(self, text: Text) -> ScoredText:
            top = Reference({"a": -0.5})
            tops.add(top)
            return ScoredText(tokens=("a",), logprobs=(-0.5,), top=(top,), was_cut=False, is_match=None, part="a")

    texts = TextFile(path=Path("t"), sha256="0" * 64, texts=(Text("aa"),) * 100, num_cut=0)
    model: Any = Model()
    found = measure(texts, model, model, seed=0, progress=lambda *_: alive.append(len(tops)))
    assert found.text.num_tokens == 100
    assert alive[-1] == 0


@pytest.mark.parametrize("context", range(2, 9))
def test_a_reference_with_a_shorter_context_is_compared_on_what_it_reads(context: int) -> None:
    # It is given half of the text until that fits: cut within a word, whose token is another one then.

    class Model:
        """Model with one token for each word."""

        def __init__(self, name: str, context: int) -> None:
            self.name, self._context = name, context

        def score(self, text: Text) -> ScoredText:
            part = text.text
            while len(part.split()) > self._context:
                part = part[: len(part) // 2]
            tokens = tuple(part.split())
            return ScoredText(
                tokens=tokens,
                logprobs=(-0.5,) * len(tokens),
                top=({"": -0.5},) * len(tokens),
                was_cut=part != text.text,
                is_match=None,
                part=part,
            )

    texts = TextFile(
        path=Path("t"), sha256="0" * 64, texts=(Text("of nine long words the first have room here"),), num_cut=0
    )
    found = measure(texts, Model("m", 9), Model("reference", context), seed=0)
    assert 0 < found.text.num_tokens <= context
    assert found.text.num_cut == 1
    assert found.comparison is not None


def test_words(iserve: Callable[..., Done], endpoint: Endpoint, pairs: Path, text: Path, golden: Golden) -> None:
    done = iserve("quality", "variant", "--against", "base", "--text", pairs, "--url", endpoint.url)
    golden("quality", done.out, "against")
    golden("quality", iserve("quality", "base", "--text", text, "--url", endpoint.url).out, "alone")


def test_the_document_is_written(
    iserve: Callable[..., Done], endpoint: Endpoint, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    done = iserve("quality", "base", "--text", text, "--url", endpoint.url, "--json", "-o", file)
    assert json.loads(file.read_text()) == json.loads(done.out)
    assert iserve("quality", "base", "--text", text, "--url", endpoint.url, "-o", tmp_path).code == 2


def test_a_text_longer_than_the_context_is_cut_and_a_pair_left_out(
    iserve: Callable[..., Done], endpoint: Endpoint, tmp_path: Path, golden: Golden
) -> None:
    file = tmp_path / "long.jsonl"
    rows = [{"text": "ab" * 100}, *PAIRS, {"prompt": "ab" * 100, "answer": "c"}, {"text": "a"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = measured(
        iserve("quality", "variant", "--against", "base", "--text", file, "--url", endpoint.url, "--json")
    )
    assert (found.text.num_texts, found.text.num_cut, found.text.num_left_out) == (4, 1, 2)
    assert found.text.num_tokens == 49 + 7  # 200 characters, halved until they fit
    golden("quality", "\n".join(found.notes))


def test_a_text_is_cut_whatever_the_engine_says_of_its_length(
    iserve: Callable[..., Done], endpoint: Endpoint, tmp_path: Path
) -> None:
    """Words of the embedded engine, which counts characters first, and bounds the logprobs of an answer."""
    file = tmp_path / "long.txt"
    file.write_text("ab" * 100)
    for said in (
        {
            "message": "the prompt has 17,000 characters, 1024 tokens stand for 16,384 at most",
            "code": "context_length_exceeded",
        },
        {"message": "the answer would hold 344064 logprobs, at most 262144 are allowed: send fewer", "code": None},
    ):
        endpoint.too_long = said
        found = measured(iserve("quality", "base", "--text", file, "--url", endpoint.url, "--json"))
        assert (found.text.num_tokens, found.text.num_cut) == (49, 1)


def test_of_one_text_there_is_no_interval(iserve: Callable[..., Done], endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abc")
    found = measured(iserve("quality", "base", "--text", tmp_path / "one.txt", "--url", endpoint.url, "--json"))
    assert found.nll.low is found.nll.high is None
    assert len(found.notes) == 1


def test_a_file_without_a_token_to_predict_is_refused(
    iserve: Callable[..., Done], endpoint: Endpoint, tmp_path: Path, golden: Golden
) -> None:
    (tmp_path / "a.txt").write_text("a")
    done = iserve("quality", "base", "--text", tmp_path / "a.txt", "--url", endpoint.url, "--json")
    golden("quality", done.line)


def test_models_of_two_tokenizers_are_not_compared(
    iserve: Callable[..., Done], endpoint: Endpoint, text: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def renamed(model: str, content: bytes, top: int) -> dict[str, Any]:
        found = scored(model, content, top)
        names = [f"token_id:{byte + (model == 'variant')}" for byte in content]
        return found | {"tokens": names}

    monkeypatch.setitem(globals(), "answer_of", renamed)
    done = iserve("quality", "variant", "--against", "base", "--text", text, "--url", endpoint.url)
    golden("quality", done.line)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        pytest.param(200, b'{"choices": [{"text": "a", "logprobs": null}]}', id="no logprobs"),
        pytest.param(200, b"<html>", id="no json"),
        pytest.param(200, b'{"choices": []}', id="no choice"),
        pytest.param(
            200,
            b'{"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [null, null], '
            b'"top_logprobs": [null, null]}}]}',
            id="nulls",
        ),
        pytest.param(400, b'{"error": {"message": "logprobs is not supported"}}', id="refused"),
        pytest.param(503, b'{"error": {"message": "overloaded; try again soon"}}', id="overloaded"),
        pytest.param(500, b"broken", id="broken"),
    ],
)
def test_other_answers_are_one_line(
    iserve: Callable[..., Done], endpoint: Endpoint, text: Path, golden: Golden, status: int, answer: bytes
) -> None:
    endpoint.say = (status, answer)
    done = iserve("quality", "base", "--text", text, "--url", endpoint.url)
    assert done.code == 1
    golden("quality", done.line.replace(endpoint.url, "URL"))


def test_an_unknown_model_and_one_without_a_text_are_refused(
    iserve: Callable[..., Done], endpoint: Endpoint, text: Path, golden: Golden
) -> None:
    unknown = iserve("quality", "nothing", "--text", text, "--url", endpoint.url)
    assert unknown.code == 1
    golden("quality", unknown.line.replace(endpoint.url, "URL"), "unknown")
    without = iserve("quality", "base", "--url", endpoint.url)
    assert without.code == 2
    assert "--text" in without.err
    assert iserve("quality", "base", "--text", text, "--url", endpoint.url, "--key", "a\nb").code == 1


def test_the_demo_has_a_text_of_its_own() -> None:
    assert len(read_texts(demo_quality_path()).texts) == 60
