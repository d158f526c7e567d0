"""Open-loop load on live OpenAI-compatible endpoints: every request leaves at the trace's time."""
