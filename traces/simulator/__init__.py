"""Simulator of a cluster on a virtual clock: real planner, placement, routing and batching, predicted step times.

``simulation`` runs it; ``config`` says what can be asked, ``result`` what is returned. Knows no engine, no CLI.
"""
