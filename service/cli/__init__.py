"""The ``fxserve`` command. Commands import heavy modules themselves, so that help is fast."""

from service.cli.fxserve import app, main

__all__ = ["app", "main"]
