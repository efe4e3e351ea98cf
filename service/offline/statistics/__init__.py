"""Statistics of all images of a run in place of their rows."""
