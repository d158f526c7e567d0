"""A strict stand-in for the package ``vllm`` (0.24), standard library only: ``LLM``, ``SamplingParams``."""

from vllm.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
