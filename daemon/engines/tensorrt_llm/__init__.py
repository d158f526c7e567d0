"""TensorRT-LLM 1.2: what runs, which options, which checkpoints, what its last words mean, and the adapter."""
