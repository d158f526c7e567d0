"""What people would do instead of asking iServe, each at its best: deployers for the cluster simulator.

Pure search. Estimators, step times and the simulator are handed in, the same ones that iServe's own planner and
its judgement use, so that no baseline is told other times than iServe is.
"""
