"""``resihp reproduce``: the paper's tables and figures, made anew and set beside its own."""
