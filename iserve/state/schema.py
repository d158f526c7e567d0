"""The tables. Changed only together with a migration in ``iserve/state/migrations``."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

__all__ = [
    "api_keys",
    "deployments",
    "events",
    "idempotency_keys",
    "metadata",
    "models",
    "profiles",
    "quality_results",
    "route_version",
    "variants",
    "verifications",
]

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

models = Table(
    "models",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("directory", Text, nullable=False),
    Column("created_at", Float, nullable=False),  # seconds since the epoch, here and below
)

variants = Table(
    "variants",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("base", Text, nullable=False),
    Column("base_directory", Text, nullable=False),
    Column("content_hash", String(64), nullable=False),  # of daemon.variants.store
    Column("max_rank", Integer, nullable=False),
    Column("num_modules", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("disk_bytes", BigInteger, nullable=False),
    Column("trained_on", Text),
    Column("pinned", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
)

quality_results = Table(
    "quality_results",
    metadata,
    Column("identity", String(64), primary_key=True),  # iserve.quality.identity
    Column("variant_hash", String(64), nullable=False),  # of variants.content_hash; empty: a model of its own
    Column("weights_stamp", String(64), nullable=False, index=True),  # of the model's folder, or of the base's
    Column("measured_at", Float, nullable=False),
    Column("body", Text, nullable=False),  # iserve.quality.document.QualityDocument as JSON
)

profiles = Table(
    "profiles",
    metadata,
    Column("shape_hash", String(64), primary_key=True),
    Column("engine", String(40), primary_key=True),
    Column("machine_key", String(64), primary_key=True),
    Column("model", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("body", Text, nullable=False),  # fingerprint.measurements.Profile as JSON
)

verifications = Table(
    "verifications",
    metadata,
    Column("shape_hash", String(64), primary_key=True),
    Column("engine", String(40), primary_key=True),
    Column("machine_key", String(64), primary_key=True),
    Column("config", String(200), primary_key=True),
    Column("model", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("body", Text, nullable=False),  # fingerprint.verification.Verification as JSON
)

deployments = Table(
    "deployments",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("request", Text, nullable=False),  # iserve.api_types.DeployBody as JSON
    Column("desired", String(20), nullable=False),  # "running" | "removed"
    Column("phase", String(20), nullable=False),  # last step taken; what runs now is asked of the daemon
    Column("error", Text),
    Column("plan", Text),  # iserve.planning.document.PlanDocument as JSON
    Column("workers", Text),  # list of daemon.engines.base.WorkerSpec as JSON, written before any is launched
    # An update under way, as the three above; they take the place of those once its workers serve.
    Column("update_request", Text),
    Column("update_plan", Text),
    Column("update_workers", Text),
    Column("update_stop_first", Boolean),  # the former workers end before its workers start
    Column("draining", Text),  # workers of before the last update, while they finish what they have
    sqlite_autoincrement=True,  # no id twice: it names workers, and what is done about them in the background
)

# Written with the deployment that it was accepted with; outlives it, so that a late repeat does not bring it back.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("key", String(200), primary_key=True),
    Column("created_at", Float, nullable=False, index=True),
    Column("request", Text, nullable=False),  # iserve.api_types.DeployBody as JSON
    Column("answer", Text, nullable=False),  # iserve.api_types.DeploymentDocument as JSON, as it was first given
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(40), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("scope", String(20), nullable=False),
    Column("label", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked", Boolean, nullable=False, default=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("deployment_id", Integer, ForeignKey("deployments.id", ondelete="CASCADE")),
    Column("kind", String(40), nullable=False),
    Column("message", Text, nullable=False),
    Index("ix_events_deployment_id", "deployment_id"),
    sqlite_autoincrement=True,  # no id twice: a reader of those after the last one seen misses none
)

route_version = Table(
    "route_version",
    metadata,
    Column("one", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
)
