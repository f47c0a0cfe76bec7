"""How long a large model would take where a tiny one is really run; pure, no torch."""
