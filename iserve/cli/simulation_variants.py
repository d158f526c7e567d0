"""The options of ``simulate`` on LoRA variants, and which variant each request is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iserve.cli.simulation_options import ClusterOptions, DecisionOptions, ServiceOptions
    from iserve.planning.pipeline import PlanOptions
    from placement.variant_routing import VariantPolicy
    from traces.request import Request

__all__ = ["VariantOptions", "of_variants"]


@dataclass(frozen=True, kw_only=True)
class VariantOptions:
    """Options on variants of the one model that is deployed."""

    variants: Annotated[
        int,
        typer.Option(
            "--variants",
            metavar="N",
            min=0,
            help="LoRA variants of the one model of --models: requests without a name are for one of N, by "
            "--popularity (zipf:1); any name but the deployment's is a variant's.",
        ),
    ] = 0
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=1, help="Rank of the variants. Default: 16.")
    ] = None
    delta_mib: Annotated[
        int | None,
        typer.Option(
            "--delta-mib",
            metavar="MIB",
            min=1,
            help="All variants are deltas of full fine-tunes, of so many MiB each. Their times are estimated from "
            "kernels that were timed alone on an H200.",
        ),
    ] = None
    base_share: Annotated[
        float | None,
        typer.Option(
            "--base-share",
            metavar="SHARE",
            help="Requests for the base itself as a share of those that are drawn: they need no adapter slot. "
            "Default: 0.",
        ),
    ] = None
    adapter_slots: Annotated[
        int | None,
        typer.Option(
            "--adapter-slots",
            metavar="N",
            min=1,
            help="Of each worker. Default: as many as `iserve deploy --variants` reserves; of deltas as many as "
            "decode most tokens.",
        ),
    ] = None
    variant_policy: Annotated[
        str | None,
        typer.Option(
            "--variant-policy",
            help="Worker of a variant's request: least-loaded (default), busiest-loaded, round-robin, "
            "deltazip or fcfs.",
        ),
    ] = None

    def policy(self) -> VariantPolicy:
        from placement.variant_routing import DEFAULT_VARIANT_POLICY, make_variant_policy

        return make_variant_policy(self.variant_policy or DEFAULT_VARIANT_POLICY)

    def planned(self, options: PlanOptions, popularity: str | None) -> PlanOptions:
        """Return ``options`` of a deployment for these variants, as ``iserve deploy --variants`` has them.

        Raises:
            ConfigError: a number out of its range, or a popularity by which slots are not planned.
        """
        if not self.variants:
            return options
        traffic = replace(
            options.intent.traffic, variants=self.variants, variant_skew=_skew(popularity or _USUAL_POPULARITY)
        )
        if self.rank is not None:
            traffic = replace(traffic, variant_rank=self.rank)
        if self.delta_mib is not None:
            traffic = replace(traffic, delta_mib=self.delta_mib)
        if self.base_share is not None:
            traffic = replace(traffic, base_share=self.base_share)
        intent = replace(options.intent, traffic=traffic)
        return replace(options, intent=intent, adapter_slots=self.adapter_slots or 0)

    def check(self, cluster: ClusterOptions, decision: DecisionOptions, service: ServiceOptions) -> None:
        """Raise ConfigError: variants next to what is not simulated with them, or options of none."""
        given = {
            "--rank": self.rank,
            "--delta-mib": self.delta_mib,
            "--base-share": self.base_share,
            "--adapter-slots": self.adapter_slots,
            "--variant-policy": self.variant_policy,
        }
        if not self.variants:
            for option, value in given.items():
                if value is not None:
                    raise ConfigError(f"{option} is of variants; say how many there are with --variants N")
            return
        if self.rank is not None and self.delta_mib is not None:
            raise ConfigError("--delta-mib simulates deltas alone, which have no --rank; leave one of them out")
        if (models := len(cluster.named_models())) != 1:
            raise ConfigError(
                f"--variants are of one model, and --models names {models}; simulate each of them by itself"
            )
        if service.reject_late and not service.forecast_late:
            raise ConfigError(
                "--reject-late does not know what a variant's load takes; add --forecast-late, which does, or "
                "leave out --variants"
            )
        if decision.planner != "iserve":
            raise ConfigError(
                f"--planner {decision.planner} reserves no adapter slots; leave it out, or leave out --variants"
            )
        if service.kind().value != "continuous":
            raise ConfigError(
                f"--service {service.service} has no adapters; leave it out (continuous), or leave out --variants"
            )


_USUAL_POPULARITY = "zipf:1"  # of variants, as ``iserve deploy`` takes it


def _skew(popularity: str) -> float:
    """Return the exponent of Zipf's law of a popularity: 0 where all are alike."""
    from traces.popularity import Uniform, Zipf, popularity_named

    law = popularity_named(popularity)
    if isinstance(law, Zipf):
        return law.alpha
    if isinstance(law, Uniform):
        return 0.0
    raise ConfigError(
        "adapter slots are planned for a --popularity of zipf:ALPHA or uniform; give one of these, got "
        f"{popularity!r}"
    )


def of_variants(
    requests: Iterator[Request],
    variants: int,
    popularity: str | None,
    seed: int,
    base: str = "",
    base_share: float = 0.0,
) -> Iterator[Request]:
    """Draw the variant of every request; without a popularity, of those that have no name.

    Args:
        base: name of the deployment.
        base_share: requests for it, of those that are drawn.
    """
    from itertools import tee

    from traces.popularity import popularity_named
    from traces.transforms import assign_models

    names = tuple(f"variant-{number}" for number in range(variants))
    law = popularity_named(popularity or _USUAL_POPULARITY)
    given, copied = tee(requests)
    drawn = assign_models(copied, names, law, seed=seed)
    if base_share:
        drawn = _partly_of_base(drawn, base, base_share, seed)
    if popularity is not None:
        return drawn
    return (own if own.model else other for own, other in zip(given, drawn, strict=True))


def _partly_of_base(requests: Iterator[Request], base: str, share: float, seed: int) -> Iterator[Request]:
    """Give requests to the base with probability ``share``; the rest keeps the variants that it has without."""
    from random import Random

    draws = Random(seed)
    return (replace(one, model=base) if draws.random() < share else one for one in requests)
