"""What a model is, what it costs to run, and how that is measured on one and two of its layers.

Knows nothing of HTTP or clusters, and imports no engine.
"""
