"""Comparison of trained adapters' answers on two servers."""

from __future__ import annotations

from dataclasses import replace

from iserve.demo.adapter_tasks import ADAPTERS
from tests.bench.variant_contest import DIRECT, OURS
from tests.bench.variant_words import CLIENTS, Turn, VariantWords, questions, rows, table

ASKED = questions(8)


def _turn(side: str, clients: int, *, wrong: int = 0) -> Turn:
    """Answers as trained, and of the base to an adapter's questions its own; the first ``wrong`` are not."""
    texts = ["I do not know." if one.of_adapter else one.answer for one in ASKED]
    texts[:wrong] = [f"{text}!" for text in texts[:wrong]]
    return Turn(side=side, clients=clients, texts=tuple(texts), errors=("",) * len(texts))


def _played(**wrong: int) -> VariantWords:
    turns = [
        _turn(side, clients, wrong=wrong.get(side, 0) if clients == 1 else 0)
        for _ in range(2)
        for side in (DIRECT, OURS)
        for clients in (1, CLIENTS)
    ]
    return VariantWords(date="", machine="", versions="", questions=ASKED, turns=tuple(turns))


def test_every_question_is_asked_once_of_a_model() -> None:
    assert (
        len({(one.model, one.text) for one in ASKED}) == len(ASKED) == 8 * (1 + len(ADAPTERS)) + 4 * len(ADAPTERS)
    )


def test_equal_answers_are_counted_without_what_the_base_never_learned() -> None:
    counted = {what: (same, of) for what, same, of in rows(_played())}
    meant = 8 * (1 + len(ADAPTERS))
    assert counted["iServe against vLLM, one at a time"] == (2 * meant, 2 * meant)
    assert counted["iServe, asked again one at a time"] == (meant, meant)
    assert counted["right answers of iServe"] == (meant, meant)
    assert counted["the base to what adapters were trained for, as they"] == (0, 4 * len(ADAPTERS))


def test_an_answer_that_differs_is_seen() -> None:
    counted = {what: (same, of) for what, same, of in rows(_played(**{OURS: 3}))}
    meant = 8 * (1 + len(ADAPTERS))
    assert counted["iServe against vLLM, one at a time"] == (2 * (meant - 3), 2 * meant)
    assert counted[f"iServe with {CLIENTS} clients against one at a time"] == (2 * (meant - 3), 2 * meant)
    assert counted["right answers of iServe"] == (meant - 3, meant)
    assert counted["right answers of vLLM"] == (meant, meant)


def test_a_base_that_answers_as_its_adapters_shows() -> None:
    played = _played()
    by_question = {(one.model, one.text): one.answer for one in ASKED}
    texts = tuple(by_question[one.of_adapter or one.model, one.text] for one in ASKED)
    same = replace(played, turns=tuple(replace(turn, texts=texts) for turn in played.turns))
    last = table(same).splitlines()[-1]
    assert last.endswith(f"| {4 * len(ADAPTERS)} | {4 * len(ADAPTERS)} |")
