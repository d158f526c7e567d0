"""vLLM 0.20 to 0.24 as an engine: its table, its command line, its statistics and its last words."""
