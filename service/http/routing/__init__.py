"""Route classes: what they validate beyond FastAPI's, and what they cache."""
