"""The cluster simulator, fed with the real planner, placement and baselines; what it found, as JSON and a page."""
