"""Compile in a child process, and cache the artifact.

An artifact is a folder in the cache, named by a hash of everything it depends on: the graph's code, the settings of its
layers, all weights, the compiler versions, and the processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import numbers
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx, nn

from fxcore.backends import process
from fxcore.backends.backend import LoweringFailed, Options, lowering, tensors_of
from fxcore.tensors import Tensors


class FromArtifact(Protocol):
    """A lowered module loaded from an artifact.

    Attributes:
        recalled: whether the artifact came from the cache. A damaged artifact may still load.
    """

    recalled: bool


T = TypeVar("T", bound=FromArtifact)

CACHE_BYTES = 4 * 1024**3
"""Maximum bytes of artifacts in the cache; the least recently used are deleted first."""

_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})
"""Types of local file systems."""

_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (type(None), numbers.Number, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.Size)


def compiled(
    backend: str,
    module: fx.GraphModule,
    example: Tensors,
    options: Options,
    packages: Sequence[str],
    load: Callable[[Path], T],
    **job: object,
) -> T:
    """Compile ``module`` in :mod:`fxcore.backends.lowering_child`, or find its artifact in the cache; then load it.

    Args:
        module: a module that returns a tuple; see :func:`~fxcore.backends.backend.distinct_outputs`.
        packages: distributions whose versions the artifact depends on.
        load: loads a lowered module from the folder of an artifact.
        job: further settings for the child; must be JSON-serializable.

    Raises:
        LoweringFailed: the child failed, timed out or was cancelled, or the artifact cannot be loaded.
    """
    settings: dict[str, Any] = {"backend": backend, "threads": options.threads, **job}
    calibration = options.calibration if options.precision == "int8" else ()
    key = _key(module, settings, [*example, *(x for row in calibration for x in row)], packages)
    with lowering(backend), contextlib.ExitStack() as stack:
        home = options.cache
        if home is None or not _writable(home):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fxserve-", ignore_cleanup_errors=True)))
        kept = home / f"{backend}-{key}"
        if kept.is_dir() and not options.reuse:
            shutil.rmtree(kept, ignore_errors=True)
        if kept.is_dir():
            try:
                os.utime(kept)
                loaded = load(kept)
                loaded.recalled = True
                return loaded
            except Exception:  # damaged; recompiled below
                shutil.rmtree(kept, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
        stack.callback(shutil.rmtree, fresh, True)
        process.save_module(fresh, module, example=example, calibration=list(calibration), settings=settings)
        _lower(backend, fresh, options)
        with contextlib.suppress(OSError):  # another process finished first
            fresh.rename(kept)
        loaded = load(kept)
        prune(home, CACHE_BYTES)
        return loaded


def may_be_mapped(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether the files of an artifact may be memory-mapped, so that processes share their pages.

    Another process may delete an artifact. A local file system keeps a deleted file for as long as it is mapped. On a
    network file system, pages that were not read yet are lost, and accessing one kills the process.
    """
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False  # not Linux
    # Spaces in paths are written as octal escapes.
    types = {Path(path.encode().decode("unicode_escape")): kind for _, path, kind, *_ in lines}
    place = folder.resolve()
    return next((types[path] in _LOCAL for path in (place, *place.parents) if path in types), False)


def prune(home: Path, limit: int) -> None:
    """Delete the least recently used artifacts in ``home`` until at most ``limit`` bytes are left."""
    artifacts = []
    for folder in home.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.startswith(".making-") and time.time() - folder.stat().st_mtime > 2 * process.LONGEST:
                shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
            elif folder.is_dir() and not folder.name.startswith("."):
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                artifacts.append((folder.stat().st_mtime, size, folder))
    total = sum(size for _, size, _ in artifacts)
    for _, size, folder in sorted(artifacts)[:-1]:
        if total <= limit:
            break
        shutil.rmtree(folder, ignore_errors=True)
        total -= size


def _lower(backend: str, folder: Path, options: Options) -> None:
    # Inductor's package is self-contained; its cache is just as large and not needed afterwards.
    inductor_cache = folder / ".inductor"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    try:
        process.run("fxcore.backends.lowering_child", folder, environment, options.cancelled)
    except process.ProcessFailed as error:
        raise LoweringFailed(f"lowering to {backend} {error}", backend=backend) from None
    shutil.rmtree(inductor_cache, ignore_errors=True)


def _key(module: fx.GraphModule, settings: dict[str, Any], inputs: Sequence[Tensor], packages: Sequence[str]) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchvision", *packages)}
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    digest = hashlib.sha256(json.dumps([settings, versions, processor], sort_keys=True).encode())
    for name, child in module.named_modules():  # the code, and settings of the modules it calls (kernel size, eps …)
        digest.update(f"{name} {_stable_repr(type(child))} {child.extra_repr()} {_configured(child)}\n".encode())
    for tensor in [*tensors_of(module), *inputs]:
        digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:24]


def _configured(module: nn.Module) -> str:
    """Return a module's settings as text: a GraphModule's code, or all attributes except tensors and submodules."""
    if isinstance(module, fx.GraphModule):
        return module.code
    return _stable_repr({name: value for name, value in vars(module).items() if name not in _COMMON_ATTRIBUTES})


def _stable_repr(value: object) -> str:
    """Return text for ``value`` that is the same in every process: plain values, tensors and containers in full, other
    objects by type only."""
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_quantized or value.is_meta):
        return f"{name}{list(value.shape)}{value.dtype}{hashlib.sha256(_bytes(value)).hexdigest()}"
    if isinstance(value, Mapping):
        return f"{name}{[(_stable_repr(key), _stable_repr(one)) for key, one in value.items()]}"
    if isinstance(value, (list, tuple)):
        return f"{name}{[_stable_repr(one) for one in value]}"
    if isinstance(value, (set, frozenset)):
        return f"{name}{sorted(_stable_repr(one) for one in value)}"
    if isinstance(value, partial):
        return f"{name}{[_stable_repr(one) for one in (value.func, value.args, value.keywords)]}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{name}{_stable_repr(vars(value))}"
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
