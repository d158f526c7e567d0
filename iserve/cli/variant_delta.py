"""``variant compress`` and ``export``: full fine-tunes as deltas of their base, and deltas as ordinary models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o
from iserve.cli.variant import BASE_HELP, OUT_HELP, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iserve.cli.progress import StepDisplay
    from iserve.delta_loss import JudgementDocument
    from iserve.deltas import CompressDocument, CompressOptions, ExportDocument

__all__ = [
    "CalibrationOption",
    "DeviceOption",
    "FormatOption",
    "MaxErrorOption",
    "MaxLossOption",
    "TextOption",
    "exported_lines",
    "loss_lines",
    "options_of",
    "register",
    "show_units",
]

BaseArgument = Annotated[str, typer.Argument(metavar="BASE", help=BASE_HELP, callback=o.not_empty)]
OutArgument = Annotated[str, typer.Argument(metavar="OUT", help=OUT_HELP, callback=o.not_empty)]


def register(variant: typer.Typer) -> None:
    variant.command(
        "compress",
        epilog="Example: iserve variant compress iserve-demo ./my-model ./my-delta",
    )(compress)
    variant.command("export", epilog="Example: iserve variant export iserve-demo ./my-delta ./my-model")(export)


def _known_format(name: str) -> str:
    from fingerprint.delta import FORMATS

    if name not in FORMATS:
        raise typer.BadParameter(f"{name[:40]!r} is none of {', '.join(FORMATS)}")
    return name


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter("must be above 0 and below 1")
    return value


def _loss(value: float | None) -> float | None:
    if value is not None and not 0 <= value < float("inf"):
        raise typer.BadParameter("must be 0 or more nats per token")
    return value


def _device(name: str) -> str:
    from daemon.variants.device_names import gpu_number
    from fingerprint.errors import ConfigError

    try:
        gpu_number(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return name


FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Form of the changes of linears: int1, int2, int3, int4, sparse24-int4 or sparse24-int2.",
        callback=_known_format,
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Texts like those that the fine-tune serves: paragraphs, or a .jsonl file as `iserve quality` "
        "reads it. Random tokens without.",
    ),
]
MaxErrorOption = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        metavar="SHARE",
        help="Give a matrix more bits while the relative squared error of its outputs is above this.",
        callback=_share,
    ),
]
MaxLossOption = Annotated[
    float | None,
    typer.Option(
        "--max-quality-loss",
        metavar="NATS",
        help="Try formats, from --format on to finer ones, until the rise of the negative log-likelihood per "
        "token over the fine-tune's is at most this, by the upper end of its interval. Each fourth text of "
        "--calibration is kept out of it to measure that.",
        callback=_loss,
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Texts to measure the loss on instead, none of them in --calibration.",
    ),
]


DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where a compression computes: cpu, or cuda:N, the N-th GPU, which must have the memory free.",
        callback=_device,
    ),
]


def options_of(
    format_: str,
    calibration: Path | None,
    max_error: float | None,
    max_quality_loss: float | None,
    text: Path | None,
    device: str,
) -> CompressOptions:
    """Return the options of a delta; those that need each other are refused alone."""
    from iserve.deltas import CompressOptions

    if max_quality_loss is None and text is not None:
        raise typer.BadParameter("is measured for --max-quality-loss; give both", param_hint="'--text'")
    if max_quality_loss is not None and text is None and calibration is None:
        raise typer.BadParameter(
            "is measured on texts; give --calibration or --text as well", param_hint="'--max-quality-loss'"
        )
    return CompressOptions(
        format_name=format_,
        calibration=calibration,
        max_error=max_error,
        max_quality_loss=max_quality_loss,
        text=text,
        device=device,
    )


def compress(
    base: BaseArgument,
    finetuned: Annotated[
        str,
        typer.Argument(
            metavar="FINETUNED",
            help="A full fine-tune of BASE, named alike, or the folder of a PEFT adapter, which is merged first.",
            callback=o.not_empty,
        ),
    ],
    out: OutArgument,
    format_: FormatOption = "int2",
    calibration: CalibrationOption = None,
    max_error: MaxErrorOption = None,
    max_quality_loss: MaxLossOption = None,
    text: TextOption = None,
    device: DeviceOption = "cpu",
    as_json: o.JsonOption = False,
) -> None:
    """Write the changes that FINETUNED made to BASE to OUT, in a few bits a weight.

    Layer by layer: each is compressed for the inputs that the layers before it make once they are
    reconstructed. Killed at any moment, the same command goes on with the layers that are done.
    """
    from iserve.cli.connection import registered_models
    from iserve.cli.progress import StepDisplay
    from iserve.deltas import compress_variant
    from iserve.settings import load_settings

    options = options_of(format_, calibration, max_error, max_quality_loss, text, device)
    settings = load_settings()
    registered = {**registered_models(base, settings), **registered_models(finetuned, settings)}
    with StepDisplay(quiet=as_json) as display:
        done = compress_variant(
            base,
            finetuned,
            out,
            registered,
            options,
            lambda what, at, total: show_units(display, "compressing", what, at, total),
        )
    if as_json:
        o.print_json(done)
        return
    for line in _compressed_lines(done, base):
        typer.echo(line)


def export(
    base: BaseArgument,
    delta: Annotated[
        str,
        typer.Argument(metavar="DELTA", help="Folder that `iserve variant compress` wrote.", callback=o.not_empty),
    ],
    out: OutArgument,
    as_json: o.JsonOption = False,
) -> None:
    """Write BASE with the changes in DELTA added to it to OUT, for `deploy` and for any engine.

    OUT has the files, names and types of BASE and appears when it is complete. BASE must be the model that DELTA
    was made of.
    """
    from iserve.cli.connection import registered_models
    from iserve.cli.progress import StepDisplay
    from iserve.deltas import export_variant
    from iserve.settings import load_settings

    registered = registered_models(base, load_settings())
    with StepDisplay(quiet=as_json) as display:

        def show(done_bytes: int, total_bytes: int) -> None:
            show_units(display, "exporting", "MiB", done_bytes >> 20, total_bytes >> 20)

        done = export_variant(base, delta, out, registered, show)
    if as_json:
        o.print_json(done)
    else:
        typer.echo("\n".join(exported_lines(done)))


def show_units(display: StepDisplay, step: str, what: str, done: int, total: int) -> None:
    from iserve.api_documents import ProgressDocument

    display.show(step, ProgressDocument(step=what, done=done, total=total, elapsed_s=0.0))


def _compressed_lines(done: CompressDocument, base: str) -> Iterator[str]:
    from iserve.deltas import formats_of

    ratio = done.finetuned_bytes / done.size_bytes
    yield f"{done.folder}: {size_text(done.size_bytes)}, the fine-tune has {ratio:.1f} times as much"
    if not done.matrices:
        kept = f"{done.num_exact} norms and biases differ" if done.num_exact else "no tensor differs"
        yield f"no matrix differs from {done.base}; {kept}"
    else:
        errors = sorted(each.error for each in done.matrices)
        yield (
            f"matrices    {formats_of(done)}; {done.num_exact} norms and biases as they are, {done.num_unchanged} "
            "tensors unchanged"
        )
        middle, most = errors[len(errors) // 2], errors[-1]
        yield f"error       {middle:.3g} in the median, {most:.3g} at most, of what they add to outputs"
        if done.num_above:
            yield f"            {done.num_above} are above the error that was asked for, in the finest format"
    if done.judgement is not None:
        yield from loss_lines(done.judgement)
    if done.is_random:
        yield "calibration random tokens; --calibration FILE, with texts that it serves, loses less"
    words = ("iserve", "variant", "export", base, done.folder, "MODEL")
    yield f"export it: {shlex.join(words)}"


def loss_lines(judgement: JudgementDocument) -> Iterator[str]:
    """Yield what was measured, and what each format lost."""
    from iserve.delta_loss import loss_words

    which = "each fourth text of --calibration" if judgement.is_split else "the texts of --text"
    left_out = f", {judgement.num_left_out} left out" if judgement.num_left_out else ""
    yield (
        f"judged by   {judgement.num_texts} texts, {judgement.num_tokens:,} tokens: {which}{left_out}; loss in "
        "nats per token, 95% interval"
    )
    for trial in judgement.trials:
        verdict = "kept" if trial.is_kept else "refused"
        yield (
            f"{trial.format:<12}{loss_words(trial.loss)}, KL {trial.kl.value:.4f}, top-1 agreement "
            f"{trial.top1_agreement.value:.1%}, {size_text(trial.size_bytes)}: {verdict}"
        )


def exported_lines(done: ExportDocument) -> Iterator[str]:
    files = "file" if done.num_files == 1 else "files"
    yield (
        f"{done.folder}: {done.base} with {done.delta} added to {done.num_changed} of its {done.num_tensors} "
        f"tensors, {size_text(done.size_bytes)} in {done.num_files} {files}"
    )
    yield f"deploy it: iserve deploy {shlex.quote(done.folder)}"
