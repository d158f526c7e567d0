"""Workload traces: readers, generators, open-loop replay and the cluster simulator."""
