"""Tokens of a transformer, and the positions of an image that they stand for."""
