"""A ViT's attention as a picture: where each head of a layer looks from the class token.

    python tests/examples/attention.py PHOTO OUT.png [--server URL] [--model vit_b_16] [--layer 0] [--weights DEFAULT]

Attention weights exist only inside a call and are not a node of the graph; the transform ``attention_maps`` turns them
into nodes, which the server lists and returns like any other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import PIL.Image

from service.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="vit_b_16")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--weights", default="DEFAULT")
    options = parser.parse_args()

    with Client(options.server) as client:
        nodes = client.nodes(options.model, transforms="attention_maps")["eval_nodes"]
        name = [node for node in nodes if node.endswith(".attention")][options.layer]
        extractor = client.extractor(options.model, [name], weights=options.weights, transforms=["attention_maps"])
        attention = extractor(options.photo)[name][0]  # [heads, 1 + L, 1 + L]
    looks = attention[:, 0, 1:]  # from the class token to each patch
    side = round(looks.shape[1] ** 0.5)
    maps = (255 * looks / looks.max(1, keepdims=True)).astype(np.uint8).reshape(-1, side, side)
    picture = PIL.Image.fromarray(np.hstack(maps))  # heads side by side
    picture.resize((16 * picture.width, 16 * picture.height), PIL.Image.Resampling.NEAREST).save(options.out)
    print(f"{options.out}: {len(maps)} heads of {name}, {side} x {side} patches each")


if __name__ == "__main__":
    main()
