"""Explanations of what cannot be traced, and of inputs that a model refuses."""
