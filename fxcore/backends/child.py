"""The process in which torch.export and the compilers run: ``python -m fxcore.backends.child DIR``.

DIR holds a module and ``job.json`` (:mod:`fxcore.backends.artifacts` writes them) and gets the artifact. The last
line of what is printed is the reason where it fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxcore.backends.base import Inputs, said
from fxcore.process import load_module


def main(folder: Path) -> None:
    os.nice(10)  # a service answers requests meanwhile
    job = json.loads((folder / "job.json").read_text())
    module, saved = load_module(folder)
    example: Inputs = saved["example"]
    if job["backend"] == "openvino":
        _to_openvino(module, example, saved["calibration"] if job["int8"] else None, folder)
    else:
        _to_inductor(module, example, job, folder)


def exported(module: nn.Module, example: Inputs) -> Any:
    """``torch.export`` with any number of rows, and any height and width where the model takes them."""
    sizes: tuple[dict[int, Any], ...] = tuple(
        {0: torch.export.Dim.DYNAMIC} | {d: torch.export.Dim.AUTO for d in range(x.ndim - 2, x.ndim)} for x in example
    )
    with torch.no_grad():
        try:
            return torch.export.export(module, example, dynamic_shapes=sizes)
        except Exception:  # a model that computes with its sizes may still go for the usual one
            fixed = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
            return torch.export.export(module, example, dynamic_shapes=fixed)


def _to_openvino(module: nn.Module, example: Inputs, calibration: list[Inputs] | None, folder: Path) -> None:
    import openvino

    model = openvino.convert_model(exported(module, example))
    if calibration is not None:
        import nncf

        attention = any("Attention" in type(m).__name__ for m in module.modules())
        model = nncf.quantize(
            model,
            nncf.Dataset([[x.numpy() for x in row] for row in calibration]),
            subset_size=len(calibration),
            model_type=nncf.ModelType.TRANSFORMER if attention else None,
        )
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


def _to_inductor(module: nn.Module, example: Inputs, job: dict[str, Any], folder: Path) -> None:
    device = torch.device(job["device"])
    torch.set_num_threads(job["threads"])  # is written into the generated code
    options = {"freezing": True}
    if device.type == "cuda":
        options |= {"max_autotune": True}
    program = exported(module.to(device), tuple(x.to(device) for x in example))
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=options
        )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(said(error), file=sys.stderr)
        sys.exit(1)
