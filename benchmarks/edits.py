"""Measure images/s with 0, 50 and 100 % of the requests edited, in the engine without HTTP.

This is compared with the same model in eager PyTorch with forward hooks behind a lock, and with nnsight if installed.

    python benchmarks/edits.py
    python benchmarks/edits.py --model mobilenet_v3_small --node features.3.add --result classifier

Requests are preprocessed tensors from several concurrent clients; each edited request zeroes a different channel. The
peers compute one request at a time, since each request has its own hooks. All are measured in turn, in several rounds;
the fastest round counts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor, nn

from fxcore import Edit, get_model, load_model, model_graph
from service.engine import Engine
from service.engine.record import ExtractorRecord
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

Request = Callable[[int], Awaitable[object]]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--node", default="layer2")
    parser.add_argument("--result", default="fc")
    parser.add_argument("--rows", type=int, default=2, help="images of a request")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="auto", choices=["auto", "eager"])
    options = parser.parse_args()
    x = torch.rand(options.rows, 3, 224, 224)
    engine = Engine(Settings(lowering=options.backend == "auto"))
    await engine.start()
    spec = ExtractorSpec(model=options.model, weights="random", return_nodes=[options.result], backend=options.backend)
    record, _ = await engine.extractors.get(spec, wait=600)
    await lowered(engine, record, x, options.node)

    def ours(share: float) -> Request:
        async def ask(number: int) -> object:
            edits = [Edit(options.node, 0, channels=[number % 16])] if number * share % 1 < share else []
            return await engine.features(record, {spec.name: x for spec in record.description.inputs}, edits=edits)

        return ask

    asked = {"0 %": ours(0), "50 %": ours(0.5), "100 %": ours(1), "hooks": hooked(options, x)}
    if importlib.util.find_spec("nnsight") is not None:
        asked["nnsight"] = with_nnsight(options, x)
    best = dict.fromkeys(asked, 0.0)
    for _ in range(options.rounds):
        for name, ask in asked.items():
            rate = options.rows * await requests_per_second(ask, options.clients, options.seconds)
            best[name] = max(best[name], rate)
    print(f"{options.model}, an edit at {options.node}, {options.clients} clients, {options.rows} images a request")
    for name, rate in best.items():
        ratios = f"{rate / best['0 %']:5.2f} of unedited  {rate / best['hooks']:5.2f} of hooks"
        print(f"{name:>8} {rate:8.1f} images/s  {ratios}")
    await engine.close()


async def lowered(engine: Engine, record: ExtractorRecord, x: Tensor, node: str) -> None:
    """Wait until both the extractor and its variant for edits run on their fastest backend."""
    given = {spec.name: x for spec in record.description.inputs}
    for edits in ([], [Edit(node, 0, channels=[0])]):
        for _ in range(32):
            await engine.features(record, given, edits=edits)
        for one in record.runtime.all if record.runtime is not None else ():
            if one.upgrade is not None:
                await asyncio.wait({one.upgrade})
    for one in record.runtime.all if record.runtime is not None else ():
        print("edited" if one.description.edits else "unedited", "on", one.backend)


def hooked(options: argparse.Namespace, x: Tensor) -> Request:
    """Requests to the module with a hook each, one at a time."""
    model, module = module_at(options)
    lock = threading.Lock()

    def ask(number: int) -> object:
        def change(module: nn.Module, given: object, value: Tensor) -> Tensor:
            value = value.clone()
            value[:, number % 16] = 0
            return value

        with lock, torch.inference_mode():
            handle = module.register_forward_hook(change)
            try:
                return model(x)
            finally:
                handle.remove()

    return lambda number: asyncio.to_thread(ask, number)


def with_nnsight(options: argparse.Namespace, x: Tensor) -> Request:
    """Return requests to the module through nnsight, one at a time."""
    from nnsight import NNsight

    model, module = module_at(options)
    path = next(name for name, one in model.named_modules() if one is module)
    wrapped, lock = NNsight(model), threading.Lock()

    def ask(number: int) -> object:
        with lock, torch.inference_mode(), wrapped.trace(x):
            at = wrapped
            for part in path.split("."):
                at = at[int(part)] if part.isdigit() else getattr(at, part)
            at.output[:, number % 16] = 0
            result = wrapped.output.save()
        return result

    return lambda number: asyncio.to_thread(ask, number)


def module_at(options: argparse.Namespace) -> tuple[nn.Module, nn.Module]:
    """Return the model and its innermost module that ends with the edited node."""
    model = load_model(get_model(options.model), "random").eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    graph = model_graph(options.model)
    path = graph.resolve([options.node])[options.node].rpartition(".")[0]
    return model, model.get_submodule(path)


async def requests_per_second(ask: Request, clients: int, seconds: float) -> float:
    """Send requests one after another from each client; return the number of responses per second."""
    numbers, started = itertools.count(), time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            await ask(next(numbers))
            done += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return done / (time.perf_counter() - started)


if __name__ == "__main__":
    asyncio.run(main())
