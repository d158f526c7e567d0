"""Continuous batching over a runner: which step is next, and what it samples."""
