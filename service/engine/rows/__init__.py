"""The rows of a batch: their shapes, their regions, and their edits."""
