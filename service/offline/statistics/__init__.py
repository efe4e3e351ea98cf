"""Statistics of all images of a run, instead of their rows."""
