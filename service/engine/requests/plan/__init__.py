"""The plan of a request, made before any of it is decoded: its rows, their sizes, and how each part is decoded."""
