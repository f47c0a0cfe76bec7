"""Pages and pictures of runs: pure functions that return HTML and SVG."""
