"""What this process may use of the machine, which in a container is less than there is.

psutil knows the machine and the process, and no control group's limits.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may keep busy: by its affinity, and by the quota of its control group.

    See ``cpu.max`` in the kernel's documentation of control groups, version 2: microseconds of a period, or ``max``.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may take at most: the machine's memory, or its control group's ``memory.max``."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_threads(cgroup: Path = _CGROUP) -> int | None:
    """Threads that this process may have at most, other processes of its user or control group included; None where
    nothing limits them. ``ulimit -u`` does not apply to root."""
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
    """The model of the processor, as the system names it, else as Python does; it may be empty."""
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
