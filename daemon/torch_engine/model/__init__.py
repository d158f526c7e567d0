"""Model part of one rank: layers, weights, formats and KV cache."""
