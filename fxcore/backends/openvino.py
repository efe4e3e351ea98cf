"""OpenVINO on the CPU: float32, and int8 through NNCF.

OpenVINO reads inputs from and writes outputs to torch's memory, without a copy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fxcore.backends.artifacts import compiled
from fxcore.backends.backend import Inputs, LoweringFailed, Options, by_key, distinct_outputs
from fxcore.backends.residents import RESIDENTS, Resident
from fxcore.memory import LIVE_ACTIVATIONS
from fxcore.process import check_threads

_MAX_KNOWN_SHAPES = 64

_FIXED_ROWS = 8
_FIXED_WEIGHTS = 32 * 1024**2
_FIXED_BYTES = 256 * 1024**2
"""Batches of at most ``_FIXED_ROWS`` rows get a compiled model of fixed size, if the weights have at most
``_FIXED_WEIGHTS`` bytes and all fixed models together at most ``_FIXED_BYTES``.

OpenVINO prepares a model of dynamic size again whenever the batch size changes, and cannot choose kernels for one size.
Fixed models of small networks take a few per cent less time, and up to a third less after a batch of another size. Each
has its own packed weights, which is too much memory for large networks, where the gain is smaller too.
"""

_PACKED = 5 / 4
"""Estimated bytes of packed weights, in the formats for several batch sizes, per byte of the stored weights, which
OpenVINO keeps as well."""

THREADS_EACH = 2
"""Threads that OpenVINO starts for each compiled model that computes on several."""

_OBJECTS = 512 * 1024
"""Estimated bytes of a compiled model beside weights and values: its graph, generated code, stacks of threads."""

Shapes = tuple[torch.Size, ...]


class OpenVINO:
    """OpenVINO's CPU plugin, in float32 and int8; needs the extra ``openvino``."""

    name = "openvino"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed; install fxserve[openvino]"
        if device.type != "cpu":
            return f"openvino runs on the CPU, not on {device}"
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
        usual = [x.shape[1:] for x in example]
        packages = ("openvino", "nncf") if int8 else ("openvino",)
        return compiled(
            self.name,
            unique,
            example,
            options,
            packages,
            lambda folder: OpenVINOModule(folder / "model.xml", places, usual, options.threads),
            int8=int8,
        )


@dataclass
class _Compiled:
    """A compiled model, the shape and dtype of each output, and bytes of intermediate values for one size."""

    resident: Resident
    outputs: list[tuple[tuple[int, ...], np.dtype[Any]]]
    scratch: int


