"""What is known of a request before any of it is decoded: its rows, their sizes, and how each part is decoded."""
