"""Placement: the GPUs that a configuration goes on.

Pure: a snapshot and a demand in, a placement or a refusal out.
"""
