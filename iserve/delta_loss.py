"""Loss of a delta against its fine-tune on texts that calibrated nothing: which texts judge, and what they say.

The loss is the rise of the negative log-likelihood per predicted token, base + delta less fine-tune, in nats. What
is compared with a limit is the upper end of its 95% bootstrap interval over the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING

from fingerprint.codec import to_json
from fingerprint.errors import ConfigError, InfeasibleError
from iserve.quality.document import Interval
from iserve.quality.metrics import mean_interval
from iserve.quality.texts import Text, TextFile

if TYPE_CHECKING:
    from daemon.variants.compress import Trial

__all__ = [
    "JudgementDocument",
    "TextsOfBoth",
    "TrialDocument",
    "is_within",
    "judgement_document",
    "loss_words",
    "refuse",
    "split_texts",
]

SEED = 0  # of the bootstrap
_EVERY = 4  # each fourth text judges


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialDocument:
    """Format that was tried."""

    format: str
    """Format of linears; embeddings have 4 bits in each."""
    size_bytes: int
    """Bytes of its delta's folder."""
    loss: Interval
    """Rise of the negative log-likelihood over the fine-tune's, in nats per token."""
    finetuned_nll: float
    """Negative log-likelihood of the fine-tune, in nats per token."""
    kl: Interval
    """KL(fine-tune || base + delta), in nats per token, of whole distributions."""
    top1_agreement: Interval
    """Share of tokens where both find the same token likeliest."""
    is_kept: bool
    """Whether the upper end of its loss is within what was allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgementDocument:
    """Choice of a format by its loss on texts, with 95% bootstrap intervals over the texts."""

    max_quality_loss: float
    """Most that was allowed, in nats per token."""
    file: str
    """File of the texts."""
    sha256: str
    """Hash of the texts that judged."""
    is_split: bool
    """Whether they are each fourth text of the calibration file, the rest of which calibrated."""
    num_texts: int
    """Texts with a token to predict."""
    num_tokens: int
    """Number of predicted tokens."""
    num_left_out: int
    """Texts that were left out: without a token to predict, too long, or beyond 65,536 tokens in all."""
    seed: int
    """Seed of the bootstrap."""
    trials: tuple[TrialDocument, ...]
    """Formats that were tried, in turn; the last one is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextsOfBoth:
    """Texts that calibrate and texts that judge, none of which is the same."""

    calibration: tuple[Text, ...]  # empty: random tokens
    judgement: tuple[Text, ...]
    judgement_file: TextFile
    is_split: bool

    @property
    def calibration_sha256(self) -> str:
        """Hash of the texts that calibrate."""
        return _hash(self.calibration)

    @property
    def judgement_sha256(self) -> str:
        """Hash of the texts that judge."""
        return _hash(self.judgement)


def split_texts(calibration: TextFile | None, judgement: TextFile | None) -> TextsOfBoth:
    """Return which texts calibrate and which judge.

    With a file for each, all of each; of one for calibration alone each fourth text judges, and the rest
    calibrates. A text that a file has twice counts once.

    Raises:
        ConfigError: neither file is given, a text is in both, or there are too few to split.
    """
    if judgement is not None:
        judges, rest = _distinct(judgement), () if calibration is None else _distinct(calibration)
        common = {text.whole for text in judges} & {text.whole for text in rest}
        if common:
            raise ConfigError(
                f"{len(common)} of {len(judges)} texts of {judgement.path} are in the calibration file too, so "
                "that they would not show what is lost; take them out of one file, or give --calibration alone, "
                "of which each fourth text is left for this"
            )
        return TextsOfBoth(calibration=rest, judgement=judges, judgement_file=judgement, is_split=False)
    if calibration is None:
        raise ConfigError("a loss is measured on texts; give --text FILE, or --calibration FILE, which is split")
    texts = _distinct(calibration)
    judges = tuple(islice(texts, _EVERY - 1, None, _EVERY))
    if not judges:
        raise ConfigError(
            f"{calibration.path} has {len(texts)} texts, too few to be split; give --text FILE as well"
        )
    rest = tuple(text for number, text in enumerate(texts, 1) if number % _EVERY)
    return TextsOfBoth(calibration=rest, judgement=judges, judgement_file=calibration, is_split=True)


def _distinct(file: TextFile) -> tuple[Text, ...]:
    return tuple({text.whole: text for text in file.texts}.values())


def _hash(texts: Sequence[Text]) -> str:
    return sha256(to_json([[text.text, text.answer] for text in texts])).hexdigest()


def is_within(trial: Trial, max_quality_loss: float) -> bool:
    """Return whether the upper end of the loss is at most ``max_quality_loss``, nats per token."""
    high = _loss(trial).high
    return high is not None and high <= max_quality_loss


def _loss(trial: Trial) -> Interval:
    return _mean(trial, [text.delta_nll - text.finetuned_nll for text in trial.losses])


def _mean(trial: Trial, sums: Sequence[float]) -> Interval:
    return mean_interval(sums, [text.num_tokens for text in trial.losses], seed=SEED)


def judgement_document(texts: TextsOfBoth, trials: Sequence[Trial], max_quality_loss: float) -> JudgementDocument:
    """Return the document of ``trials``, of which there is at least one."""
    losses = trials[0].losses
    return JudgementDocument(
        max_quality_loss=max_quality_loss,
        file=str(texts.judgement_file.path),
        sha256=texts.judgement_sha256,
        is_split=texts.is_split,
        num_texts=len(losses),
        num_tokens=sum(text.num_tokens for text in losses),
        num_left_out=len(texts.judgement) - len(losses),
        seed=SEED,
        trials=tuple(_trial_document(trial, max_quality_loss) for trial in trials),
    )


def _trial_document(trial: Trial, max_quality_loss: float) -> TrialDocument:
    return TrialDocument(
        format=trial.format,
        size_bytes=trial.num_bytes,
        loss=_loss(trial),
        finetuned_nll=_mean(trial, [text.finetuned_nll for text in trial.losses]).value,
        kl=_mean(trial, [text.kl for text in trial.losses]),
        top1_agreement=_mean(trial, [text.num_agreeing for text in trial.losses]),
        is_kept=is_within(trial, max_quality_loss),
    )


def refuse(document: JudgementDocument) -> InfeasibleError:
    """Return the error where no format that was tried is kept, with what each lost."""
    lost = ", ".join(f"{trial.format} {loss_words(trial.loss)}" for trial in document.trials)
    return InfeasibleError(
        f"no format keeps the loss within {document.max_quality_loss:g} nats per token: {lost} on "
        f"{document.num_tokens:,} tokens of {document.num_texts} texts; allow more (--max-quality-loss), give "
        "more texts like those that it serves, or deploy the fine-tune itself"
    )


def loss_words(loss: Interval) -> str:
    """Return a loss with its interval."""
    return f"{loss.value:+.4f} ({loss.low:+.4f} to {loss.high:+.4f})"
