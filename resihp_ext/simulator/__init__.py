"""A simulated cluster: real plans and policies, hours of faults in seconds. Pure."""
