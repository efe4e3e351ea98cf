"""Handling of image file formats that Pillow and torch lack, or do too slowly."""
