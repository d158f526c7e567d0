"""Open-loop load on live OpenAI-compatible endpoints: requests leave at the trace's times, come what may."""
