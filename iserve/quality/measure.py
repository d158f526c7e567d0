"""Measurement of a served model on texts: each one scored, by a reference as well, and the means of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fingerprint.errors import BadInputError
from iserve.quality.document import ComparisonDocument, Interval, TextFacts
from iserve.quality.metrics import agrees, kl_lower_bound, mean_interval, shared_mass
from iserve.quality.scoring import MAX_MATCHED_TOKENS, ScoredText, Scorer, TooLongError
from iserve.quality.texts import MAX_CHARS, Text, TextFile

__all__ = ["Measurement", "measure"]

_AT_ONCE = 8  # requests of texts
_BOUND = (
    "KL is a lower bound: from the likeliest tokens that both models report, with the rest as one outcome "
    "(merging outcomes never raises a KL divergence)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """Sums over the tokens of one text, of a model against its reference."""

    nll: float  # of the reference
    is_match: bool | None
    kl: float
    shared_mass: float
    num_agreed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Sums over the tokens of one text: its tokens have 20 probabilities each, which are not kept."""

    num_tokens: int
    nll: float
    was_cut: bool
    is_match: bool | None
    has_long_answer: bool
    compared: _Compared | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Numbers of one model on one file."""

    text: TextFacts
    nll: Interval
    exact_match: Interval | None
    comparison: ComparisonDocument | None
    notes: tuple[str, ...]


def measure(
    file: TextFile,
    model: Scorer,
    against: Scorer | None,
    *,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """Score all texts of ``file``.

    Raises:
        BadInputError: no text has a token that is predicted, or the two models read different tokens.
        EngineError, UnavailableError, NotFoundError: as the models' ``score``.
    """
    found: list[_Sums] = []
    left_out = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for done, sums in enumerate(pool.map(lambda text: _pair(text, model, against), file.texts), 1):
                left_out += sums is None or not sums.num_tokens
                if sums is not None:
                    found.append(sums)
                progress(done, len(file.texts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    predicted = [sums for sums in found if sums.num_tokens]
    if not predicted:
        raise BadInputError(
            f"no text of {file.path} has a token to predict: a text needs two, and a prompt with its answer must "
            "fit the context; give a longer text or a shorter prompt"
        )
    counts = [sums.num_tokens for sums in predicted]
    text = TextFacts(
        file=str(file.path),
        sha256=file.sha256,
        num_texts=len(predicted),
        num_tokens=sum(counts),
        num_cut=max(sum(sums.was_cut for sums in predicted), file.num_cut),
        num_left_out=left_out,
    )
    num_long = sum(sums.has_long_answer for sums in found)
    return Measurement(
        text=text,
        nll=mean_interval([sums.nll for sums in predicted], counts, seed=seed),
        exact_match=_exact_match([sums.is_match for sums in found], seed),
        comparison=None if against is None else _comparison(found, seed),
        notes=tuple(_notes(text, num_long, compared=against is not None)),
    )


def _pair(text: Text, model: Scorer, against: Scorer | None) -> _Sums | None:
    """Return sums of a text's scores on the same tokens by both; None where it does not fit."""
    try:
        scored = model.score(text)
        if against is None:
            return _sums(text, scored, None)
        reference = against.score(Text(scored.part) if scored.was_cut else text)
        if reference.was_cut and reference.part != scored.part:  # its context is shorter: within a word, mostly
            scored = model.score(Text(reference.part))
    except TooLongError:
        return None
    common = min(len(scored.tokens), len(reference.tokens))
    was_cut = scored.was_cut or reference.was_cut
    if scored.tokens[:common] != reference.tokens[:common] or (
        len(scored.tokens) != len(reference.tokens) and not was_cut
    ):
        raise BadInputError(
            f"{model.name!r} and {against.name!r} read {text.whole[:60]!r} as different tokens; compare models of "
            "one tokenizer"
        )
    return _sums(text, scored.first(common), reference.first(common))


def _sums(text: Text, scored: ScoredText, reference: ScoredText | None) -> _Sums:
    return _Sums(
        num_tokens=len(scored.tokens),
        nll=-sum(scored.logprobs),
        was_cut=scored.was_cut or (reference is not None and reference.was_cut),
        is_match=scored.is_match,
        has_long_answer=text.answer is not None and scored.is_match is None,
        compared=None if reference is None else _compared(scored, reference),
    )


def _compared(scored: ScoredText, reference: ScoredText) -> _Compared:
    tops = list(zip(reference.top, scored.top, strict=True))
    return _Compared(
        nll=-sum(reference.logprobs),
        is_match=reference.is_match,
        kl=sum(kl_lower_bound(theirs, mine) for theirs, mine in tops),
        shared_mass=sum(shared_mass(theirs, mine) for theirs, mine in tops),
        num_agreed=sum(agrees(theirs, mine) for theirs, mine in tops),
    )


def _exact_match(matches: Sequence[bool | None], seed: int) -> Interval | None:
    known = [float(match) for match in matches if match is not None]
    return mean_interval(known, [1.0] * len(known), seed=seed) if known else None


def _comparison(found: Sequence[_Sums], seed: int) -> ComparisonDocument:
    pairs = [(sums, sums.compared) for sums in found if sums.compared is not None]
    matches = [compared.is_match for _, compared in pairs]
    pairs = [(sums, compared) for sums, compared in pairs if sums.num_tokens]
    counts = [sums.num_tokens for sums, _ in pairs]

    def mean(of_each: Iterable[float]) -> Interval:
        return mean_interval(list(of_each), counts, seed=seed)

    return ComparisonDocument(
        nll=mean(compared.nll for _, compared in pairs),
        nll_difference=mean(sums.nll - compared.nll for sums, compared in pairs),
        exact_match=_exact_match(matches, seed),
        kl=mean(compared.kl for _, compared in pairs),
        shared_mass=min(1.0, sum(compared.shared_mass for _, compared in pairs) / sum(counts)),
        top1_agreement=mean(compared.num_agreed for _, compared in pairs),
    )


def _notes(text: TextFacts, num_long: int, *, compared: bool) -> Iterator[str]:
    if compared:
        yield _BOUND
    if text.num_cut:
        yield f"texts cut, longer than the context or {MAX_CHARS:,} characters: {text.num_cut} of {text.num_texts}"
    if text.num_left_out:
        yield f"texts left out, of one token or prompts with answers longer than the context: {text.num_left_out}"
    if num_long:
        yield f"answers left out of the exact match, longer than {MAX_MATCHED_TOKENS} tokens: {num_long}"
    if text.num_texts == 1:
        yield "one text has no interval; give several, as paragraphs or lines"
