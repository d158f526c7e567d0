"""The controller's durable state: SQLite or PostgreSQL through SQLAlchemy Core, one writer, short transactions."""
