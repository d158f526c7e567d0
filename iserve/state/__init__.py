"""The controller's durable state: SQLite through SQLAlchemy Core, one writer, short transactions."""
