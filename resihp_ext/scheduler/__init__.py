"""Which plan to run next: progressive (TP, PP, DP in turn) and joint planners. Pure."""
