"""The ``fxserve`` command. Heavy modules are imported only by the commands that need them, so that help is fast."""

from service.cli.fxserve import app, main

__all__ = ["app", "main"]
