"""OpenAI and profiling routes of the embedded engine, and what turns text into tokens."""
