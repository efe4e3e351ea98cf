"""Reproduce the figures of the torch.fx paper (Reed et al., arXiv 2112.08429, section 6) on this machine.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/fx_paper.py  # else idle OpenMP threads spin while other backends run

Number of operations that torch.fx, torch.jit.trace and torch.jit.script record for resnet50; latency saved by Conv-BN
fusion on one thread and on all; int8 against float32; compiled backends against eager. Each pair is timed alternately
in one run, and ratios of medians are printed. The paper measures int8 on DeepRecommender and lowering to TensorRT on a
GPU; here both are resnet50 on a CPU, with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from serve import machine, table
from torch import Tensor, fx, nn

from fxcore import build_extractor, get_model, load_model, model_graph, profile, trace
from fxcore.backends import BACKENDS, Options
from fxcore.int8.quantize import quantize
from fxcore.photos import calibration_rows
from fxcore.transforms import fuse_conv_bn

MODEL = "resnet50"
CPU = torch.device("cpu")

Row = tuple[str, str, str]
Run = Callable[[], object]


def operations() -> Iterator[Row]:
    """Count the operations of each capture of the model, with modules inlined."""
    model = load_model(get_model(MODEL), "random")
    example = torch.zeros(1, 3, 224, 224)
    scripted = torch.jit.script(model)
    torch._C._jit_pass_inline(scripted.graph)
    yield "operations, torch.jit.script", "2614", str(jit_nodes(scripted.graph))
    traced = torch.jit.trace(model, example)
    yield "operations, torch.jit.trace", "860", str(jit_nodes(traced.inlined_graph))
    yield "operations, torch.fx", "445", str(len(trace(model).graph.nodes))


def jit_nodes(block: object) -> int:
    """Count the nodes of a TorchScript graph or block, including nested blocks."""
    return sum(1 + sum(map(jit_nodes, node.blocks())) for node in block.nodes())  # type: ignore[attr-defined]


def fusion(module: fx.GraphModule, x: Tensor, runs: int) -> Iterator[Row]:
    """Measure the latency saved by Conv-BN folding, by folding with channels_last, and by the eager backend.

    The eager backend also packs convolutions for oneDNN, fused with the activation or addition that follows, and makes
    the remaining operations in-place. All are compared with the unmodified model in contiguous memory format. The share
    of batch norms is an upper bound for the time that folding saves.
    """
    fused = fuse_conv_bn(module)
    last = fuse_conv_bn(module)
    last.to(memory_format=torch.channels_last)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    every = torch.get_num_threads()
    eager = BACKENDS["eager"].lower(module, (torch.cat([x, x]),), Options(threads=every))
    for threads, label, paper in ((1, "one thread", "18 %"), (every, f"all threads ({every})", "40 %")):
        torch.set_num_threads(threads)
        norms = {n.name for n in module.graph.nodes if n.op == "call_module" and is_norm(module, n)}
        share = sum(n.share for n in profile(module, x, runs=5).nodes if n.fx_name in norms)
        yield f"batch norms' share of the time, {label}", "", f"{share:.0%}"
        plain, folded, both, all_of_it = in_turns(
            runs, lambda: module(x), lambda: fused(x), lambda: last(nhwc), lambda: eager(x)
        )
        yield f"Conv-BN folded alone, latency saved, {label}", paper, f"{1 - folded / plain:.0%}"
        yield f"… and channels_last, {label}", "", f"{1 - both / plain:.0%}"
        yield f"… the eager backend as served, {label}", "", f"{1 - all_of_it / plain:.0%}"
    torch.set_num_threads(every)


def is_norm(module: fx.GraphModule, node: fx.Node) -> bool:
    return isinstance(module.get_submodule(str(node.target)), nn.BatchNorm2d)


def int8(module: fx.GraphModule, rows: list[tuple[Tensor, ...]], x: Tensor, runs: int) -> Iterator[Row]:
    """Compare FX graph-mode int8 with the float module, unmodified and with batch norms folded."""
    quantized = quantize(module, rows).module
    fused = fuse_conv_bn(module)
    fused.to(memory_format=torch.channels_last)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    plain, best, taken = in_turns(runs, lambda: module(x), lambda: fused(nhwc), lambda: quantized(nhwc))
    yield "int8, times as fast as float32", "3.3", f"{plain / taken:.2f}"
    yield "… as float32 fused, channels_last", "", f"{best / taken:.2f}"


def lowering(module: fx.GraphModule, x: Tensor, runs: int) -> Iterator[Row]:
    """Compare each installed compiled backend with the plain module and with the eager backend."""
    options = Options(threads=torch.get_num_threads())
    example = (torch.cat([x, x]),)
    eager = BACKENDS["eager"].lower(module, example, options)
    for name in ("openvino", "inductor"):
        if (why := BACKENDS[name].unavailable(CPU, "float32")) is not None:
            yield f"lowering to {name}", "", why
            continue
        lowered = BACKENDS[name].lower(module, example, options)
        plain, best, taken = in_turns(
            runs,
            lambda: module(x),
            lambda: eager(x),
            lambda lowered=lowered: lowered(x),  # type: ignore[misc]
        )
        yield f"lowering to {name}, times as fast as eager", "3.7 (TensorRT)", f"{plain / taken:.2f}"
        yield "… as the eager backend as served", "", f"{best / taken:.2f}"


def in_turns(runs: int, *functions: Run) -> list[float]:
    """Time functions alternately, so that other load on the machine affects all; return the median seconds of each."""
    taken: list[list[float]] = [[] for _ in functions]
    with torch.inference_mode():
        for run in range(runs + 2):
            for function, seconds in zip(functions, taken, strict=True):
                started = time.perf_counter()
                function()
                if run >= 2:
                    seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="number of runs of each median")
    parser.add_argument("--batch", type=int, default=1, help="batch size")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    graph = model_graph(MODEL)
    module = build_extractor(graph, load_model(get_model(MODEL), "random"), graph.resolve(["fc"])).module
    rows = calibration_rows(graph.preprocessing, graph.inputs, graph.input_size, count=16)
    x = torch.cat([row[0] for row in (rows * options.batch)[: options.batch]])
    print(f"{MODEL}, batch of {options.batch}, {machine()}, torch {torch.__version__}\n")
    found = [*operations(), *fusion(module, x, options.runs), *int8(module, rows, x, options.runs)]
    found += lowering(module, x, options.runs)
    print("\n".join(table(("", "paper", "here"), found)))


if __name__ == "__main__":
    main()
