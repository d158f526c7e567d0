"""Variants on disk, LoRA adapters and deltas: their tensors, kept once each, and folders that engines load."""
