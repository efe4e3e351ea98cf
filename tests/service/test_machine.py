import os

from service.machine import available_cores, available_memory, processor


def test_cores_of_a_quota(tmp_path):
    cores = len(os.sched_getaffinity(0))
    assert available_cores(tmp_path) == cores  # no control groups here
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text(f"{cores * 100000 - 1} 100000\n")
    assert available_cores(tmp_path) == cores
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert available_cores(tmp_path) == min(2, cores)


def test_memory_of_a_limit(tmp_path):
    machine = available_memory(tmp_path)
    assert machine > 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == machine
    (tmp_path / "memory.max").write_text("134217728\n")
    assert available_memory(tmp_path) == 2**27


def test_the_processor_is_named_as_the_system_does(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A Fast One @ 9 GHz\n\nprocessor\t: 1\nmodel name\t: Another\n")
    assert processor(info) == "A Fast One @ 9 GHz"
    assert isinstance(processor(tmp_path / "none"), str)
