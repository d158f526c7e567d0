"""Alembic's entry point; always run in-process by ``iserve.state.database`` with a connection of its own."""

from __future__ import annotations

from alembic import context

from iserve.state.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite changes a table by copying it
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
