"""Costs of the stand-in's GPU: seconds on its clock, and bytes as vLLM would count them."""

GIB = 2**30
LAYER_S, TOKEN_S, PAIR_S = 3e-4, 1e-6, 1e-9  # of one layer: of a step, of a token, of a query-key pair
OTHER_S = 5e-5  # of a forward without its layers
LEAD_S, TAIL_S = 2e-5, 1e-4
LORA_S, LORA_TOKEN_S = 2e-5, 4e-7  # of one layer: of an adapter in a step, of a token and slot
LORA_ONCE_S = 3e-6  # of a forward with adapters
LORA_LEAD_S, SLOTS_LEAD_S = 4e-5, 1e-5  # of a step with adapters, and of each in an engine with slots
LORA_LOAD_S = 0.01
LAYER_BYTES, OTHER_BYTES = 64 * 2**20, 256 * 2**20
ACTIVATION_BYTES, CONTEXT_BYTES, GRAPH_BYTES = 3 * GIB // 2, GIB // 4, 300 * 2**20
GRAPH_ESTIMATE_BYTES = 20 * 2**20  # of the newer releases, before the cache


def pairs(length, window):
    """Query-key pairs of a prompt, of a layer that looks back so far (None: to the beginning)."""
    w = min(window or length, length)
    return w * (w + 1) // 2 + (length - w) * w


def lora_s(tokens, adapters, slots):
    """Seconds of one layer of a step with adapters."""
    return LORA_S * adapters + LORA_TOKEN_S * tokens * slots if adapters else 0.0


def layer_s(tokens, pairs):
    return LAYER_S + TOKEN_S * tokens + PAIR_S * pairs
