"""Plans and programs: which rank holds what, and what it does in one iteration. Pure data."""
