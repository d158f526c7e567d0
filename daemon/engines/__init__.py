"""Adapters to inference engines, one file each, behind one protocol."""
