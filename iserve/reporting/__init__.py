"""Content of `iserve report`, gathered, and the measured whole models that it finds."""
