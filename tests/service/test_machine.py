import os
from pathlib import Path

import pytest

from service.machine import available_cores, available_memory, available_threads, processor

UNIT = "system.slice/fxserve.service"


def grouped(root: Path, lines: str, files: dict[str, str]) -> Path:
    """Lay out the control groups of a process below ``root``."""
    for name, text in {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{name}": t for name, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_cores_of_a_quota(tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert available_cores(tmp_path) == cores  # no control groups here
    for limit, expected in (
        ("max 100000", cores),
        ("50000 100000", 1),
        (f"{cores * 100000 - 1} 100000", cores),
        ("150000 100000", min(2, cores)),
    ):
        assert available_cores(grouped(tmp_path, "0::/", {"cpu.max": limit})) == expected


def test_memory_of_a_limit(tmp_path):
    machine = available_memory(tmp_path)
    assert machine > 2**28
    assert available_memory(grouped(tmp_path, "0::/", {"memory.max": "max"})) == machine
    assert available_memory(grouped(tmp_path, "0::/", {"memory.max": "134217728"})) == 2**27
    assert available_memory(grouped(tmp_path, "no group", {})) == 2**27
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(tmp_path) == 2**27


def test_limits_of_a_unit_of_systemd_and_of_its_slice(tmp_path):
    files = {f"{UNIT}/cpu.max": "100000 100000", f"{UNIT}/memory.max": "max", "system.slice/memory.max": "134217728"}
    grouped(tmp_path, f"0::/{UNIT}", {**files, f"{UNIT}/pids.max": "7", "other.slice/memory.max": "1024"})
    assert available_cores(tmp_path) == 1
    assert available_memory(tmp_path) == 2**27
    assert available_threads(tmp_path) == 7


@pytest.mark.parametrize("inside", ["", "docker/1234/"], ids=["in a container", "on the host"])
def test_limits_of_version_1(tmp_path, inside):
    lines = "\n".join(f"{n}:{names}:/docker/1234" for n, names in enumerate(["memory", "cpu,cpuacct", "pids"], 2))
    files = {
        f"cpu/{inside}cpu.cfs_quota_us": "100000",
        f"cpu/{inside}cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        f"pids/{inside}pids.max": "7",
    }
    machine = available_memory(tmp_path)
    grouped(tmp_path, f"1:name=systemd:/docker/1234\n{lines}\n0::/", files)
    assert available_cores(tmp_path) == 1
    assert available_memory(tmp_path) == machine
    assert available_threads(tmp_path) == 7
    grouped(tmp_path, lines, {f"memory/{inside}memory.limit_in_bytes": "134217728"})
    assert available_memory(tmp_path) == 2**27


def test_the_processor_is_named_as_the_system_does(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A Fast One @ 9 GHz\n\nprocessor\t: 1\nmodel name\t: Another\n")
    assert processor(info) == "A Fast One @ 9 GHz"
    assert isinstance(processor(tmp_path / "none"), str)
