"""OpenVINO on the CPU: float32, and int8 through NNCF.

The memory of inputs and outputs is torch's own, which OpenVINO reads and writes without a copy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fxcore.backends.artifacts import compiled
from fxcore.backends.base import Inputs, LoweringFailed, Options, by_key, distinct_outputs

_REMEMBERED_SHAPES = 64


class OpenVINO:
    """The fastest on CPUs, where it is installed (extra ``openvino``)."""

    name = "openvino"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed; install fxserve[openvino]"
        if device.type != "cpu":
            return f"openvino runs on the CPU and this service on {device}"
        if precision == "int8" and importlib.util.find_spec("nncf") is None:
            return "int8 needs nncf; install fxserve[openvino]"
        if precision not in ("float32", "int8"):
            return f"openvino serves float32 and int8, not {precision}"
        return None

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> OpenVINOModule:
        int8 = options.precision == "int8"
        if int8 and not options.calibration:
            raise LoweringFailed("int8 needs images to calibrate on", backend=self.name)
        unique, places = distinct_outputs(module)
        packages = ("openvino", "nncf") if int8 else ("openvino",)
        return compiled(
            self.name,
            unique,
            example,
            options,
            packages,
            lambda folder: OpenVINOModule(folder / "model.xml", places, options.threads),
            int8=int8,
        )


class OpenVINOModule:
    """A :class:`~fxcore.backends.base.Lowered` over one inference request."""

    def __init__(self, path: Path, places: dict[str, int], threads: int) -> None:
        import openvino

        self._tensor = openvino.Tensor
        self._places = places
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": False})  # weights are repacked; a mapped file would stay beside them
        model = core.read_model(path)
        # Images come as decoders write them, channels last, which is also what the first convolution likes to read.
        self._channels_last = [x.partial_shape.rank.get_length() == 4 for x in model.inputs]
        layouts = openvino.preprocess.PrePostProcessor(model)
        for place, channels_last in enumerate(self._channels_last):
            if channels_last:
                layouts.input(place).tensor().set_layout(openvino.Layout("NHWC"))
                layouts.input(place).model().set_layout(openvino.Layout("NCHW"))
        self._compiled: Any = core.compile_model(
            layouts.build(),
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "f32",
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": threads,
                "ENABLE_CPU_PINNING": False,  # decoders share these cores
            },
        )
        self._request = self._compiled.create_infer_request()
        self._bytes = path.with_suffix(".bin").stat().st_size
        self._shapes: dict[tuple[torch.Size, ...], list[tuple[tuple[int, ...], np.dtype[Any]]]] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        shapes = tuple(x.shape for x in inputs)
        known = self._shapes.get(shapes)
        # Which shapes come out is known only afterwards; from then on their memory is given beforehand.
        request = self._request if known is not None else self._compiled.create_infer_request()
        given = []  # OpenVINO does not keep the memory that it is given
        for place, (x, channels_last) in enumerate(zip(inputs, self._channels_last, strict=True)):
            # By NumPy, as every call of torch gives the interpreter's lock away and waits to get it back.
            array = (x.detach() if x.requires_grad else x).numpy()
            given.append(np.ascontiguousarray(array.transpose(0, 2, 3, 1) if channels_last else array))
            request.set_input_tensor(place, self._tensor(given[place], shared_memory=True))
        if known is not None:
            arrays = [np.empty(shape, dtype) for shape, dtype in known]
            for place, array in enumerate(arrays):
                request.set_output_tensor(place, self._tensor(array, shared_memory=True))
            request.infer(share_outputs=True)  # else it returns a copy of them all, which nobody looks at
        else:
            request.infer(share_outputs=True)
            arrays = [tensor.data.copy() for tensor in request.output_tensors]
            if len(self._shapes) >= _REMEMBERED_SHAPES:
                self._shapes.clear()
            self._shapes[shapes] = [(array.shape, array.dtype) for array in arrays]
        return by_key(self._places, [torch.from_numpy(array) for array in arrays], inputs)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes}
