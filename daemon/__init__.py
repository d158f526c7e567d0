"""Daemon of one node: watches its devices, starts and watches its workers, and holds the engines.

Knows nothing of intents. Importable without the web stack (FastAPI, pydantic, SQLAlchemy).
"""
