"""Evaluation of plans in worlds: files that state a cluster, models, requests and the truth a simulator uses."""
