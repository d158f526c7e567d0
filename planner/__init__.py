"""Planner: the choice of the configuration that serves an intent best, and its reasons.

Pure: values in, values out.
"""
