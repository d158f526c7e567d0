"""Planning: from a model, hardware and a request to a plan, its document, and the worker that it launches."""
