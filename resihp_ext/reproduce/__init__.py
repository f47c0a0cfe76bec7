"""``resihp reproduce``: the paper's tables and figures from the simulator, ours beside the paper's."""
