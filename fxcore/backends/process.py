"""Work on a module in a child process.

While torch.export traces, it patches ``nn.Module`` and torch's dispatcher for the whole process, which breaks modules
in other threads; and it holds the GIL for seconds.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxcore.errors import summarize
from fxcore.passes.parametrized import with_plain_weights

LONGEST = 900.0
"""Seconds after which a process is killed."""

_CHILD_THREADS = 16
"""Threads that must be available before a child is started: OpenVINO spins forever if it cannot start its threads."""

_FILE = "module.pt"
"""Name of the file that contains the module."""


class ProcessFailed(Exception):
    """The process failed, timed out or was cancelled; the message is a clause that says which."""


def save_module(folder: Path, module: fx.GraphModule, **beside: Any) -> None:
    """Save ``module``, and values ``beside`` it, in ``folder`` for :func:`load_module` in another process."""
    # Save tensors and code: the other process builds an ordinary module from them without tracing.
    _, (body, imports) = fx.GraphModule.__reduce__(with_plain_weights(module))[:2]
    torch.save({**beside, "body": body, "imports": imports}, folder / _FILE)


def load_module(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load, and delete, the file of :func:`save_module`.

    Returns:
        The module, in eval mode on the CPU, and the values beside it.
    """
    file = folder / _FILE
    # Safe to unpickle: the parent process wrote it to a private folder.
    saved = torch.load(file, weights_only=False, map_location="cpu")
    file.unlink()
    body = saved.pop("body")
    scope: dict[str, Any] = {}
    exec(saved.pop("imports") + body["_code"], scope)
    # A new class: torch.export reads the names of the inputs from its forward.
    module: nn.Module = type("Restored", (nn.Module,), {"forward": scope["forward"]})()
    module.__dict__.update({key: body[key] for key in ("_modules", "_parameters", "_buffers") if key in body})
    return module.eval().requires_grad_(False), saved


def run(program: str, folder: Path, environment: Mapping[str, str], cancelled: threading.Event | None = None) -> None:
    """Run ``python -m program folder`` with one thread; its output goes to ``folder/log``.

    Args:
        environment: environment variables in addition to those of this process.
        cancelled: when set, the process is killed.

    Raises:
        ProcessFailed: the process failed (the last line of its output is the reason), was killed, timed out, or was
            cancelled.
        OSError, RuntimeError: the system cannot start a process, or enough threads.
    """
    check_threads(_CHILD_THREADS)
    # One thread, since the parent may be serving requests.
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    variables["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    # What a child that is killed leaves there, or its compilers, is deleted with it.
    with tempfile.TemporaryDirectory(dir=folder.resolve(), ignore_cleanup_errors=True) as variables["TMPDIR"]:
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", program, str(folder)],
                stdin=subprocess.PIPE,  # closes when this process ends, see _end_with_parent
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # a process group that includes the compilers it runs
            )
        assert child.stdin is not None
        with child.stdin:
            deadline = time.monotonic() + LONGEST
            while True:
                try:
                    child.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    gone = cancelled is not None and cancelled.is_set()
                    if gone or time.monotonic() > deadline:
                        os.killpg(child.pid, signal.SIGKILL)
                        child.wait()
                        raise ProcessFailed("was cancelled" if gone else f"took over {LONGEST:.0f} s") from None
    if child.returncode:
        lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip()[:300] if lines else f"exit status {child.returncode}"
        raise ProcessFailed(
            f"failed: {last}" if child.returncode > 0 else f"{_killed(-child.returncode)}; last: {last}"
        )


def _killed(number: int) -> str:
    crashes = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    causes: dict[int, str] = dict.fromkeys(crashes, ", a crash in a native library")
    causes[signal.SIGKILL] = ", probably for lack of memory"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was killed by {name}{causes.get(number, '')}"


def check_threads(count: int) -> None:
    """Check that the system can start ``count`` threads, by starting them; they end at once.

    Raises:
        RuntimeError: the system cannot start that many.
    """
    gate = _thread.allocate_lock()
    with gate:
        for _ in range(count):
            _thread.start_new_thread(_pass, (gate,))


def _pass(gate: _thread.LockType) -> None:
    with gate:
        pass


def _end_with_parent(folder: Path) -> None:
    """Wait until the parent process ends, for whatever reason; then delete ``folder`` and kill this process group."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(work: Callable[[Path], None]) -> None:
    """Call ``work`` with the folder on the command line. This is the entry point of programs that :func:`run` starts.

    If ``work`` fails, the last line of the output is the reason and the exit status is 1. If the parent process ends,
    this process deletes the folder and ends too.
    """
    os.nice(10)  # the parent may be serving requests
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        work(folder)
    except Exception as error:
        traceback.print_exc()
        print(summarize(error), file=sys.stderr)
        sys.exit(1)
