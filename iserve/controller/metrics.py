"""The controller's metrics: counted as it happens, or read from the controller when asked."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from iserve.controller.service import Controller

__all__ = ["Metrics"]


class Metrics:
    """Metrics of one controller, in a registry of their own."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "iserve_controller_requests", "REST requests", ["method", "status"], registry=self._registry
        )
        self._deployments = Gauge(
            "iserve_deployments", "Deployments by status now", ["status"], registry=self._registry
        )
        self._free = Gauge(
            "iserve_device_free_bytes", "Free memory of a device", ["device"], registry=self._registry
        )
        self._load = Gauge(
            "iserve_device_load_ratio", "Busy fraction of a device over 120 s", ["device"], registry=self._registry
        )

    def count(self, method: str, status: int) -> None:
        """Count one REST request that was answered."""
        self._requests.labels(method, str(status)).inc()

    def render(self) -> bytes:
        """Return Prometheus text."""
        for gauge in (self._deployments, self._free, self._load):
            gauge.clear()
        for document in self._controller.deployments():
            self._deployments.labels(document.status).inc()
        for node in self._controller.nodes():
            for device in node.devices:
                self._free.labels(device.device_id).set(device.free_bytes)
                self._load.labels(device.device_id).set(device.load_fraction)
        return generate_latest(self._registry)
