"""OpenVINO on the CPU: float32, bfloat16 where the processor supports it, and int8 through NNCF.

OpenVINO reads inputs from torch's memory and writes outputs to it without a copy.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from fxcore.backends.artifacts import compiled, may_be_mapped
from fxcore.backends.backend import LoweringFailed, Options, by_key, distinct_outputs
from fxcore.backends.process import check_threads
from fxcore.backends.processor import adds_int8_products_exactly, computes_bfloat16
from fxcore.backends.residents import RESIDENTS, Resident
from fxcore.memory import LIVE_ACTIVATIONS
from fxcore.passes.effects import may_branch
from fxcore.tensors import Tensors

_MAX_KNOWN_SHAPES = 64

_FIXED_ROWS = 8
_FIXED_WEIGHTS = 32 * 1024**2
_FIXED_BYTES = 256 * 1024**2
"""Limits for models compiled for a fixed shape. Batches of at most ``_FIXED_ROWS`` rows get one if the weights have at
most ``_FIXED_WEIGHTS`` bytes and all fixed-shape models together at most ``_FIXED_BYTES``.

OpenVINO prepares a dynamic-shape model again whenever the batch size changes, and cannot choose kernels for one size.
For small networks a fixed-shape model is a few per cent faster, and up to a third faster after a batch of another size.
Each has its own packed weights, which take too much memory for large networks, where the gain is smaller too.
"""

_CACHED = 8 * 1024**2
"""Maximum bytes per thread of the largest value of a batch that is computed at once.

A larger batch is split and computed by fixed-shape models, because rows take longer when values do not fit the cache:
mobilenet_v3_large takes 2.8 ms per row for 4 rows and 3.2 ms for 8, on two cores with 32 MB of cache.
"""

_PACKED = 5 / 4
"""Estimated bytes of packed weights (in the formats for several batch sizes) per byte of stored weights. OpenVINO keeps
the stored weights as well."""

THREADS_EACH = 2
"""Threads that OpenVINO starts for each compiled model that computes on more than one thread."""

_OBJECTS = 512 * 1024
"""Estimated bytes of a compiled model besides weights and values: its graph, generated code, and thread stacks."""

_X86 = ("x86_64", "AMD64")

Shapes = tuple[torch.Size, ...]
CompilerSettings = dict[str, Any]


class OpenVINO:
    """OpenVINO's CPU plugin, in float32, bfloat16 and int8; needs the extra ``openvino``."""

    name = "openvino"

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed; install fxserve[openvino]"
        if device.type != "cpu":
            return f"openvino runs on the CPU, not on {device}"
        if precision == "int8" and importlib.util.find_spec("nncf") is None:
            return "int8 needs nncf; install fxserve[openvino]"
        if precision == "bfloat16" and not (platform.machine() in _X86 and computes_bfloat16()):
            return "openvino serves bfloat16 only on processors with AVX-512 BF16 or AMX"
        if precision not in ("float32", "bfloat16", "int8"):
            return f"openvino serves float32, bfloat16 and int8, not {precision}"
        return None

    def lower(self, module: fx.GraphModule, example: Tensors, options: Options) -> OpenVINOModule:
        int8 = options.precision == "int8"
        if int8 and not options.calibration:
            raise LoweringFailed("int8 needs images to calibrate on", backend=self.name)
        unique, places = distinct_outputs(module)
        if all(place < 0 for place in places.values()):
            raise LoweringFailed("it returns only its inputs, so there is nothing to compile", backend=self.name)
        usual = [x.shape[1:] for x in example]
        packages = ("openvino", "nncf") if int8 else ("openvino",)
        return compiled(
            self.name,
            unique,
            example,
            options,
            packages,
            lambda folder: OpenVINOModule(folder / "model.xml", places, usual, _settings(options)),
            conversion=4,  # increment when conversion changes, to invalidate older artifacts
            any_size=not any(may_branch(unique, node) for node in unique.graph.nodes),
            int8=int8,
            overflows=int8 and not adds_int8_products_exactly(),
        )


