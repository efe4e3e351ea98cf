"""Routes under ``/v1``."""
