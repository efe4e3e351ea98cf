"""Server processes: uvicorn hardened against hostile clients, signals, and ends of processes."""
