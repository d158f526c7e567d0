"""The embedded engine: transformers' own model classes, run as a worker process on CPU or CUDA."""
