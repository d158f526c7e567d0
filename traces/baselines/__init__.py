"""Baselines: other ways to deploy than asking iServe, each at its best, as deployers for the cluster simulator.

The search is pure. Estimators, step times and the simulator are passed in. They are the ones that iServe's own
planner and its evaluation use, so that no baseline is given other times than iServe is.
"""
