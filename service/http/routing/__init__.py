"""What routes declare, and how their parameters are parsed beyond what FastAPI does."""
