"""Runners of extractors on batches of images, and what they share."""
