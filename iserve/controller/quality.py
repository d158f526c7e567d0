"""Results of ``iserve quality``: kept by what was measured, and given for what a name means now."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, ConfigError, ConflictError, NotFoundError
from fingerprint.sanitize import is_plain
from iserve.controller.stored_values import recorded_workers
from iserve.controller.variant_serving import VariantServer, servers_of, variant_servers
from iserve.demo import DEMO_MODEL_NAME
from iserve.hub_files import cached_snapshot
from iserve.model_source import ModelSource, existing_path, is_hub_id
from iserve.quality.checks import check_result
from iserve.quality.document import ModelFacts, QualityDocument
from iserve.quality.facts import weights_stamp
from iserve.quality.identity import identity_of
from iserve.state.rows import QualityRow, VariantRow
from iserve.state.store import Store

__all__ = ["QualityResults"]

log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 10  # of one result
_SHOWN, _LISTED = 8, 100


class QualityResults:
    """Results that this home keeps. Thread-safe.

    Args:
        resolve: the model that a name leads to.
        releases: the releases of an engine that are installed; of none that are known any is believed.
        servers_of: the deployments that can serve a variant.
    """

    def __init__(
        self,
        store: Store,
        resolve: Callable[..., ModelSource],
        releases: Callable[[str], Collection[str]] = lambda engine: (),
        servers_of: Callable[[VariantRow, Iterable[VariantServer]], Collection[str]] = servers_of,
    ) -> None:
        self._store, self._resolve, self._releases = store, resolve, releases
        self._servers_of = servers_of

    def keep(self, result: QualityDocument) -> QualityDocument:
        """Keep a result of a variant or deployment, in place of one of the same contents.

        Raises:
            BadInputError: it does not say what was measured, has values that no measurement has, or is too large.
            ConflictError: the name means other contents by now, or is served by another configuration.
            NotFoundError: there is no such model.
        """
        facts = result.model
        if facts.sha256 is None or facts.weights_stamp is None:
            raise BadInputError(f"the result does not say which tensors {facts.name[:80]!r} had; it is not kept")
        check_result(result)
        body = to_json(result)
        if len(body) > _MOST_BYTES:
            raise BadInputError(
                f"a result has {_MOST_BYTES >> 10} KiB of JSON at most, got {len(body) / 1024:,.0f}"
            )
        if (facts.variant_hash or "", facts.weights_stamp) != self._content(facts.name):
            raise ConflictError(
                f"{facts.name!r} has other contents now than the result is of, or files of it were changed while "
                "it was measured; it is not kept: measure again"
            )
        self._check_engine(facts)
        self._store.quality.put(
            QualityRow(
                identity=identity_of(result),
                variant_hash=facts.variant_hash or "",
                weights_stamp=facts.weights_stamp,
                measured_at=time.time(),
                body=body.decode(),
            )
        )
        return result

    def all(self) -> tuple[QualityDocument, ...]:
        """Return the newest results, of whatever contents; their hashes say of which."""
        return tuple(_documents(self._store.quality.all(_LISTED)))

    def of(self, name: str) -> tuple[QualityDocument, ...]:
        """Return the results of what ``name`` means now, the newest first.

        Raises:
            NotFoundError, ConfigError, CheckpointError: it is no variant, deployment or model, or cannot be read.
        """
        variant_hash, stamp = self._content(name)
        return tuple(_documents(self._store.quality.of_content(variant_hash, stamp, _SHOWN)))

    def is_named(self, name: str) -> bool:
        """Return whether a variant, deployment or registered model has ``name``; any caller may ask for it."""
        named = [row.name for row in self._store.deployments()] + [row.name for row in self._store.models()]
        return name in named or (is_plain(name) and self._variant(name) is not None)

    def _check_engine(self, facts: ModelFacts) -> None:
        """Return if a deployment of the model has the configuration of ``facts``, or none is there any longer."""
        variant, rows = self._variant(facts.name), self._store.deployments()
        serving = {facts.name} if variant is None else set(self._servers_of(variant, variant_servers(rows)))
        workers = [recorded_workers(row)[:1] for row in rows if row.name in serving]
        configs = [worker.config for (worker,) in filter(None, workers)]
        if configs and facts.config not in configs:
            raise ConflictError(
                f"the result is of {_words(facts.config)}, and {facts.name!r} is served by "
                f"{' or '.join(map(_words, configs))}; it is not kept: measure again"
            )
        if facts.config is None or facts.engine_version is None:
            return
        releases = self._releases(facts.config.engine)
        if releases and facts.engine_version not in releases:
            raise ConflictError(
                f"the result is of release {facts.engine_version[:80]!r}, and of {facts.config.engine!r} there is "
                f"{', '.join(sorted(releases))}; it is not kept: measure again"
            )

    def _variant(self, name: str) -> VariantRow | None:
        """Return the variant ``name``; None: there is none, or a deployment of its own is its model."""
        if name in {row.name for row in self._store.deployments()}:
            return None
        try:
            return self._store.variants.get(name)
        except NotFoundError:
            return None

    def _content(self, name: str) -> tuple[str, str]:
        """Return the hash of a variant, empty of a model, and the stamp of the weights. Raises as :meth:`of`."""
        variant = self._variant(name)
        if variant is not None:
            return variant.content_hash, weights_stamp(Path(variant.base_directory))
        row = next((row for row in self._store.deployments() if row.name == name), None)
        workers = () if row is None else recorded_workers(row)
        if workers:
            return "", weights_stamp(Path(os.path.realpath(workers[0].checkpoint)))
        if row is not None:
            raise NotFoundError(f"the deployment {name!r} has no worker yet")
        return "", weights_stamp(self._folder(name))

    def _folder(self, name: str) -> Path:
        """Return the folder of a model that is on this machine; the hub is not asked. Raises as :meth:`of`."""
        if name == DEMO_MODEL_NAME or name in {row.name for row in self._store.models()} or existing_path(name):
            return self._resolve(name, need_weights=False).directory
        cached = cached_snapshot(name) if is_hub_id(name) else None
        if cached is None:
            raise NotFoundError(
                f"{name[:200]!r} is no variant, deployment or registered model of this home, and no model that is "
                "on this machine"
            )
        return cached


def _words(config: DeploymentConfig | None) -> str:
    return "no configuration" if config is None else f"{config} on {config.engine[:80]}"


def _documents(rows: Iterable[QualityRow]) -> Iterable[QualityDocument]:
    for row in rows:
        try:
            yield from_json(row.body, QualityDocument, what="a result of quality")
        except (BadInputError, ConfigError) as error:  # of another version
            log.warning("%s", error)
