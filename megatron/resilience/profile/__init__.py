"""``resihp profile``: what a layer and a message take on this machine, for the cost model."""
