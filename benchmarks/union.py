"""Two extractors over one model: a batch for each, or one batch over the union of their nodes?

    python benchmarks/union.py

One extracts C3 and the other C5, each of its own images. Separate batches are smaller, and the first stops at C3; the
union runs one larger batch up to C5. Prints milliseconds for the same images, and the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from serve import machine, table

from fxcore import build_extractor, get_model, model_graph
from fxcore.backends import BACKENDS, Lowered, Options
from fxcore.models.weights import load_model

CPU = torch.device("cpu")


def lowered(model: str, nodes: list[str], backend: str, threads: int) -> Lowered:
    graph = model_graph(model)
    made = build_extractor(graph, load_model(get_model(model), "random", None), graph.resolve(nodes))
    return BACKENDS[backend].lower(made.module, (torch.randn(2, 3, 224, 224),), Options(threads=threads))


def milliseconds(run: Callable[[], object], runs: int) -> float:
    taken = []
    with torch.inference_mode():
        for _ in range(runs + 2):
            started = time.perf_counter()
            run()
            taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v3_small,resnet50")
    parser.add_argument("--images", default="1,8", help="images of each extractor")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    rows = []
    for backend in ("eager", "openvino"):
        if BACKENDS[backend].unavailable(CPU, "float32"):
            continue
        for model in options.models.split(","):
            first, second, both = (lowered(model, n, backend, threads) for n in (["C3"], ["C5"], ["C3", "C5"]))
            for images in map(int, options.images.split(",")):
                x = torch.randn(images, 3, 224, 224)
                two = torch.cat([x, x])
                each = milliseconds(lambda x=x, f=first, s=second: (f(x), s(x)), options.runs)  # type: ignore[misc]
                union = milliseconds(lambda two=two, b=both: b(two), options.runs)  # type: ignore[misc]
                ratio = f"{union / each:.2f}"
                rows.append((backend, model, f"{images} + {images}", f"{each:.1f}", f"{union:.1f}", ratio))
    print(f"{machine()}.\n")
    print("\n".join(table(("backend", "model", "images", "a batch each, ms", "union, ms", "ratio"), rows)))


if __name__ == "__main__":
    main()
