"""Any model described by what it is made of: config.json, and names and shapes of its tensors.

No table of families: layers are found by their index in the names, kinds of layers by equal sets of names, shapes
and windows, what a layer keeps of a sequence by the matrices that it mixes tokens with. Tensors come from
safetensors headers, or of a config alone from transformers' class on torch's meta device.
"""

from __future__ import annotations

from fingerprint.description.spec import describe
from fingerprint.description.transformers_class import described_config

__all__ = ["describe", "described_config"]
