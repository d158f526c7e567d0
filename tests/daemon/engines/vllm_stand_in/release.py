"""The form of the stand-in's private classes: that of 0.24 to 0.26, or that of 0.33."""

from importlib import metadata

IS_NEWER = tuple(map(int, metadata.version("vllm").split(".")[:2])) >= (0, 29)
