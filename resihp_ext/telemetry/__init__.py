"""What a job says of itself to machines: metrics of a running one, traces of its steps."""
