"""Command ``quality``: how well a served model predicts a text, alone or against a reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iserve.quality.document import Interval, ModelFacts, QualityDocument
    from iserve.quality.scoring import Scorer
    from iserve.quality.texts import TextFile

__all__ = ["quality_words", "register"]

_SEED = 0  # of the bootstrap


TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help='Paragraphs, or a .jsonl file with {"prompt": ..., "answer": ...} or {"text": ...} in each line. '
        "The demo model has its own.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        "quality",
        epilog="Example: iserve quality my-variant --against iserve-demo --text questions.jsonl",
    )(quality)


def quality(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A running deployment, or a variant.", callback=o.not_empty)
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="BASE",
            help="The reference, served too; or the folder of one that is loaded here (./my-model).",
            callback=o.not_empty,
        ),
    ] = None,
    text: TextOption = None,
    url: Annotated[
        str | None, typer.Option("--url", help="An OpenAI-compatible endpoint instead of this home's gateway.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="OPENAI_API_KEY", help="An API key, if needed.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the JSON to this file, too.")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep/--no-keep", help="Keep the result in this home, and next to its checkpoint."),
    ] = True,
    as_json: o.JsonOption = False,
) -> None:
    """Measure how well a served MODEL predicts a text, and how far it is from a reference.

    Shows the negative log-likelihood per token and, where texts have answers, the share that MODEL gives exactly;
    with --against also a lower bound of the KL divergence, and the share of tokens where both prefer the same.
    Intervals are bootstrap intervals over the texts. Prompts are sent as they are, without a chat template. MODEL
    is measured through the engine that serves it.
    """
    from fingerprint.output_file import output_file, write_output
    from iserve.quality.texts import read_texts

    with o.usage_errors():
        if output is not None:
            output_file(output)
    texts = read_texts(_text_of(text, model, against))
    document = _measured(model, against, texts, url=url, key=key, quiet=as_json)
    if keep and url is None:
        _keep(document)
    if output is not None:
        from fingerprint.codec import to_json

        write_output(output_file(output), to_json(document, indent=2).decode() + "\n")
    if as_json:
        o.print_json(document)
    else:
        _print(document)


def _keep(document: QualityDocument) -> None:
    """Keep a result in this home, and next to a checkpoint that is the model's own; say why where that fails."""
    from fingerprint.errors import IserveError
    from iserve.cli.connection import client
    from iserve.demo import demo_model_path
    from iserve.quality.document import QualityDocument as Result
    from iserve.quality.kept_file import keep_next_to

    model = document.model
    try:
        client(start=False).post("/api/v1/quality", document, Result)
    except IserveError as error:
        typer.echo(f"not kept in this home: {error}", err=True)
        return
    folder = None if model.checkpoint is None or model.variant_hash is not None else Path(model.checkpoint)
    if folder is None or folder == demo_model_path() or folder.parent.name == "snapshots":  # of the hub's cache
        return
    try:
        keep_next_to(folder, document)
    except IserveError as error:
        typer.echo(f"not kept next to the checkpoint: {error}", err=True)


def _text_of(text: Path | None, model: str, against: str | None) -> Path:
    from iserve.demo import DEMO_MODEL_NAME, demo_quality_path

    if text is not None:
        return text.expanduser()
    if DEMO_MODEL_NAME in (model, against):
        return demo_quality_path()
    raise typer.BadParameter(
        f"missing: {model!r} is measured on a file of paragraphs to predict, or of prompts with answers "
        '(.jsonl, {"prompt": ..., "answer": ...} in each line)',
        param_hint="'--text'",
    )


