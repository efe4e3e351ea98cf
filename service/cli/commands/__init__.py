"""The subcommands of ``fxserve``, a file each or a few of one kind."""
