"""Throughput, latency and memory on a CUDA device: models in-process, with decoding, and over HTTP.

    python benchmarks/gpu.py                                   # some eight minutes; needs a CUDA device
    python benchmarks/gpu.py --sections memory                 # one section
    python benchmarks/gpu.py --models resnet50 --seconds 1

``model``: images/s of eager and of CUDA graphs by precision and batch size, random images on the device, medians.
``decode``: JPEG files decoded on all cores, computed, and pooled values copied to the host; the best setup of
``ceiling.py``. ``http``: the same work over HTTP, with 1, 4 and 8 server processes on one device, as single images over
1, 32 and 256 connections and as 32 images per request. It is compared with the capacity of the processes' event loops:
the same request for the model's input and an image of 32 x 32 pixels. ``memory``: the device's memory with one
extractor over resnet50, with fifty, and after they were evicted.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Sequence

import load
import photos
import PIL.Image
import servers
import torch
from serve import SAFETENSORS, extractor, say, table

from fxcore import build_extractor, get_model, model_graph
from fxcore.backends import BACKENDS, Options
from fxcore.models.weights import load_model

NODES = {"resnet50": ["layer3", "layer4"], "vit_b_16": ["encoder.layers.encoder_layer_5", "encoder.ln"]}
INPUT = "x"
PRECISIONS = {"float32": torch.float32, "TF32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WAYS = ("eager", "cudagraphs")
BATCHES = (1, 4, 16, 32, 64, 256)
PROCESSES = (1, 4, 8)
SINGLE = (1, 32, 256)
"""Numbers of connections that send one image per request."""
MANY = 32
"""Images per request, over eight connections for each process."""
SECTIONS = ("model", "decode", "http", "memory")

Row = tuple[str, ...]


def in_process(model: str, seconds: float) -> list[Row]:
    """Return a row for each precision and backend: images/s by batch size, and the best relative to eager float32."""
    device = torch.device("cuda")
    graph = model_graph(model)
    rows, best_of_eager = [], 0.0
    for precision, dtype in PRECISIONS.items():
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
        module = load_model(get_model(model), "random", None).to(device, dtype)
        made = build_extractor(graph, module, graph.resolve(NODES[model]), dtype)
        example = torch.randn(2, 3, 224, 224, device=device, dtype=dtype)
        for way in WAYS:
            lowered = BACKENDS[way].lower(made.module, (example,), Options())
            rates = {}
            for size in BATCHES:
                x = torch.randn(size, 3, 224, 224, device=device, dtype=dtype)
                rates[size] = _rate(lambda x=x, lowered=lowered: lowered(x), size, seconds)  # type: ignore[misc]
            best_of_eager = best_of_eager or max(rates.values())
            ratio = max(rates.values()) / best_of_eager
            rows.append((model, precision, way, *(f"{rate:.0f}" for rate in rates.values()), f"{ratio:.2f}"))
            say(" ".join(rows[-1]))
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def _rate(run: Callable[[], object], size: int, seconds: float) -> float:
    """Return the median of images/s in five turns."""
    with torch.inference_mode():
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        rates = []
        for _ in range(5):
            started, done = time.perf_counter(), 0
            while time.perf_counter() - started < seconds / 5:
                for _ in range(4):
                    run()
                torch.cuda.synchronize()
                done += 4 * size
            rates.append(done / (time.perf_counter() - started))
    return statistics.median(rates)


def over_http(model: str, precision: str, processes: Sequence[int], seconds: float, decoded: float) -> list[Row]:
    """Measure each number of processes and connections, and return a row for each.

    Args:
        decoded: images/s of the same work in-process.
    """
    rows = []
    for workers in processes:
        with servers.fxserve(max_inflight=512, max_inflight_bytes=16 * 1024**3, workers=workers) as server:
            spec = {"model": model, "weights": "random", "precision": precision, "backend": "auto"}
            path, backend = extractor(server, {**spec, "return_nodes": NODES[model]}, 30)
            empty, _ = extractor(server, {**spec, "return_nodes": [INPUT], "backend": "eager"}, 0)
            _warm(server.port, path, workers)
            for connections in SINGLE:
                found = load.run(server.port, _requests(server.port, path, 1), connections, seconds, 1.0)
                loops = load.run(server.port, _tiny(server.port, empty), connections, seconds / 2, 0.5)
                what = f"{workers} processes, {connections} connections, 1 image"
                against = f"{found.rate / loops.rate:.2f} of {loops.rate:.0f} (event loops)"
                rows.append(_row(model, precision, backend, what, found, 1, against))
            connections = 8 * workers
            found = load.run(server.port, _requests(server.port, path, MANY), connections, seconds, 2.0)
            what = f"{workers} processes, {connections} connections, {MANY} images"
            against = f"{found.rate * MANY / decoded:.2f} of {decoded:.0f} (in-process)" if decoded else ""
            rows.append(_row(model, precision, backend, what, found, MANY, against))
    return rows


def _row(model: str, precision: str, backend: str, what: str, found: load.Load, images: int, against: str) -> Row:
    statuses = "" if set(found.statuses) == {"200"} else str(found.statuses)
    times = f"{found.rate * images:.0f}", f"{found.p50:.1f}", f"{found.p99:.1f}"
    row = (model, precision, f"{backend}, {what}", *times, against + statuses)
    say(" ".join(row))
    return row


def _warm(port: int, path: str, workers: int) -> None:
    """Make every process build the extractor and choose its backend."""
    load.run(port, _requests(port, path, 1), 16 * workers, 1.0, 2.0)
    load.run(port, _requests(port, path, MANY), 2 * workers, 1.0, 2.0)


def _requests(port: int, path: str, images: int) -> list[bytes]:
    files = photos.jpegs()
    if images == 1:
        return [load.http(port, path + "?pool=avg", data, "image/jpeg", SAFETENSORS) for data in files]
    body, kind = photos.multipart([files[i % len(files)] for i in range(images)])
    return [load.http(port, path + "?pool=avg", body, kind, SAFETENSORS)]


def _tiny(port: int, path: str) -> list[bytes]:
    file = io.BytesIO()
    PIL.Image.new("RGB", (32, 32), (200, 90, 40)).save(file, "JPEG")
    return [load.http(port, path + "?pool=avg", file.getvalue(), "image/jpeg", SAFETENSORS)]


def memory() -> list[Row]:
    """Return the device memory used by a server with one extractor over resnet50, with fifty, and with none."""
    free = torch.cuda.mem_get_info()[0]

    def used() -> float:
        return (free - torch.cuda.mem_get_info()[0]) / 1024**2

    names = [n for n in model_graph("resnet50").by_name if n.startswith("layer")][::3][:50]
    with servers.fxserve() as server:
        ids = []
        for name in names:
            path, backend = extractor(
                server, {"model": "resnet50", "weights": "random", "return_nodes": [name], "backend": "auto"}, 15
            )
            ids.append(path.split("/")[3])
            load.run(server.port, _requests(server.port, path, MANY), 2, 0.3, 0.1)
            if len(ids) == 1:
                one = used()
        fifty = used()
        for id in ids:
            server.http.delete(f"/v1/extractors/{id}").raise_for_status()
        time.sleep(3)
        after = used()
    ratio = fifty / one
    rows: list[Row] = [(backend, f"{one:.0f}", f"{fifty:.0f}", f"{ratio:.2f}", f"{after:.0f}")]
    say(" ".join(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--models", default=",".join(NODES))
    parser.add_argument("--precision", default="float16", help="of decode and http")
    parser.add_argument("--processes", default=",".join(map(str, PROCESSES)), help="of the first model; 1 for others")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement over HTTP")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    sections, models = options.sections.split(","), options.models.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}. Images/s; milliseconds; MiB.\n")
    if "model" in sections:
        rows = [row for model in models for row in in_process(model, options.seconds / 10)]
        head = ("model", "precision", "way", *(f"batch {size}" for size in BATCHES), "best of eager float32")
        print("\n".join(table(head, rows)) + "\n", flush=True)
    rows = []
    for model in models:
        decoded = 0.0
        if "decode" in sections:
            spec = {"model": model, "weights": "random", "return_nodes": NODES[model], "precision": options.precision}
            with servers.ceiling(spec, options.seconds / 4, 30, pooled=True) as ceiling:
                decoded = statistics.median(ceiling.measure() for _ in range(3))
                what = f"in-process with decoding, {ceiling.backend}: {ceiling.how}"
                rows.append((model, options.precision, what, f"{decoded:.0f}", "", "", ""))
                say(" ".join(rows[-1]))
        if "http" in sections:
            processes = [int(n) for n in options.processes.split(",")] if model == models[0] else [1]
            rows += over_http(model, options.precision, processes, options.seconds, decoded)
    if rows:
        print("\n".join(table(("model", "precision", "what", "images/s", "p50", "p99", "beside"), rows)) + "\n")
    if "memory" in sections:
        print("\n".join(table(("backend", "one extractor", "fifty", "ratio", "after their deletion"), memory())))


if __name__ == "__main__":
    main()
