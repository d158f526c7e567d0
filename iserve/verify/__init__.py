"""Checking a running configuration against what was predicted of it."""
