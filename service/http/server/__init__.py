"""Server processes: uvicorn hardened against hostile clients, signal handling, and supervision."""
