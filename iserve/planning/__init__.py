"""From a model, hardware and a wish to a plan, its document, and the worker that it launches."""
