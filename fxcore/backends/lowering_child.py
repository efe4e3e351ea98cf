"""The child process that runs torch.export and the compilers: ``python -m fxcore.backends.lowering_child DIR``.

:mod:`fxcore.backends.artifacts` writes a module and settings to DIR; the artifact is written there.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from fxcore.backends import process
from fxcore.backends.inductor import compile_package
from fxcore.backends.ir import converted, quantized
from fxcore.tensors import Tensors


def work(folder: Path) -> None:
    module, saved = process.load_module(folder)
    example, settings = saved["example"], saved["settings"]
    if settings["backend"] == "openvino":
        _to_openvino(module, example, saved["calibration"], settings, folder)
    else:
        _to_inductor(module, example, settings, folder)


_ANY_SIZE_SECONDS = 20.0
"""CPU seconds allowed for an export with dynamic frames, height and width. Most models take less than ten. Shifted
windows (Swin, MaxViT) do so much arithmetic on their sizes that SymPy takes many minutes."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after ``seconds`` of CPU time of this process."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s of CPU time")

    signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)  # repeated, since torch may catch the exception
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def exported(module: nn.Module, example: Tensors) -> Any:
    """Export ``module`` with a dynamic batch size, and dynamic frames, height and width if the model supports them."""
    sizes: tuple[dict[int, Any], ...] = tuple(
        {0: torch.export.Dim.DYNAMIC} | {d: torch.export.Dim.AUTO for d in range(min(2, x.ndim - 2), x.ndim)}
        for x in example
    )
    with torch.no_grad():
        try:
            with _cpu_limit(_ANY_SIZE_SECONDS):
                return torch.export.export(module, example, dynamic_shapes=sizes)
        except Exception:  # a model that computes with its sizes may still export with a fixed size
            return _exported_at_one_size(module, example)


def _exported_at_one_size(module: nn.Module, example: Tensors) -> Any:
    """Export ``module`` with a dynamic batch size."""
    with torch.no_grad():
        sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
        return torch.export.export(module, example, dynamic_shapes=sizes)


def _to_openvino(
    module: nn.Module, example: Tensors, calibration: list[Tensors], settings: dict[str, Any], folder: Path
) -> None:
    from fxcore.backends.openvino_package import openvino

    try:
        # Code that was not traced may branch on the size, and torch.export records the branch taken for the example.
        model = converted(module, example, exported if settings["any_size"] else _exported_at_one_size)
    except Exception:  # OpenVINO does not know all operations on sizes
        model = converted(module, example, _exported_at_one_size)
    if calibration:
        model = quantized(model, calibration, settings["overflows"])
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


def _to_inductor(module: nn.Module, example: Tensors, settings: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(settings["threads"])  # built into the generated code
    program = _exported_at_one_size(module, example)  # of a dynamic size, it builds in that of the example in places
    with torch.no_grad():
        # Headers compiled in advance take longer than they save: this process compiles one package.
        ahead = {"cpp_cache_precompile_headers": False, "aot_inductor.precompile_headers": False}
        compile_package(program, folder / "model.pt2", {"freezing": True, **ahead})


if __name__ == "__main__":
    process.main(work)
