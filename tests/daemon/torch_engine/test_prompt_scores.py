"""Log-probabilities of prompts: the numbers of a softmax, their bounds over HTTP, and those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.torch_engine.api.openai_api import ApiError, parse_completion
from daemon.torch_engine.runtime.scoring import score
from tests.daemon.torch_engine.conftest import VOCAB

TEXT = "Q: 12+30=\nA: 42"


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.integers(0, 25),
    st.integers(0, 39),
)
def test_a_score_is_the_logarithm_of_a_softmax(logits: list[float], top: int, token: int) -> None:
    token %= len(logits)
    row = np.array(logits, np.float32)
    expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    found = score(row.copy(), token, top)
    assert found.logprob == pytest.approx(expected[token], abs=1e-5)
    assert len(found.top) == min(top, len(logits))
    assert [logprob for _, logprob in found.top] == pytest.approx(sorted(expected, reverse=True)[:top], abs=1e-5)
    assert all(logprob == pytest.approx(expected[index], abs=1e-5) for index, logprob in found.top)


def test_a_barred_token_has_a_number_that_json_has() -> None:
    assert score(np.array([0, -np.inf], np.float32), 1, 2).top == ((0, 0.0), (1, -9999.0))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('"logprobs": 3', "logprobs"),
        ('"echo": true', "echo"),
        ('"echo": true, "logprobs": 3', "max_tokens"),
        ('"echo": true, "logprobs": 3, "max_tokens": 4', "max_tokens"),
        ('"echo": true, "logprobs": 3, "max_tokens": 0, "stream": true', "stream"),
        ('"echo": true, "logprobs": 21, "max_tokens": 0', "logprobs"),
        ('"echo": true, "logprobs": -1, "max_tokens": 0', "logprobs"),
        ('"echo": true, "logprobs": true, "max_tokens": 0', "logprobs"),
    ],
)
def test_only_prompts_have_logprobs(body: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_completion(f'{{"prompt": "a", {body}}}'.encode())
    assert (refused.value.status, refused.value.param) == (400, param)


def favours_the_sum(history: tuple[int, ...]) -> list[float]:
    """Return logits that depend on all tokens before."""
    return [float(-abs(token - sum(history) % VOCAB) / 8) for token in range(VOCAB)]


def scored(served: Any, prompt: Any, **body: Any) -> tuple[int, Any]:
    asked = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0} | body
    return served.request("POST", "/v1/completions", asked)


def test_each_token_is_scored_after_those_before_it(serve: Any) -> None:
    served = serve(favours_the_sum)
    prompts = [[5, 9, 33, 7], [64], list(range(20, 60))]
    status, answer = scored(served, prompts, return_tokens_as_token_ids=True)
    assert status == 200
    assert answer["usage"] == {"prompt_tokens": 45, "completion_tokens": 0, "total_tokens": 45}
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in prompt]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        for place in range(1, len(prompt)):
            row = np.array(favours_the_sum(tuple(prompt[:place])), np.float32)
            expected = score(row, prompt[place], 2)
            assert logprobs["token_logprobs"][place] == pytest.approx(expected.logprob, abs=1e-6)
            own = {f"token_id:{prompt[place]}": expected.logprob}
            likeliest = {f"token_id:{token}": logprob for token, logprob in expected.top}
            assert logprobs["top_logprobs"][place] == pytest.approx(own | likeliest, abs=1e-6)


def test_tokens_have_their_text_unless_ids_are_asked_for(serve: Any) -> None:
    _, answer = scored(serve(favours_the_sum), "abc", logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["b"]


def test_an_end_of_sequence_within_a_prompt_is_a_token_as_any(serve: Any) -> None:
    _, answer = scored(serve(favours_the_sum), [5, 1, 1, 9])
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 4


def test_an_answer_of_too_many_logprobs_is_refused(serve: Any) -> None:
    served = serve(favours_the_sum)
    status, answer = scored(served, [[7] * 120] * 128, logprobs=20)
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert not served.runner.plans


def test_a_prompt_beyond_the_context_is_refused(serve: Any) -> None:
    status, answer = scored(serve(favours_the_sum), [7] * 129)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.process
def test_the_scores_are_those_of_transformers(
    launch: Any, spec: Any, http_exchange: Any, demo_checkpoint: Path
) -> None:
    import json

    import torch
    import transformers

    worker = launch(spec(), float32=True)
    worker.wait_ready()
    body = {"prompt": TEXT, "echo": True, "logprobs": 20, "max_tokens": 0, "return_tokens_as_token_ids": True}
    status, raw = http_exchange(worker.url, "POST", "/v1/completions", body)
    assert status == 200
    found = json.loads(raw)["choices"][0]["logprobs"]
    ids = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_checkpoint)
    assert ids == tokenizer(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert found["token_logprobs"][place] == pytest.approx(row[ids[place]].item(), abs=1e-3)
        likeliest = {f"token_id:{int(token)}" for token in row.topk(20).indices}
        assert likeliest <= found["top_logprobs"][place].keys()
        for name, logprob in found["top_logprobs"][place].items():
            assert logprob == pytest.approx(row[int(name.removeprefix("token_id:"))].item(), abs=1e-3)
