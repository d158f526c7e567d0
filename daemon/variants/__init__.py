"""LoRA variants on disk: their tensors, kept once each, and folders that engines load."""
