"""Image files, by format: what Pillow and torch do not do, or do too slowly."""
