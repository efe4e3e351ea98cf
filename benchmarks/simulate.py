"""Simulate which resource runs out first as replicas and extractors grow, from measurements and estimates.

    python benchmarks/simulate.py > benchmarks/results/scale.md

Nothing here was measured on more than one machine. The popularity of extractors follows Zipf's law. A load balancer
spreads requests over all replicas at random, or those of each extractor over a few replicas. Each replica keeps the
most recently used extractors within its memory budget, and rebuilds the others.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from dataclasses import dataclass

REPLICAS = (1, 10, 100, 1000)
EXTRACTORS = 10_000
POPULARITY = 1.1
"""Exponent of Zipf's law."""

BUDGET = 8 * 1024**3
CORES = 2
NETWORK = 10e9 / 8
"""Bytes/s of a node: 10 Gbit/s."""

REGISTRY = 1e9 / 8
"""Bytes/s of the server that weights are downloaded from: 1 Gbit/s for all replicas together."""

S3_READS = 5500
"""Reads/s that S3 supports for one prefix."""

POLLS = 1 / 1.5
"""Listings/s of a bucket by each replica."""


@dataclass(frozen=True)
class Model:
    """Figures of a model.

    Rates and response sizes are measured (benchmarks/results/serve-2-cores-xeon.md, union-2-cores.md), sizes of
    extractors and times to build and load are estimates.

    Attributes:
        rate: images/s of a replica.
        answer: bytes of C4 and C5 in float32.
        pooled: bytes of the pooled C4 and C5.
        weights: bytes of the weights.
        extractor: bytes of each further extractor over the same weights.
        build: seconds to build an extractor, with the weights in memory.
        load: seconds to load the weights from disk.
    """

    name: str
    rate: float
    answer: int
    pooled: int
    weights: int
    extractor: int
    build: float
    load: float


MODELS = (
    Model("mobilenet_v3_small", 422, 4 * (48 * 14 * 14 + 576 * 7 * 7), 4 * (48 + 576), 10 << 20, 4 << 20, 0.4, 0.2),
    Model("resnet50", 31, 4 * (1024 * 14 * 14 + 2048 * 7 * 7), 4 * (1024 + 2048), 98 << 20, 90 << 20, 0.6, 0.5),
)


def cold_share(model: Model, replicas: int, routed: bool, requests: int, seed: int = 0) -> float:
    """Simulate the share of requests that reach a replica without their extractor in memory, in steady state.

    One replica is simulated for all: with random balancing, each sees the same distribution; with routing, each has the
    share of extractors that a hash assigns to it.
    """
    source = random.Random(seed)
    capacity = max(1, (BUDGET - model.weights) // model.extractor)
    ranks = range(1, EXTRACTORS + 1)
    mine = [rank for rank in ranks if not routed or replicas == 1 or source.random() < 1 / replicas] or [1]
    chosen = source.choices(mine, [rank**-POPULARITY for rank in mine], k=requests)
    kept: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number, rank in enumerate(chosen):
        if rank in kept:
            kept.move_to_end(rank)
            continue
        missed += number >= requests // 2  # the first half fills the memory
        kept[rank] = None
        if len(kept) > capacity:
            kept.popitem(last=False)
    return missed / (requests - requests // 2)


def rate_with_builds(model: Model, cold: float) -> float:
    """Requests/s of a replica, for one image each, when builds take time from computing."""
    return 1 / (1 / model.rate + cold * model.build)


def table(rows: list[tuple[str, ...]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rest))


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000, help="simulated requests per case")
    requests = parser.parse_args().requests
    print("# Past one machine: a simulation\n")
    print(
        f"No figure here was measured on a cluster. `python benchmarks/simulate.py` computes them from rates and "
        f"sizes of responses measured on {CORES} cores and from estimates of build and load times, for "
        f"{EXTRACTORS:,} extractors whose popularity follows Zipf's law "
        f"(exponent {POPULARITY}), a budget of {BUDGET >> 30} GiB a replica, 10 Gbit/s a node, 1 Gbit/s from where "
        f"weights are downloaded, and {S3_READS:,} reads a second of one prefix on S3. Balanced by extractor "
        "means that a proxy sends an extractor's requests to as few replicas as they need; the most popular extractor "
        f"alone has {1 / sum(rank**-POPULARITY for rank in range(1, EXTRACTORS + 1)):.0%} of all requests, so that a "
        "plain hash to one replica would not do.\n"
    )
    for model in MODELS:
        print(f"## {model.name}\n")
        rows: list[tuple[str, ...]] = [
            ("replicas", "balancing", "cold requests", "images/s, all", "of what is possible",
             "responses, float32 maps", "responses, pooled", "listings/s of the store", "first download of weights")
        ]  # fmt: skip
        for replicas in REPLICAS:
            for routed in (False, True) if replicas > 1 else (False,):
                cold = cold_share(model, replicas, routed, requests)
                rate = replicas * rate_with_builds(model, cold)
                rows.append(
                    (
                        f"{replicas:,}",
                        "by extractor" if routed else "random",
                        f"{cold:.1%}",
                        figure(rate),
                        f"{rate / replicas / model.rate:.0%}",
                        f"{rate * model.answer * 8 / 1e9:,.1f} Gbit/s",
                        f"{rate * model.pooled * 8 / 1e9:,.2f} Gbit/s",
                        figure(replicas * POLLS),
                        f"{replicas * model.weights / REGISTRY:,.0f} s",
                    )
                )
        print(table(rows), "\n")
    mobile, resnet = MODELS
    cold = cold_share(resnet, 100, False, requests)
    per_node = NETWORK / (resnet.answer * rate_with_builds(resnet, 0))
    print("## What breaks first\n")
    print(
        "1. **Cold builds**, at once and at any number of replicas, with many extractors and requests balanced at "
        f"random: {cold:.0%} of the requests for resnet50 reach a replica that has to build, which leaves "
        f"{rate_with_builds(resnet, cold) / resnet.rate:.0%} of its rate. More replicas do not help, since each sees "
        "all extractors. Route by extractor (a consistent hash of the path with bounded loads, as HAProxy and Envoy "
        "have it), raise `FXSERVE_MEMORY_BUDGET`, and preload what is asked for most.\n"
        f"2. **Weights downloaded by each replica** for itself: a start of 1,000 waits "
        f"{1000 * resnet.weights / REGISTRY / 60:.0f} minutes for resnet50 at 1 Gbit/s. Share `TORCH_HOME` in a "
        "volume, or have it in the image.\n"
        f"3. **The network behind a load balancer** that all responses pass: float32 maps of resnet50 take "
        f"{resnet.answer * resnet.rate * 8 / 1e9:.2f} Gbit/s a replica, so 10 Gbit/s are full at {per_node:.0f} "
        f"replicas, with mobilenet_v3_small at {NETWORK / (mobile.answer * mobile.rate):.0f}. `pool=avg` divides that "
        f"by {resnet.answer / resnet.pooled:.0f}, `dtype=float16` by 2. On a GPU, a hundred times as fast, one replica "
        "fills it.\n"
        f"4. **The store** last: {S3_READS:,} requests a second are reached by {S3_READS / POLLS:,.0f} replicas that "
        "each list what was deleted every 1.5 s. One listing of S3 is some $0.000005, so a replica costs "
        f"{POLLS * 86400 * 30 * 0.000005:.0f} dollars a month there; a shared folder costs nothing."
    )


if __name__ == "__main__":
    main()
