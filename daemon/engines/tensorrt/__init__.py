"""What the TensorRT-LLM adapter knows: what runs, which options, which checkpoints, what its failures mean."""
