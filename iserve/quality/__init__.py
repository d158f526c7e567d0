"""Quality of a served model on a text: NLL and exact match; KL divergence and agreement with a reference."""
