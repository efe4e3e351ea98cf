"""Resources of the machine that this process may use: in a container, fewer than the machine has.

psutil does not know the limits of control groups.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores available to this process, by its CPU affinity and the CPU quota of its control group (cgroup v2).

    ``cpu.max`` is ``QUOTA PERIOD`` in microseconds, or ``max PERIOD`` without a quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Return bytes of memory available to this process: the machine's, or its control group's ``memory.max`` if
    lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_threads(cgroup: Path = _CGROUP) -> int | None:
    """Maximum threads of this process and the others of its user or control group; None without a limit.

    ``ulimit -u`` does not apply to root.
    """
    limits = []
    own = _read(cgroup / "pids.max")
    if own.isdigit():
        limits.append(int(own))
    if os.name == "posix" and os.getuid() != 0:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits, default=None)


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor; may be empty."""
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
