"""Series of variants are bounded by the table, though no one reads the page of metrics."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fingerprint.codec import to_json
from iserve.gateway.app import Gateway
from iserve.gateway.sse import Usage
from iserve.route_table import GatewayLimits, Route, RouteTable
from tests.iserve.gateway.variant_requests import variant

ROUTE = Route(
    name="m", model="org/base", created=1, max_context_tokens=10, workers=(), adapter_slots=1, loaded_adapters=4
)


def variants_of(gateway: Gateway) -> set[str]:
    """Variants that have a series now, without reading the page, which drops some."""
    samples = (sample for metric in gateway.metrics._registry.collect() for sample in metric.samples)
    return {sample.labels["variant"] for sample in samples if "variant" in sample.labels}


def count(gateway: Gateway, name: str) -> None:
    """A request of a variant that was answered, and what it caused."""
    counted = gateway.metrics.of_variant(name)
    counted.first_token("m", 0.1)
    counted.tokens("m", Usage(prompt_tokens=3, completion_tokens=5))
    counted.answered()
    gateway.metrics.variants.loaded(name, 0.1)
    gateway.metrics.variants.evicted(name)


def test_variants_that_are_added_and_removed_leave_no_series(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "routes.json"
        gateway = Gateway(path)
        table = RouteTable(version=0, auth_required=False, routes=(), keys=(), limits=GatewayLimits())

        def publish(version: int, *names: str) -> None:
            route = replace(ROUTE, variants=tuple(variant(name) for name in names))
            path.write_bytes(to_json(replace(table, version=version, routes=(route,))))
            gateway.look()
            assert gateway.routes.table is not None
            assert gateway.routes.table.version == version

        await gateway.start()
        try:
            for version in range(1, 101):
                name = f"style-{version}"
                publish(version, "kept", name)
                for each in ("kept", name):
                    count(gateway, each)
                assert variants_of(gateway) == {"kept", name}
            count(gateway, "style-7")  # of a stream that outlived its variant
            publish(101, "kept")
            assert variants_of(gateway) == {"kept"}
            page = gateway.metrics.page().decode()
            assert 'iserve_gateway_variant_requests_total{variant="kept"} 100.0' in page
            assert 'iserve_gateway_variant_evictions_total{variant="kept"} 100.0' in page
        finally:
            await gateway.stop()

    asyncio.run(main())
