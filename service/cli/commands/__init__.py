"""The subcommands of ``fxserve``, one or a few related ones per module."""