def _measured(
    model: str, against: str | None, texts: TextFile, *, url: str | None, key: str | None, quiet: bool
) -> QualityDocument:
    from contextlib import ExitStack
    from datetime import UTC, datetime

    from iserve import __version__
    from iserve.api_documents import ProgressDocument
    from iserve.cli.connection import gateway_url
    from iserve.cli.progress import StepDisplay
    from iserve.quality.document import QualityDocument
    from iserve.quality.local import folder_of, local_facts, open_folder
    from iserve.quality.measure import measure
    from iserve.quality.scoring import TOP, ScoredModel
    from iserve.replay.endpoint import check_models, resolve_endpoint

    if url is None:
        endpoint = resolve_endpoint(gateway_url())
    else:
        with o.usage_errors("--url"):
            endpoint = resolve_endpoint(url)
    folder = None if against is None else folder_of(against)
    names = [model] + ([against] if against is not None and folder is None else [])
    scored = [ScoredModel(endpoint, name, key) for name in names]
    check_models(endpoint, names, key)
    facts = [_facts(name, url) for name in names]  # before: what changes meanwhile is then no longer as they say
    facts += [] if folder is None else [local_facts(folder)]
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with ExitStack() as stack:
        display = stack.enter_context(StepDisplay(quiet=quiet))
        reference: Scorer | None = stack.enter_context(open_folder(folder)) if folder else None
        reference = scored[1] if len(scored) > 1 else reference

        def show(done: int, total: int) -> None:
            display.show("scoring", ProgressDocument(step="texts", done=done, total=total, elapsed_s=0.0))

        found = measure(texts, scored[0], reference, seed=_SEED, progress=show)
    return QualityDocument(
        model=facts[0],
        against=None if against is None else facts[1],
        url=endpoint.url,
        started_at=started_at,
        iserve_version=__version__,
        text=found.text,
        nll=found.nll,
        exact_match=found.exact_match,
        comparison=found.comparison,
        top=TOP,
        seed=_SEED,
        notes=found.notes,
    )


def _facts(name: str, url: str | None) -> ModelFacts:
    """Return what this home knows of a model; of another endpoint's its name."""
    from fingerprint.errors import IserveError
    from iserve.cli.connection import client, registered_models
    from iserve.quality.document import ModelFacts
    from iserve.quality.facts import model_facts
    from iserve.settings import load_settings

    if url is not None:
        return ModelFacts(name=name)
    settings = load_settings()
    try:
        return model_facts(name, client(settings, start=False), registered_models("", settings))
    except IserveError:
        return ModelFacts(name=name)


def _print(document: QualityDocument) -> None:
    from iserve.cli.render import console, print_rows

    text, out = document.text, console()
    against = "" if document.against is None else f" against {document.against.name}"
    out.print(f"{document.model.name}{against}: {text.num_tokens:,} tokens of {text.num_texts} texts, {text.file}")
    print_rows(("", "", "95% interval"), list(_rows(document)))
    for note in document.notes:
        out.print(f"note: {note}")


def quality_words(document: QualityDocument) -> str:
    """Return a result in one line."""
    compared, against = document.comparison, document.against
    parts = [f"NLL {_with_interval(document.nll, '{:.3f}')} per token"]
    if document.exact_match is not None:
        parts.append(f"exact match {_with_interval(document.exact_match, '{:.1%}')}")
    if compared is not None and against is not None:
        parts.append(f"against {against.name} {_with_interval(compared.nll_difference, '{:+.3f}')}")
        parts.append(f"KL at least {compared.kl.value:.3f}")
        parts.append(f"top-1 agreement {compared.top1_agreement.value:.1%}")
    engine = document.model.config.engine if document.model.config is not None else "engine not known"
    release = "" if document.model.engine_version is None else f" {document.model.engine_version}"
    when, text = document.started_at[:10], Path(document.text.file).name
    return f"{', '.join(parts)}; {text}, {document.text.sha256[:12]}, {engine}{release}, {when}"


def _with_interval(interval: Interval, form: str) -> str:
    label, value, ends = _row("", interval, form)
    return f"{label}{value}" + (f" ({ends})" if ends else "")


def _rows(document: QualityDocument) -> Iterator[tuple[str, str, str]]:
    compared = document.comparison
    yield _row("NLL per token", document.nll, "{:.4f}")
    if compared is not None and document.against is not None:
        yield _row(f"  of {document.against.name}", compared.nll, "{:.4f}")
        yield _row("  difference", compared.nll_difference, "{:+.4f}")
    if document.exact_match is not None:
        yield _row("exact match", document.exact_match, "{:.1%}")
    if compared is not None and document.against is not None:
        if compared.exact_match is not None:
            yield _row(f"  of {document.against.name}", compared.exact_match, "{:.1%}")
        yield _row("KL divergence, at least", compared.kl, "{:.4f}")
        yield "  on shared tokens", f"{compared.shared_mass:.1%}", ""
        yield _row("top-1 agreement", compared.top1_agreement, "{:.1%}")


def _row(label: str, interval: Interval, form: str) -> tuple[str, str, str]:
    if interval.low is None or interval.high is None:
        return label, form.format(interval.value), ""
    return (
        label,
        form.format(interval.value),
        f"{form.format(interval.low)} to {form.format(interval.high)}",
    )
