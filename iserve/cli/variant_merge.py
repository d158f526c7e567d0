"""``variant merge NAME OUT``: a registered variant, written out as a model."""

from __future__ import annotations

import typer

from iserve.cli import options as o

__all__ = ["merge_named"]


def merge_named(name: str, out: str, *, as_json: bool) -> None:
    """Write the base of the variant ``name`` with the variant in it to ``out``, and say what was written."""
    from iserve.cli.progress import StepDisplay
    from iserve.cli.variant import merged_lines
    from iserve.cli.variant_delta import exported_lines, show_units
    from iserve.registered_merges import merge_registered
    from iserve.settings import load_settings
    from iserve.variants import MergeDocument

    with StepDisplay(quiet=as_json) as display:

        def show(done_bytes: int, total_bytes: int) -> None:
            show_units(display, "merging", "MiB", done_bytes >> 20, total_bytes >> 20)

        done = merge_registered(name, out, load_settings(), show)
    if as_json:
        o.print_json(done)
        return
    typer.echo("\n".join(merged_lines(done) if isinstance(done, MergeDocument) else exported_lines(done)))
