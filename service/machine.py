"""The machine's resources available to this process; in a container, these are fewer than the machine has.

psutil is not used, because it does not know the limits of control groups.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores available to this process: its CPU affinity, limited by the CPU quota of its cgroup (v2).

    ``cpu.max`` is ``QUOTA PERIOD`` in microseconds, or ``max PERIOD`` without a quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory available to this process: the machine's, or its cgroup's ``memory.max`` if lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_threads() -> int | None:
    """Return the maximum threads of all processes of this user or cgroup together; None without a limit.

    ``ulimit -u`` does not apply to root.
    """
    limits = []
    own = _read(_CGROUP / "pids.max")
    if own.isdigit():
        limits.append(int(own))
    if os.name == "posix" and os.getuid() != 0:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits, default=None)


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor, which may be empty."""
    for line in _read(info).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
