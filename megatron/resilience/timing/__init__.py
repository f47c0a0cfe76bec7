"""Where the time of a step goes on this rank."""
