"""The ``fxserve`` command. Nothing heavy is imported before a command needs it, so that help comes at once."""

from service.cli.commands import app, main

__all__ = ["app", "main"]
