"""A strict stand-in for the package ``tensorrt_llm`` (1.2): what its documentation and sources say of ``LLM``.

``make_tensorrt_llm`` copies it into an environment as that package. A rank is a process of its own, spawned with
the registered model classes by name as MPI would pickle them; its GPU is a clock (``torch_on_paper``).
"""

from .llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
