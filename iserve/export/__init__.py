"""A planned worker as files that other tools start: values in, text out. Starts, reads and writes nothing."""
