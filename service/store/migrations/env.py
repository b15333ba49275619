"""Runs migrations on the engine that `service.store.database.upgrade` passes in."""

from alembic import context

from service.store.models import Base

# Several processes may upgrade at once: the second waits for the first and finds nothing to do.
# SQLite's lock comes with the transaction's BEGIN IMMEDIATE.
POSTGRESQL_LOCK = "SELECT pg_advisory_xact_lock(7487202611)"

with context.config.attributes["engine"].begin() as connection:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(POSTGRESQL_LOCK)
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()
