"""``vllm.envs``, as far as the step timer reads it."""

VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS = True
