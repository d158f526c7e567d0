"""Measurement of a served model on texts: each one scored, by a reference as well, and the means of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fingerprint.errors import BadInputError
from iserve.quality.document import ComparisonDocument, Interval, TextFacts
from iserve.quality.metrics import agrees, kl_lower_bound, mean_interval, shared_mass
from iserve.quality.scoring import ScoredModel, ScoredText, TooLongError
from iserve.quality.texts import MAX_CHARS, Text, TextFile

__all__ = ["Measurement", "measure"]

_AT_ONCE = 8  # requests of texts
_BOUND = (
    "KL is a lower bound: from the likeliest tokens that both models report, with the rest as one outcome "
    "(merging outcomes never raises a KL divergence)"
)

Pair = tuple[ScoredText, ScoredText | None]  # by the model, and by its reference


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
    model: ScoredModel,
    against: ScoredModel | None,
    *,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """Score all texts of ``file``.

    Raises:
        BadInputError: no text has a token that is predicted, or the two models read different tokens.
        EngineError, UnavailableError, NotFoundError: as :meth:`ScoredModel.score`.
    """
    pairs: list[Pair] = []
    matches: list[tuple[bool | None, bool | None]] = []
    left_out = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for done, pair in enumerate(pool.map(lambda text: _pair(text, model, against), file.texts), 1):
                if pair is not None:
                    matches.append((pair[0].is_match, None if pair[1] is None else pair[1].is_match))
                if pair is None or not pair[0].tokens:
                    left_out += 1
                else:
                    pairs.append(pair)
                progress(done, len(file.texts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not pairs:
        raise BadInputError(
            f"no text of {file.path} has a token to predict: a text needs two, and a prompt with its answer must "
            "fit the context; give a longer text or a shorter prompt"
        )
    cut = sum(pair[0].was_cut or (pair[1] is not None and pair[1].was_cut) for pair in pairs)
    counts = [len(scored.tokens) for scored, _ in pairs]
    text = TextFacts(
        file=str(file.path),
        sha256=file.sha256,
        num_texts=len(pairs),
        num_tokens=sum(counts),
        num_cut=max(cut, file.num_cut),
        num_left_out=left_out,
    )
    references = [reference for _, reference in pairs if reference is not None]
    scored = [model_text for model_text, _ in pairs]
    return Measurement(
        text=text,
        nll=mean_interval(_nll(scored), counts, seed=seed),
        exact_match=_exact_match([mine for mine, _ in matches], seed),
        comparison=_comparison(scored, references, [other for _, other in matches], seed) if references else None,
        notes=tuple(_notes(text, compared=bool(references))),
    )


def _pair(text: Text, model: ScoredModel, against: ScoredModel | None) -> Pair | None:
    """Return a text's scores on the same tokens by both; None where it does not fit."""
    try:
        scored = model.score(text)
        if against is None:
            return scored, None
        reference = against.score(text)
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
    return scored.first(common), reference.first(common)


def _nll(texts: Sequence[ScoredText]) -> list[float]:
    return [-sum(text.logprobs) for text in texts]


def _exact_match(matches: Sequence[bool | None], seed: int) -> Interval | None:
    known = [float(match) for match in matches if match is not None]
    return mean_interval(known, [1.0] * len(known), seed=seed) if known else None


def _comparison(
    texts: Sequence[ScoredText], references: Sequence[ScoredText], matches: Sequence[bool | None], seed: int
) -> ComparisonDocument:
    counts = [len(text.tokens) for text in texts]
    tops = [list(zip(r.top, t.top, strict=True)) for r, t in zip(references, texts, strict=True)]
    of_model, of_reference = _nll(texts), _nll(references)
    return ComparisonDocument(
        nll=mean_interval(of_reference, counts, seed=seed),
        nll_difference=mean_interval(
            [mine - other for mine, other in zip(of_model, of_reference, strict=True)], counts, seed=seed
        ),
        exact_match=_exact_match(matches, seed),
        kl=mean_interval([sum(kl_lower_bound(r, t) for r, t in top) for top in tops], counts, seed=seed),
        shared_mass=sum(shared_mass(r, t) for top in tops for r, t in top) / sum(counts),
        top1_agreement=mean_interval([sum(agrees(r, t) for r, t in top) for top in tops], counts, seed=seed),
    )


def _notes(text: TextFacts, *, compared: bool) -> Iterator[str]:
    if compared:
        yield _BOUND
    if text.num_cut:
        yield f"texts cut, longer than the context or {MAX_CHARS:,} characters: {text.num_cut} of {text.num_texts}"
    if text.num_left_out:
        yield f"texts left out, of one token or prompts with answers longer than the context: {text.num_left_out}"
    if text.num_texts == 1:
        yield "one text has no interval; give several, as paragraphs or lines"
