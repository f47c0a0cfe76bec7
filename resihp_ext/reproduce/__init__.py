"""``resihp reproduce``: the paper's tables and figures from the simulator, beside the paper's own."""
