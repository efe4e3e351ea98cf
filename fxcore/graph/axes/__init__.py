"""What the axes of an activation mean."""
