"""A ViT's attention as a picture: where each head of a layer looks from the class token.

    python tests/examples/attention.py PHOTO OUT.png [--model vit_b_16] [--layer 0] [--weights DEFAULT]

Attention weights live inside one call and are no node of the graph; the pass ``attention_maps`` makes nodes of them.
This runs in one process, without a server.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import PIL.Image
import torch
from torch import fx

from fxcore import get_model, load_model, open_image, trace
from fxcore.tracing import PATH
from fxcore.transforms import attention_maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photo", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="vit_b_16")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--weights", default="DEFAULT")
    options = parser.parse_args()

    entry = get_model(options.model)
    model = load_model(entry, entry.canonical_weights(options.weights))
    opened = attention_maps(fx.GraphModule(model, trace(model)))
    name = f"encoder.layers.encoder_layer_{options.layer}.self_attention.attention"
    wanted = next(node for node in opened.graph.nodes if node.meta.get(PATH) == name)
    opened.graph.output_node().args = (wanted,)
    opened.graph.eliminate_dead_code()
    opened.recompile()

    photo = open_image(options.photo.read_bytes())
    with torch.inference_mode():
        weights = opened(entry.preprocessing(options.weights).image(photo)[None])[0]  # [heads, 1 + L, 1 + L]
    looks = weights[:, 0, 1:]  # from the class token to each patch
    side = round(looks.shape[1] ** 0.5)
    maps = looks.reshape(-1, side, side) / looks.amax(1)[:, None, None]
    picture = torch.cat(list(maps.mul(255).byte()), dim=1)  # heads side by side
    PIL.Image.fromarray(picture.numpy()).resize((16 * picture.shape[1], 16 * side), 0).save(options.out)
    print(f"{options.out}: {len(maps)} heads of {name}, {side} x {side} patches each")


if __name__ == "__main__":
    main()
