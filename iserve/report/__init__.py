"""HTML and Markdown pages: the report on a model, a replayed trace, a simulation. Nothing is measured here."""
