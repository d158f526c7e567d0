"""A cluster on a virtual clock: real planner, placement, routing and batching policies, predicted step times.

``simulation`` runs it; ``config`` says what can be asked, ``result`` what comes out. Knows no engine, no CLI.
"""
