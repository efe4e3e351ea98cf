"""Weights that the processes of one server share in memory by mapping the same file."""

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
"""Alignment of tensors in the file, in bytes: the width of vector instructions, and torch's own alignment."""

_FREE = 2
"""Required free disk space, as a multiple of the file size: extractors and metrics are in the same folder."""


def share(module: nn.Module, file: Path) -> None:
    """Move the parameters and buffers of ``module`` to memory mapped from ``file``. Values do not change.

    The first process writes the file. Mapping is copy-on-write. The module is left unchanged if there is no space for
    the file, or if the file holds other values, for example because the weights have been replaced since.
    """
    tensors = [tensor for tensor in tensors_of(module) if _has_plain_memory(tensor)]
    offsets: dict[int, int] = {}  # by address: tied weights are in memory once
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
    except (OSError, ValueError) as error:  # ValueError: the file is too short
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
    """Return whether ``tensor`` is a contiguous CPU tensor that spans its whole storage."""
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
        with contextlib.suppress(FileExistsError):  # another process was faster; map its file
            os.link(opened.name, file)
