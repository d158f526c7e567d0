"""Launches made before the first request, so that no request waits for a kernel that is compiled or loaded."""

from __future__ import annotations

from collections.abc import Sequence

from iserve_variants.products import Products, Slots
from iserve_variants.step_routes import StepRoutes
from iserve_variants.tilings import rows_of_each_tiling

__all__ = ["warm_up"]


def warm_up(
    products: Products, routes: StepRoutes, linears: Sequence[Slots], outputs: Sequence[Slots], *, merges: bool
) -> None:
    """Make a launch of each kernel that a step can reach, and a route of each size that torch sorts otherwise.

    Which kernel it is depends on a module's shape and format, the tiling of its rows, whether rows have to be
    copied, and for logits on their type and padding; not on the mix, the number of deltas or the graph that holds
    it. Graphs that vLLM captures make some of these launches again, and larger steps make the rest.

    Args:
        products: of the model.
        routes: of the model; of no rows afterwards.
        linears: slots of all linears.
        outputs: slots of all matrices of the vocabulary.
        merges: whether prompts merge linears.
    """
    most = len(routes.token_slots)
    routes.warm_up()
    for rows in rows_of_each_tiling(most):
        products.warm_up(linears, routes.token_route, rows, merges=merges, has_padding=False)
        products.warm_up(outputs, routes.sample_route, rows, merges=False, has_padding=True)
