"""Weights in memory that the processes of one server share, by mapping the same file."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from fxcore.backends.backend import tensors_of

log = logging.getLogger("fxserve")

_ALIGNMENT = 64
"""Bytes that vector instructions read at a time; torch aligns tensors to as many."""

_FREE = 2
"""Bytes that must be free on the disk for each byte of a file: extractors and metrics are in the same folder."""


def share(module: nn.Module, file: Path) -> None:
    """Move the parameters and buffers of ``module`` to memory that is mapped from ``file``; values stay the same.

    The first process writes the file. Pages that a process writes to become its own. Where there is no space for the
    file, or it holds other values, such as those of weights that were replaced since, the module stays as it is.
    """
    tensors = [tensor for tensor in tensors_of(module) if _has_plain_memory(tensor)]
    offsets: dict[int, int] = {}  # by address, as tied weights are in memory once
    size = 0
    for tensor in tensors:
        if tensor.data_ptr() not in offsets:
            offsets[tensor.data_ptr()] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not tensors:
        return
    try:
        if not file.exists():
            if shutil.disk_usage(file.parent).free < _FREE * size:
                return
            _write(file, {tensor.data_ptr(): tensor for tensor in tensors}.values())
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:  # the latter of a file that is too short
        log.warning("a model's weights are not shared with other processes: %s", error)
        return
    copies = [
        torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[tensor.data_ptr()])
        for tensor in tensors
    ]
    if all(torch.equal(_bytes(tensor), _bytes(copy)) for tensor, copy in zip(tensors, copies, strict=True)):
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data = copy.view(tensor.shape)


def _has_plain_memory(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is the whole of its storage, in memory order."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _write(file: Path, tensors: Iterable[Tensor]) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent) as opened:
        for tensor in tensors:
            opened.write(_bytes(tensor).numpy().data)
            opened.write(bytes(-tensor.nbytes % _ALIGNMENT))
        opened.flush()
        with contextlib.suppress(FileExistsError):  # another process was faster: its file is the one that all map
            os.link(opened.name, file)