@dataclass
class _Compiled:
    """A compiled model, and for one input size the shape and dtype of each output and the bytes of intermediates."""

    resident: Resident
    outputs: list[tuple[tuple[int, ...], np.dtype[Any]]]
    scratch: int

    def empty_outputs(self) -> list[NDArray[Any]]:
        return [np.empty(shape, dtype) for shape, dtype in self.outputs]

    def has_rows_of(self, rows: int) -> bool:
        """Return whether the number of rows of each output is a multiple of ``rows``."""
        return all(shape and shape[0] % rows == 0 for shape, _ in self.outputs)


class OpenVINOModule:
    """A :class:`~fxcore.backends.backend.Lowered` of dynamic shape, with fixed-shape models for small networks.

    Rows are assumed to be independent of each other.

    Args:
        path: file of the model in OpenVINO's format.
        places: see :func:`~fxcore.backends.backend.distinct_outputs`.
        usual: shape of one row of each input; fixed-shape models are compiled for this row shape only.
        settings: compiler settings.
    """

    recalled = False

    def __init__(
        self, path: Path, places: dict[str, int], usual: Sequence[torch.Size], settings: CompilerSettings
    ) -> None:
        from fxcore.backends.openvino_package import openvino

        self._openvino = openvino
        self._places = places
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": may_be_mapped(path.parent)})
        model = _with_images_channels_last(core.read_model(path))
        self._channels_last = [_is_channels_last(x) for x in model.inputs]
        threads = settings["INFERENCE_NUM_THREADS"]
        check_threads(THREADS_EACH + threads)  # OpenVINO spins forever if it cannot start its threads
        self._compiled = core.compile_model(model, "CPU", settings)
        self._input_types = [x.element_type for x in self._compiled.inputs]
        self._output_types = [x.element_type for x in self._compiled.outputs]
        self._any_size = Resident(self._compiled)
        RESIDENTS.add(self._any_size)
        self._bytes = path.with_suffix(".bin").stat().st_size
        _reshape(model, [torch.Size((2, *row)) for row in usual])
        self._outputs_follow_inputs = all(x.partial_shape.is_static for x in model.outputs)
        # Bytes per input value.
        largest = _largest(model)
        self._scratch = LIVE_ACTIVATIONS * largest / sum(2 * row.numel() for row in usual)
        self._part = _rows_of_a_part(largest // 2, threads)
        fixable = self._bytes <= _FIXED_WEIGHTS and self._outputs_follow_inputs
        self._fixed = _FixedModels(core, model if fixable else None, settings, tuple(usual), self._bytes)
        self._seen: dict[Shapes, _Compiled] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        given = self._arrays(inputs)  # keep a reference: OpenVINO does not keep this memory alive
        shapes = tuple(x.shape for x in inputs)
        parts = self._parts(shapes)
        if len(parts) > 1:
            arrays = self._run_parts(parts, given)
        elif (known := parts[0][1] if parts else self._seen.get(shapes)) is not None:
            arrays = known.empty_outputs()
            self._run_known(known, given, arrays)
        else:
            arrays = self._run(shapes, given)
        outputs = [torch.from_numpy(array) for array in arrays]
        for place, type_ in enumerate(self._output_types):
            if type_ == self._openvino.Type.bf16:
                outputs[place] = outputs[place].view(torch.bfloat16)
        return by_key(self._places, outputs, inputs)

    def storages(self) -> dict[int, int]:
        return {id(self): self._bytes + int(self._bytes * _PACKED) + _OBJECTS}

    @property
    def grown(self) -> int:
        fixed = self._fixed.compiled()
        # Fixed-shape models share the stored weights but have their own packed ones.
        scratch = self._any_size.scratch + sum(one.resident.scratch for one in fixed)
        return scratch + len(fixed) * (int(self._bytes * _PACKED) + _OBJECTS)

    def _parts(self, shapes: Shapes) -> list[tuple[range, _Compiled]]:
        """Split the batch into parts of (rows, fixed-shape model); return an empty list if a part has no such model."""
        rows = shapes[0][0]
        if rows <= self._part or any(shape[0] != rows for shape in shapes):
            fixed = self._fixed.get(shapes)
            return [] if fixed is None else [(range(rows), fixed)]
        parts = []
        for start in range(0, rows, self._part):
            part = range(start, min(start + self._part, rows))
            fixed = self._fixed.get(tuple(torch.Size((len(part), *shape[1:])) for shape in shapes))
            if fixed is None or not fixed.has_rows_of(len(part)):
                return []
            parts.append((part, fixed))
        return parts

    def _run_parts(self, parts: list[tuple[range, _Compiled]], given: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the fixed-shape models of a split batch; each writes its rows of the outputs."""
        part, fixed = parts[0]
        rows = len(given[0])
        arrays = [np.empty((count * rows // len(part), *row), dtype) for (count, *row), dtype in fixed.outputs]
        for part, fixed in parts:
            made = [array[len(array) * part.start // rows : len(array) * part.stop // rows] for array in arrays]
            self._run_known(fixed, [x[part.start : part.stop] for x in given], made)
        return arrays

    def _run_known(self, known: _Compiled, given: list[NDArray[Any]], arrays: list[NDArray[Any]]) -> None:
        """Run a model with known output shapes; it writes its outputs to ``arrays``."""
        request = known.resident.request
        self._share(request.set_input_tensor, given, self._input_types)
        self._share(request.set_output_tensor, arrays, self._output_types)
        request.infer(share_outputs=True)  # without this it returns copies of all outputs
        RESIDENTS.ran(known.resident, known.scratch)

    def _run(self, shapes: Shapes, given: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the dynamic-shape model, copy its outputs, and record their shapes unless they depend on values."""
        request = self._compiled.create_infer_request()
        self._share(request.set_input_tensor, given, self._input_types)
        request.infer(share_outputs=True)
        arrays = [tensor.data.copy() for tensor in request.output_tensors]
        scratch = int(self._scratch * sum(x.size for x in given))
        if self._outputs_follow_inputs:
            if len(self._seen) >= _MAX_KNOWN_SHAPES:
                self._seen.clear()
            self._seen[shapes] = _Compiled(self._any_size, [(array.shape, array.dtype) for array in arrays], scratch)
        RESIDENTS.ran(self._any_size, scratch)
        return arrays

    def _arrays(self, inputs: Tensors) -> list[NDArray[Any]]:
        """Return the inputs in the model's layout, sharing torch's memory where it already has that layout."""
        # Use NumPy: each call into torch releases the GIL and has to reacquire it.
        arrays = []
        for x, type_ in zip(inputs, self._input_types, strict=True):
            if type_ == self._openvino.Type.bf16:
                assert x.dtype == torch.bfloat16, "an extractor's inputs have its dtype"
                x = x.view(torch.float16)  # the same bits: NumPy has no bfloat16
            arrays.append((x.detach() if x.requires_grad else x).numpy())
        placed = zip(arrays, self._channels_last, strict=True)
        return [np.ascontiguousarray(array.transpose(0, 2, 3, 1) if last else array) for array, last in placed]

    def _share(
        self, set_tensor: Callable[[int, Any], None], arrays: Sequence[NDArray[Any]], types: Sequence[Any]
    ) -> None:
        """Set ``arrays`` as inputs or outputs of a request without a copy; ``types`` are the model's types."""
        tensor, bf16 = self._openvino.Tensor, self._openvino.Type.bf16
        for place, (array, type_) in enumerate(zip(arrays, types, strict=True)):
            if type_ == bf16:  # the arrays are float16, since NumPy has no bfloat16
                set_tensor(place, tensor(array, self._openvino.Shape(array.shape), bf16))
            else:
                set_tensor(place, tensor(array, shared_memory=True))


class _FixedModels:
    """Fixed-shape models, each compiled when the first batch of its size runs, within the limits above.

    Args:
        core: the ``openvino.Core``.
        model: the model to reshape and compile; None for no fixed-shape models.
        settings: compiler settings.
        usual: shape of one row of each input.
        stored: bytes of the model's weights.
    """

    def __init__(self, core: Any, model: Any, settings: CompilerSettings, usual: Shapes, stored: int) -> None:
        self._core = core
        self._model = model
        self._settings = settings
        self._usual = usual
        self._packed = int(stored * _PACKED)
        self._compiled: dict[Shapes, _Compiled] = {}

    def get(self, shapes: Shapes) -> _Compiled | None:
        """Return the model for inputs of ``shapes``, compiling it if necessary; None if a limit does not allow it."""
        return self._compiled.get(shapes) or self._compile(shapes)

    def compiled(self) -> list[_Compiled]:
        """Return a new list, since another thread may compile meanwhile."""
        return list(self._compiled.values())

    def _compile(self, shapes: Shapes) -> _Compiled | None:
        if self._model is None or shapes[0][0] > _FIXED_ROWS or tuple(shape[1:] for shape in shapes) != self._usual:
            return None
        _reshape(self._model, shapes)
        scratch = LIVE_ACTIVATIONS * _largest(self._model)
        if sum(self._packed + one.scratch for one in self._compiled.values()) + self._packed + scratch > _FIXED_BYTES:
            self._model = None
            return None
        if not RESIDENTS.reserve_fixed():
            return None
        try:
            check_threads(THREADS_EACH)
        except RuntimeError:
            return None
        made = self._core.compile_model(self._model, "CPU", self._settings)
        outputs = [(tuple(x.shape), x.element_type.to_dtype()) for x in made.outputs]
        models = self._compiled
        resident = Resident(made, lambda: models.pop(shapes, None))
        RESIDENTS.add(resident)
        models[shapes] = _Compiled(resident, outputs, scratch)
        return models[shapes]


def _rows_of_a_part(row_bytes: int, threads: int) -> int:
    """Return the number of rows above which batches are split; ``sys.maxsize`` if parts had too few for ``threads``.

    Args:
        row_bytes: bytes of the largest value for one row.
    """
    cached = threads * _CACHED // max(1, row_bytes)
    rows = min(_FIXED_ROWS, 1 << cached.bit_length() >> 1)
    return rows if rows >= threads else sys.maxsize


def _settings(options: Options) -> CompilerSettings:
    settings: CompilerSettings = {
        "INFERENCE_PRECISION_HINT": "bf16" if options.precision == "bfloat16" else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": options.threads,
        "ENABLE_CPU_PINNING": False,  # decoders share these cores
    }
    if options.threads == 1:
        settings["NUM_STREAMS"] = 0  # compute on the calling thread and start no other
    return settings


def _with_images_channels_last(model: Any) -> Any:
    """Make ``model`` accept channels-last images: they are decoded that way, and the first convolution is fastest."""
    from fxcore.backends.openvino_package import openvino

    layouts = openvino.preprocess.PrePostProcessor(model)
    for place, one in enumerate(model.inputs):
        if _is_channels_last(one):
            layouts.input(place).tensor().set_layout(openvino.Layout("NHWC"))
            layouts.input(place).model().set_layout(openvino.Layout("NCHW"))
    return layouts.build()


def _is_channels_last(model_input: Any) -> bool:
    return bool(model_input.partial_shape.rank.get_length() == 4)


def _reshape(model: Any, shapes: Sequence[torch.Size]) -> None:
    """Set the input shapes of ``model``; ``shapes`` are channels first."""
    sizes = {}
    for place, ((rows, channels, *rest), one) in enumerate(zip(shapes, model.inputs, strict=True)):
        sizes[place] = [rows, *rest, channels] if _is_channels_last(one) else [rows, channels, *rest]
    model.reshape(sizes)


def _largest(model: Any) -> int:
    """Return the bytes of the largest value that ``model`` computes; 0 if its shapes are dynamic."""
    computed = (op for op in model.get_ops() if op.get_type_name() not in ("Constant", "Parameter"))
    values = (output for op in computed for output in op.outputs())
    return max((value.tensor.size for value in values if value.partial_shape.is_static), default=0)
