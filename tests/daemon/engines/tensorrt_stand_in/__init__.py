"""A strict stand-in for ``trtllm-serve`` of TensorRT-LLM 1.2, written from its documentation alone.

It takes the documented flags and options and refuses what the engine is documented to refuse; it knows nothing of
our adapter. Standard library and PyYAML. ``stand_in.json`` in the checkpoint's folder tells it how to misbehave
(see ``engine.Behaviour``); the checkpoint needs no weights.
"""
