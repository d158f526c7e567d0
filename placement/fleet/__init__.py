"""Joint choice of configurations, replicas and GPUs for several deployments under a load that may not be known."""
