"""Profiling worker of an engine in its own interpreter, where iServe is not installed."""
