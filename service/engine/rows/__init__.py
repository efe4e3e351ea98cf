"""The rows of a batch: shapes, regions and edits."""
