"""Costs of the stand-in's GPU: seconds on its clock, and bytes as vLLM would count them."""

GIB = 2**30
LAYER_S, TOKEN_S, PAIR_S = 3e-4, 1e-6, 1e-9  # of one layer: of a step, of a token, of a query-key pair
OTHER_S = 5e-5  # of a forward without its layers
LEAD_S, TAIL_S = 2e-5, 1e-4
LAYER_BYTES, OTHER_BYTES = 64 * 2**20, 256 * 2**20
ACTIVATION_BYTES, CONTEXT_BYTES, GRAPH_BYTES = 3 * GIB // 2, GIB // 4, 300 * 2**20
GRAPH_ESTIMATE_BYTES = 20 * 2**20  # of the newer releases, before the cache


def pairs(length, window):
    """Query-key pairs of a prompt, of a layer that looks back so far (None: to the beginning)."""
    w = min(window or length, length)
    return w * (w + 1) // 2 + (length - w) * w


def layer_s(tokens, pairs):
    return LAYER_S + TOKEN_S * tokens + PAIR_S * pairs