class OpenVINOModule:
    """A :class:`~fxcore.backends.backend.Lowered` of dynamic size, with fixed models for small batches.

    Args:
        path: of the model in OpenVINO's format.
        places: see :func:`~fxcore.backends.backend.distinct_outputs`.
        usual: shape of one row of each input; fixed models are compiled for such rows only.
        threads: CPU threads that one call may use.
    """

    recalled = False

    def __init__(self, path: Path, places: dict[str, int], usual: Sequence[torch.Size], threads: int) -> None:
        import openvino

        self._tensor = openvino.Tensor
        self._places = places
        self._usual = tuple(usual)
        self._core = openvino.Core()
        self._core.set_property({"ENABLE_MMAP": False})  # weights are repacked; a mapped file would stay beside them
        model = self._core.read_model(path)
        # Decoded images are channels last, in which the first convolution is also fastest.
        self._channels_last = [x.partial_shape.rank.get_length() == 4 for x in model.inputs]
        layouts = openvino.preprocess.PrePostProcessor(model)
        for place, channels_last in enumerate(self._channels_last):
            if channels_last:
                layouts.input(place).tensor().set_layout(openvino.Layout("NHWC"))
                layouts.input(place).model().set_layout(openvino.Layout("NCHW"))
        model = layouts.build()
        self._settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,  # decoders share these cores
        }
        if threads == 1:
            self._settings["NUM_STREAMS"] = 0  # computes on the calling thread alone, and starts no other
        check_threads(THREADS_EACH + threads)  # OpenVINO spins forever if it cannot start its threads
        self._compiled = self._core.compile_model(model, "CPU", self._settings)
        self._any_size = Resident(self._compiled)
        RESIDENTS.add(self._any_size)
        self._bytes = path.with_suffix(".bin").stat().st_size
        self._reshape(model, [torch.Size((2, *row)) for row in usual])
        self._known_beforehand = all(x.partial_shape.is_static for x in model.outputs)
        # Bytes per input value.
        self._scratch = LIVE_ACTIVATIONS * _largest(model) / sum(2 * row.numel() for row in usual)
        self._model = model if self._bytes <= _FIXED_WEIGHTS and self._known_beforehand else None
        self._fixed: dict[Shapes, _Compiled] = {}
        self._seen: dict[Shapes, _Compiled] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        shapes = tuple(x.shape for x in inputs)
        known = self._fixed.get(shapes) or self._fix(shapes) or self._seen.get(shapes)
        resident = self._any_size if known is None else known.resident
        # The outputs' shapes are known only after a first pass; from then on, unless they depend on values, their
        # memory is allocated beforehand.
        request = self._compiled.create_infer_request() if known is None else known.resident.request
        given = []  # OpenVINO does not keep the memory that it is given
        for place, (x, channels_last) in enumerate(zip(inputs, self._channels_last, strict=True)):
            # By NumPy: each call into torch releases the GIL and has to wait for it again.
            array = (x.detach() if x.requires_grad else x).numpy()
            given.append(np.ascontiguousarray(array.transpose(0, 2, 3, 1) if channels_last else array))
            request.set_input_tensor(place, self._tensor(given[place], shared_memory=True))
        if known is not None:
            arrays = [np.empty(shape, dtype) for shape, dtype in known.outputs]
            for place, array in enumerate(arrays):
                request.set_output_tensor(place, self._tensor(array, shared_memory=True))
            request.infer(share_outputs=True)  # otherwise it returns copies of all outputs
        else:
            request.infer(share_outputs=True)
            arrays = [tensor.data.copy() for tensor in request.output_tensors]
            if self._known_beforehand:
                if len(self._seen) >= _MAX_KNOWN_SHAPES:
                    self._seen.clear()
                outputs = [(array.shape, array.dtype) for array in arrays]
                self._seen[shapes] = _Compiled(self._any_size, outputs, self._scratch_of(inputs))
        RESIDENTS.ran(resident, self._scratch_of(inputs) if known is None else known.scratch)
        return by_key(self._places, [torch.from_numpy(array) for array in arrays], inputs)

    def storages(self) -> dict[int, int]:
        fixed = list(self._fixed.values())  # a copy: another thread may compile meanwhile
        # Fixed models share the stored weights, and have their own packed ones.
        packed = int(self._bytes * _PACKED * (1 + len(fixed)))
        scratch = self._any_size.scratch + sum(one.resident.scratch for one in fixed)
        return {id(self): self._bytes + packed + scratch + _OBJECTS * (1 + len(fixed))}

    def _fix(self, shapes: Shapes) -> _Compiled | None:
        """Compile a fixed model for inputs of ``shapes``; None where a limit does not allow it."""
        if self._model is None or shapes[0][0] > _FIXED_ROWS or tuple(shape[1:] for shape in shapes) != self._usual:
            return None
        self._reshape(self._model, shapes)
        scratch = LIVE_ACTIVATIONS * _largest(self._model)
        size = int(self._bytes * _PACKED) + scratch
        if sum(int(self._bytes * _PACKED) + one.scratch for one in self._fixed.values()) + size > _FIXED_BYTES:
            self._model = None
            return None
        if not RESIDENTS.reserve_fixed():
            return None
        try:
            check_threads(THREADS_EACH)
        except RuntimeError:
            return None
        compiled = self._core.compile_model(self._model, "CPU", self._settings)
        outputs = [(tuple(x.shape), x.element_type.to_dtype()) for x in compiled.outputs]
        fixed = self._fixed
        resident = Resident(compiled, lambda: fixed.pop(shapes, None))
        RESIDENTS.add(resident)
        fixed[shapes] = _Compiled(resident, outputs, scratch)
        return fixed[shapes]

    def _scratch_of(self, inputs: Inputs) -> int:
        return int(self._scratch * sum(x.numel() for x in inputs))

    def _reshape(self, model: Any, shapes: Sequence[torch.Size]) -> None:
        """Set the input shapes of ``model``; ``shapes`` are channels first."""
        sizes = {}
        for place, ((rows, channels, *rest), last) in enumerate(zip(shapes, self._channels_last, strict=True)):
            sizes[place] = [rows, *rest, channels] if last else [rows, channels, *rest]
        model.reshape(sizes)


def _largest(model: Any) -> int:
    """Bytes of the largest value that ``model`` computes; 0 if its sizes are dynamic."""
    computed = (op for op in model.get_ops() if op.get_type_name() not in ("Constant", "Parameter"))
    values = (output for op in computed for output in op.outputs())
    return max((value.tensor.size for value in values if value.partial_shape.is_static), default=0)
