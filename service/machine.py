"""The machine's resources available to this process; in a container, these are fewer than the machine has.

psutil is not used, because it does not know the limits of control groups.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_cores(root: Path = _ROOT) -> int:
    """Return the cores available to this process: its CPU affinity, limited by the CPU quotas of its control groups.

    ``cpu.max`` is ``QUOTA PERIOD`` in microseconds, or ``max PERIOD`` without a quota.

    Args:
        root: the root of the file system.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu", root):
        version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        quota, _, period = (_read(group / "cpu.max") or version_1).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory available to this process: the machine's, or the limit of its control groups if lower.

    Args:
        root: the root of the file system.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, *_limits("memory", ("memory.max", "memory.limit_in_bytes"), root), total)


def available_threads(root: Path = _ROOT) -> int | None:
    """Return the maximum threads of all processes of this user or control group together; None without a limit.

    ``ulimit -u`` does not apply to root.

    Args:
        root: the root of the file system.
    """
    limits = list(_limits("pids", ("pids.max",), root))
    if os.name == "posix" and os.getuid() != 0:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits, default=None)


def _limits(controller: str, names: tuple[str, ...], root: Path) -> Iterator[int]:
    """Yield the limits in the files ``names`` of this process's control groups."""
    for group in _control_groups(controller, root):
        for name in names:
            limit = _read(group / name)
            if limit.isdigit():
                yield int(limit)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups (versions 1 and 2) and of their parents, which limit it too.

    In a container, the folder of its own group may be mounted in place of the root of all groups.
    """
    lines = [line for line in _read(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for line in lines or ["0::/"]:  # the file may be hidden
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mounted / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(mounted))


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
