"""Server processes that fail to start: before any has, all end; later, another is started. Those that die at once are
replaced ever later. They end with their supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import until
from tests.processes import free_port, running

ROOT = Path(__file__).parents[4]

APP = """
import asyncio
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

if Path("refused").exists() or Path("broken").exists():
    import fxcore.errors  # as the service does, before its processes are forked

class Slow(logging.StreamHandler):
    def __init__(self):
        if multiprocessing.parent_process() is not None:
            Path(f"{os.getpid()}.configures").touch()
        while multiprocessing.parent_process() is not None and Path("slow").exists():
            time.sleep(0.05)
        super().__init__()

def create():
    if Path("refused").exists():
        raise ValueError("no statistics")
    if Path("broken").exists():
        raise KeyError("a bug")

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            if Path("no memory").exists():
                await send({"type": "lifespan.startup.failed", "message": "no memory"})
                return
            if Path("deaths").exists():
                with Path("deaths").open("a") as deaths:
                    print(time.time(), file=deaths)
                os._exit(7)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Path(f"{os.getpid()}.hup").touch)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
            if Path("busy").exists():
                asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
    return app
"""

SERVE = """
import os
import signal
import sys
import time
from pathlib import Path
if Path("importing").exists() and __name__ == "__mp_main__":
    Path(f"{os.getpid()}.imports").touch()
    while not signal.sigpending():
        time.sleep(0.05)
from service.http.server import supervisor
from service.http.server.run import _supervise
if __name__ == "__main__":
    supervisor._SHUTDOWN_SECONDS, supervisor._MIN_DELAY = 2.0, 0.25  # shorter, since tests wait for them
    forked = sys.argv[2] == "True"
    logs = {"version": 1, "disable_existing_loggers": False}
    logs |= {"handlers": {"slow": {"class": "app.Slow"}}, "root": {"handlers": ["slow"]}}
    options = {"factory": True, "workers": 2, "timeout_worker_healthcheck": 60, "log_config": logs}
    _supervise("app:create", forked, 3.0, port=int(sys.argv[1]), **options)
"""


FORKED = pytest.mark.parametrize("forked", [True, False], ids=["forked", "spawned"])


class Processes:
    """Two server processes. A file ``no memory`` in ``folder`` makes them fail to start, ``refused`` or ``broken`` fail
    to create their application, ``slow`` wait before, ``busy`` have a busy thread, and ``deaths`` exit at once, with a
    line of the time in it. Spawned ones wait amid their imports for a signal if there is a file ``importing``."""

    def __init__(self, folder: Path, forked: bool) -> None:
        (folder / "app.py").write_text(APP)
        (folder / "serve.py").write_text(SERVE)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "serve.py", str(port), str(forked)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "no_proxy": "127.0.0.1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()

    def end(self) -> int:
        """End them by SIGTERM, and return the supervisor's status."""
        self.process.terminate()
        return self.process.wait(30)

    def both(self) -> set[int]:
        """Wait until two processes answer, and return them. One may be faster at all requests for a while."""
        found: list[set[int]] = []
        until(lambda: found.append(self.answering()) or len(found[-1]) == 2)
        return found[-1]

    def answering(self) -> set[int]:
        """The processes that answer some requests."""
        found = set()
        for _ in range(20):
            try:
                found.add(int(httpx.get(self.url).text))
            except httpx.TransportError:
                return set()
        return found


@pytest.mark.exhaustive
def test_a_process_that_cannot_replace_another_is_tried_again(tmp_path: Path) -> None:
    with Processes(tmp_path, forked=False) as server:
        first, second = server.both()
        (tmp_path / "no memory").touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: server.log.read_text().count("failed to start; another is started") >= 2)
        assert server.answering() == {second}
        (tmp_path / "no memory").unlink()
        assert second in server.both()
        assert server.end() == 0


@pytest.mark.exhaustive
def test_a_process_that_dies_again_and_again_is_replaced_ever_later(tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    with Processes(tmp_path, forked=True) as server:
        first, second = server.both()
        deaths.touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: len(deaths.read_text().splitlines()) == 3)
        times = [float(line) for line in deaths.read_text().splitlines()]
        assert times[2] - times[0] >= 0.5  # 0.25 and 0.5, if each starts as fast as the one before
        until(lambda: server.log.read_text().count("\n") == 4)
        lines = server.log.read_text().splitlines()
        assert lines[0] == f"server process {first} was ended by signal 9; another is started"
        for line, seconds in zip(lines[1:], ("0.25", "0.5", "1"), strict=True):
            assert line.endswith(f" exited with status 7; another is started in {seconds} s")
        assert server.answering() == {second}
        deaths.unlink()
        server.both()
        assert server.end() == 0


