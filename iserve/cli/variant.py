"""``variant``: LoRA adapters, the checkpoints they are merged into, and the register of those that are served."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iserve.cli.progress import StepDisplay
    from iserve.variants import AdapterDocument, MergeDocument

__all__ = [
    "BASE_HELP",
    "OUT_HELP",
    "AdapterArgument",
    "RegisteredArgument",
    "merged_lines",
    "register",
    "size_text",
]

BASE_HELP = "The base model: a checkpoint folder, a hub id or a registered name."
OUT_HELP = "Folder to write, new or empty."
_MAX_VALUES = 8  # different ranks or scales that are listed

AdapterArgument = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER", help="Folder of a PEFT adapter, in safetensors files.", callback=o.not_empty
    ),
]


def _known_name(name: str) -> str:
    """Return ``name``. Raises NotFoundError: no variant can have it; in a path it would ask for something else."""
    from fingerprint.errors import ConfigError, NotFoundError
    from iserve.api_types import check_name

    try:
        return check_name(name)
    except ConfigError as error:
        raise NotFoundError(f"no variant is named {name[:80]!r}; `iserve variant ls` lists them") from error


RegisteredArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The variant's name.", callback=_known_name)
]


def register(app: typer.Typer) -> None:
    from iserve.cli import variant_delta, variant_register  # they have their arguments from here

    variant = typer.Typer(
        cls=o.CommandGroup,
        help="Variants of a base model: adapters in PEFT's format, served next to it or merged into it, and "
        "deltas of full fine-tunes.",
        epilog="Example: iserve variant ls",
        no_args_is_help=True,
    )
    variant.command("inspect", epilog="Example: iserve variant inspect ./my-adapter --base iserve-demo")(inspect)
    variant.command("merge", epilog="Example: iserve variant merge iserve-demo ./my-dora ./my-model")(merge)
    variant_delta.register(variant)
    variant_register.register(variant)
    app.add_typer(variant, name="variant")


def inspect(
    adapter: AdapterArgument,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="MODEL", help=BASE_HELP, callback=o.not_empty),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Show an adapter's ranks, matrices and size, and whether it can be merged and served.

    Where it cannot be merged, every reason is listed. The whole adapter is read, of the base the headers only.
    """
    from iserve.cli.connection import registered_models
    from iserve.settings import load_settings
    from iserve.variants import inspect_adapter

    registered = {} if base is None else registered_models(base, load_settings())
    found = inspect_adapter(adapter, base, registered)
    if as_json:
        o.print_json(found)
        return
    for label, text in _lines(found):
        typer.echo(f"{label:<12}{text}")


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help=BASE_HELP, callback=o.not_empty)],
    adapter: AdapterArgument,
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help=f"{OUT_HELP} Two arguments are the NAME of a registered variant, and OUT.",
            callback=o.not_empty,
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Write BASE with the LoRA, DoRA or IA3 in ADAPTER merged into it to OUT, for `deploy`.

    Trained biases, tokens, embeddings and whole modules in ADAPTER are merged too. OUT has the files, names and
    types of BASE and appears when it is complete: interrupted, the same command begins anew. BASE and ADAPTER are
    not changed.
    """
    from iserve.cli.connection import registered_models
    from iserve.cli.progress import StepDisplay
    from iserve.settings import load_settings
    from iserve.variants import merge_variant

    if out is None:  # NAME OUT
        from iserve.cli.variant_merge import merge_named

        merge_named(base, adapter, as_json=as_json)
        return
    registered = registered_models(base, load_settings())
    with StepDisplay(quiet=as_json) as display:
        done = merge_variant(base, adapter, out, registered, lambda at, total: _show(display, at, total))
    if as_json:
        o.print_json(done)
        return
    for line in merged_lines(done):
        typer.echo(line)


def _show(display: StepDisplay, done_bytes: int, total_bytes: int) -> None:
    from iserve.api_documents import ProgressDocument

    mib = ProgressDocument(step="MiB", done=done_bytes >> 20, total=total_bytes >> 20, elapsed_s=0.0)
    display.show("merging", mib)


def merged_lines(done: MergeDocument) -> Iterator[str]:
    yield (
        f"{done.folder}: {done.base} with {done.adapter} merged into {done.num_merged} of its {done.num_tensors} "
        f"tensors, {size_text(done.size_bytes)} in {_count(done.num_files, 'file')}"
    )
    if done.trained_on is not None:
        yield f"the adapter says that it was trained on {done.trained_on}"
    if done.files_not_taken:
        yield f"the base's tokenizer was kept; the adapter has its own {', '.join(done.files_not_taken)}"
    yield f"deploy it: iserve deploy {shlex.quote(done.folder)}"


def _lines(found: AdapterDocument) -> Iterator[tuple[str, str]]:
    trained = "" if found.trained_on is None else f", trained on {found.trained_on}"
    yield "adapter", f"{found.folder}: {found.method}{trained}"
    if found.modules:
        kinds = Counter(module.name.rpartition(".")[2] for module in found.modules)
        yield "matrices", f"{len(found.modules)}: {', '.join(f'{name} {n}' for name, n in sorted(kinds.items()))}"
        yield "rank", _values(module.rank for module in found.modules)
        yield "scale", _values(module.scale for module in found.modules)
    yield (
        "parameters",
        f"{found.num_params:,}, {size_text(found.size_bytes)} of {', '.join(found.dtypes) or 'nothing'}",
    )
    if found.can_merge:
        into = "its base" if found.base is None else found.base
        words = ("iserve", "variant", "merge", found.base or "BASE", found.folder, "OUT")
        yield "merge", f"into {into}: {shlex.join(words)}"
    else:
        yield "merge", "not possible"
    for reason in found.why_not_merged:
        yield "", f"- {reason}"
    if found.can_serve or found.becomes_delta:
        how = "as a delta of" if found.becomes_delta else "next to"
        base = shlex.quote(found.base or "BASE")
        yield "serve", f"{how} its base: iserve variant add NAME --base {base} {shlex.quote(found.folder)}"
    else:
        yield "serve", f"not possible: {found.why_not_served}"
    if found.becomes_delta:
        yield "", f"as an adapter by no engine: {found.why_not_served}"


def _values(values: Iterable[float]) -> str:
    """Return the different values with their counts, where there are several."""
    counts = sorted(Counter(values).items())
    if len(counts) == 1:
        return f"{counts[0][0]:g}"
    listed = ", ".join(
        f"{value:g} ({_count(count, 'matrix', 'matrices')})" for value, count in counts[:_MAX_VALUES]
    )
    return listed + (f" and {len(counts) - _MAX_VALUES} more" if len(counts) > _MAX_VALUES else "")


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def size_text(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
