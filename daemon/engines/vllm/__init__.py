"""vLLM as an engine: its table, command line, statistics, last words, and the contract with its releases."""
