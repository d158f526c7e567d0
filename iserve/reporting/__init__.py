"""What `iserve report` shows, gathered, and the measured whole models that it finds."""
