"""Model descriptions, predictions of what a model costs to run, and measurements of one or two of its layers.

Knows nothing of HTTP or clusters, and imports no engine.
"""
