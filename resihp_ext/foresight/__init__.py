"""``resihp simulate``: what a cluster, a model and their faults will make of each policy."""
