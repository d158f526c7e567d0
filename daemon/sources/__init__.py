"""Readers of what an engine's installed sources say, without importing them."""
