"""Other processes, and ports for them."""

from __future__ import annotations

import socket

import psutil


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def running(process: int) -> bool:
    """Return whether the process with that id runs; one that has ended may wait for its parent to notice."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
