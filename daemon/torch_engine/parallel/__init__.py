"""Ranks of one model: their places, processes and messages."""
