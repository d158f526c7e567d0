"""All deployments of the route table in force, by the names that clients use."""

from __future__ import annotations

from collections.abc import Collection

from iserve.gateway.dispatch import Deployment, NewResidency
from iserve.gateway.errors import ApiError
from iserve.route_table import DeploymentDemand, RouteTable, VariantRoute

__all__ = ["Dispatcher"]


class Dispatcher:
    """All deployments of the table in force, by the name that clients use."""

    def __init__(self) -> None:
        self.deployments: dict[str, Deployment] = {}
        self.new_residency: NewResidency | None = None  # None: variants are not served
        self._with_variant: dict[str, list[Deployment]] = {}  # by the variant's name

    @property
    def variant_names(self) -> Collection[str]:
        return self._with_variant.keys()

    def find_variant(self, name: str) -> tuple[Deployment, VariantRoute]:
        """Return the first deployment of the table that serves the variant, one with a ready worker if any has.

        Raises:
            ApiError: 404 none does.
        """
        deployments = self._with_variant.get(name, ())
        for deployment in (*(one for one in deployments if one.num_ready), *deployments):
            if deployment.variants is not None:
                return deployment, deployment.variants.find(name)
        raise ApiError.model_not_found(name)

    def demand(self) -> tuple[DeploymentDemand, ...]:
        """Return the demand of every deployment now."""
        return tuple(
            DeploymentDemand(
                name=name,
                waiting=d.num_waiting,
                outstanding=d.num_outstanding,
                idle_s=d.idle_s,
                requests_per_s=d.requests_per_s,
            )
            for name, d in self.deployments.items()
        )

    def update(self, table: RouteTable) -> None:
        """Follow a new table."""
        limits = table.limits
        new: dict[str, Deployment] = {}
        for route in table.routes:
            deployment = self.deployments.get(route.name)
            if deployment is None:
                deployment = Deployment(route, limits.max_queue, limits.upstream_timeout_s, self.new_residency)
            else:
                deployment.update(route, limits.max_queue, limits.upstream_timeout_s)
            new[route.name] = deployment
        for name in self.deployments.keys() - new.keys():
            self.deployments[name].close()
        self.deployments = new
        self._with_variant = {}
        for deployment in new.values():
            for variant in deployment.route.variants:
                self._with_variant.setdefault(variant.name, []).append(deployment)
