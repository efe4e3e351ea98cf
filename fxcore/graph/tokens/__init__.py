"""Tokens of a transformer and the image positions they stand for."""
