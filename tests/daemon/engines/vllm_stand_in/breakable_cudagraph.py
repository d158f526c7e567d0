"""``vllm.compilation.breakable_cudagraph``, which every release from 0.24 on has."""


def is_breakable_cudagraph_enabled():
    return False
