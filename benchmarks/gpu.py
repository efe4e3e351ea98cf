"""Throughput on a CUDA device: models in-process on each backend, and over HTTP.

    python benchmarks/gpu.py                                        # some twenty minutes; needs a CUDA device
    python benchmarks/gpu.py --models resnet50 --precisions bfloat16 --seconds 2

In-process: images/s of the model alone at the best of several batch sizes, with random images on the device. Over HTTP:
JPEG files in, safetensors out, one or 32 files per request; the ratio is to the same decoding and computing in-process.
"""

from __future__ import annotations

import argparse
import time

import load
import photos
import servers
import torch
from serve import SAFETENSORS, extractor, say, table

from fxcore import build_extractor, get_model, model_graph
from fxcore.backends import BACKENDS, LoweringFailed, Options
from fxcore.models.weights import load_model

NODES = {"resnet50": ["layer3", "layer4"], "vit_b_16": ["encoder.layers.encoder_layer_5", "encoder.ln"]}
WAYS = ("eager", "cudagraphs", "inductor")
BATCHES = (32, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HTTP = ((1, 64), (32, 8))
"""Images per request, and connections."""


def in_process(model: str, precision: str, seconds: float) -> list[tuple[str, ...]]:
    """Measure each backend; returns a row for each."""
    device, dtype = torch.device("cuda"), DTYPES[precision]
    module = load_model(get_model(model), "random", None).to(device, dtype)
    graph = model_graph(model)
    made = build_extractor(graph, module, graph.resolve(NODES[model]), dtype)
    rows = []
    for way in WAYS:
        options = Options(device=device, precision=precision)
        example = torch.randn(2, 3, 224, 224, device=device, dtype=dtype)
        try:
            lowered = BACKENDS[way].lower(made.module, (example,), options)
        except LoweringFailed as error:
            say(f"{model} {precision} {way}: {error.detail}")
            continue
        best = (0.0, 0)
        for size in BATCHES:
            x = torch.randn(size, 3, 224, 224, device=device, dtype=dtype)
            best = max(best, (_rate(lambda x=x, lowered=lowered: lowered(x), size, seconds), size))  # type: ignore[misc]
        rows.append((model, precision, f"in-process, {way}, batch {best[1]}", f"{best[0]:.0f}", "", "", ""))
        say(" ".join(rows[-1]))
    return rows


def _rate(run: object, size: int, seconds: float) -> float:
    assert callable(run)
    with torch.inference_mode():
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            for _ in range(10):
                run()
            torch.cuda.synchronize()
            done += 10 * size
        return done / (time.perf_counter() - started)


def over_http(model: str, precision: str, seconds: float, settle: float) -> list[tuple[str, ...]]:
    """Measure each number of images per request, pooled and not; returns a row for each."""
    spec = {
        "model": model,
        "weights": "random",
        "return_nodes": NODES[model],
        "precision": precision,
        "backend": "auto",
    }
    rows = []
    with servers.fxserve(max_batch=128, max_inflight_bytes=16 * 1024**3) as server:
        path, backend = extractor(server, spec, settle)
        for pooled in (True, False):
            with servers.ceiling(spec, seconds / 2, settle, pooled=pooled) as ceiling:
                say(f"{model} {precision} in-process ({ceiling.backend}): {ceiling.how}")
                for images, connections in HTTP:
                    requests = _requests(server.port, path + ("?pool=avg" if pooled else ""), images)
                    found = load.run(server.port, requests, connections, seconds, 3.0)
                    rate, ratio = found.rate * images, found.rate * images / ceiling.measure()
                    what = f"HTTP, {backend}, {images} JPEG a request, {'pooled' if pooled else 'full maps'}"
                    times = f"{found.p50:.1f}", f"{found.p99:.1f}"
                    rows.append((model, precision, what, f"{rate:.0f}", *times, f"{ratio:.2f}"))
                    say(" ".join(rows[-1]))
    return rows


def _requests(port: int, path: str, images: int) -> list[bytes]:
    files = photos.jpegs()
    if images == 1:
        return [load.http(port, path, data, "image/jpeg", SAFETENSORS) for data in files]
    body, kind = photos.multipart([files[i % len(files)] for i in range(images)])
    return [load.http(port, path, body, kind, SAFETENSORS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NODES))
    parser.add_argument("--precisions", default=",".join(DTYPES))
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--settle", type=float, default=120.0, help="seconds to wait for backend=auto to lower")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    rows: list[tuple[str, ...]] = []
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            rows += in_process(model, precision, options.seconds)
            rows += over_http(model, precision, options.seconds, options.settle)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}. Images/s; milliseconds.\n")
    head = ("model", "precision", "what", "images/s", "p50", "p99", "of decode + compute")
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
