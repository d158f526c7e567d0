"""Compressed full fine-tunes ("deltas") next to their base: kernels on the GPU and their references.

Runs in the interpreter of another engine (``daemon/engines/vllm/variants`` on ``PYTHONPATH``), so it needs torch,
Triton and the standard library alone.
"""