@pytest.mark.exhaustive
@FORKED
def test_sighup_replaces_no_process_and_sigterm_to_all_ends_them(tmp_path: Path, forked: bool) -> None:
    with Processes(tmp_path, forked) as server:
        processes = server.both()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: {int(file.stem) for file in tmp_path.glob("*.hup")} == processes)
        assert server.both() == processes
        os.killpg(server.process.pid, signal.SIGTERM)  # as Ctrl-C reaches all of them
        assert server.process.wait(30) == 0
        assert server.log.read_text() == ""


@pytest.mark.exhaustive
@FORKED
def test_the_end_does_not_wait_for_threads(tmp_path: Path, forked: bool) -> None:
    (tmp_path / "busy").touch()
    with Processes(tmp_path, forked) as server:
        server.both()
        assert server.end() == 0
        assert server.log.read_text() == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("second", "seconds"), [(signal.SIGTERM, 2), (signal.SIGINT, 3 + 2)])
def test_a_process_that_hangs_is_killed_at_the_end(tmp_path: Path, second: int, seconds: float) -> None:
    """Only a second signal of the same kind ends the grace period, as in a process that does not hang."""
    with Processes(tmp_path, forked=True) as server:
        hanging = min(server.both())
        os.kill(hanging, signal.SIGSTOP)
        began = time.monotonic()
        server.process.terminate()
        time.sleep(1)
        server.process.send_signal(second)
        assert server.process.wait(60) == 0
        assert time.monotonic() - began >= seconds
        assert not running(hanging)
        assert server.log.read_text() == f"server process {hanging} does not end; it is killed\n"


@pytest.mark.exhaustive
def test_a_process_that_waits_to_be_replaced_is_no_failure_at_the_end(tmp_path: Path) -> None:
    with Processes(tmp_path, forked=True) as server:
        first, _ = server.both()
        (tmp_path / "no memory").touch()
        os.kill(first, signal.SIGKILL)
        until(lambda: "failed to start; another is started in 0.5 s" in server.log.read_text())
        assert server.end() == 0


@pytest.mark.exhaustive
def test_processes_that_cannot_start_end_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "no memory").touch()
    with Processes(tmp_path, forked=True) as server:
        assert server.process.wait(60) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "error"), [("refused", "no statistics"), ("broken", "'a bug'")])
def test_processes_without_an_application_end_with_an_error(tmp_path: Path, file: str, error: str) -> None:
    (tmp_path / file).touch()
    with Processes(tmp_path, forked=True) as server:
        assert server.process.wait(300) == 3
    log = server.log.read_text()
    assert f"the server cannot start: {error}\n" in log
    assert "another is started" not in log
    assert ("Traceback" in log) == (file == "broken")


@pytest.mark.exhaustive
@FORKED
def test_processes_that_are_still_starting_end_on_sigterm(tmp_path: Path, forked: bool) -> None:
    (tmp_path / "slow").touch()
    try:
        with Processes(tmp_path, forked) as server:
            until(lambda: len(list(tmp_path.glob("*.configures"))) == 2)
            server.process.terminate()
            assert server.process.wait(300) == 0
    finally:
        (tmp_path / "slow").unlink()  # ends processes that are left


@pytest.mark.exhaustive
def test_spawned_processes_that_import_end_on_sigterm(tmp_path: Path) -> None:
    """They get SIGINT, on which Python prints a traceback until a handler is set."""
    (tmp_path / "importing").touch()
    with Processes(tmp_path, forked=False) as server:
        until(lambda: len(list(tmp_path.glob("*.imports"))) == 2)
        server.process.terminate()
        assert server.process.wait(300) == 0
        assert server.log.read_text() == ""


@pytest.mark.exhaustive
@FORKED
def test_processes_end_when_their_supervisor_is_killed(tmp_path: Path, forked: bool) -> None:
    left = set[int]()
    try:
        with Processes(tmp_path, forked) as server:
            left = server.both()
            server.process.kill()
            server.process.wait()
            until(lambda: not any(map(running, left)), 30)
            assert server.answering() == set()  # the port is free
    finally:
        for process in filter(running, left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
