"""``fxserve why``: draw the regions of a photo that a model's prediction is based on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.environment import settings_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fxcore.graph.model_graph import ModelGraph

_SHOWN = 5


def why(
    photo: Annotated[Path, typer.Argument(help="An image file.")],
    model: Annotated[str, typer.Option(help="A name from [bold]fxserve models[/bold].")],
    target: Annotated[
        str, typer.Option(help="Class to explain: its number, its name, or max for the top class.")
    ] = "max",
    at: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Node with a map, or tokens on a grid; by default the deepest that affects the result.",
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(show_default=False, help="Node with one vector per image; by default the model's last."),
    ] = None,
    weights: Annotated[str, typer.Option(help="DEFAULT, the name of weights, random, or file:NAME.")] = "DEFAULT",
    out: Annotated[
        Path | None, typer.Option(show_default=False, help="The PNG to write; by default cat.why.png for cat.jpg.")
    ] = None,
) -> None:
    """Print a photo's top classes, and draw with Grad-CAM which regions are evidence for one of them.

    \b
    fxserve why cat.jpg --model efficientnet_lite0
    fxserve why cat.jpg --model resnet50 --target 'Egyptian cat' --at C4 --out cat.png
    """
    import torch

    from fxcore.errors import BadTensor
    from fxcore.extractor import build_extractor
    from fxcore.graph.model_graph import model_graph
    from fxcore.graph.naming import is_group
    from fxcore.images.decoding import Decoder
    from fxcore.models.catalog import get_model
    from fxcore.models.weights import load_model
    from service.codecs import heatmap
    from service.engine.models.own_models import register_models

    for option, name in (("--of", of), ("--at", at)):
        if is_group(name):
            raise typer.BadParameter(f"{option} must be one node, but {name!r} stands for several")
    settings = settings_of({})
    register_models(settings.models_dir, try_each=False)
    entry = get_model(model)
    chosen = entry.canonical_weights(weights)
    if entry.is_quantized(chosen):
        raise BadTensor(f"{chosen} of {model} is quantized and has no gradients; choose other weights with --weights")
    graph = model_graph(entry, entry.structure(chosen))
    of = of or _last_vector(graph)
    data = photo.read_bytes()
    decoder = Decoder(graph.preprocessing)  # the pixels that a server sees by default
    pixels = decoder.batch(decoder.image(data)[None])
    module = load_model(entry, chosen, settings.weights_dir)
    with torch.no_grad():
        [result] = build_extractor(graph, module, graph.resolve([of])).module(pixels).values()
    if result.ndim != 2:
        raise BadTensor(f"--of must be a node with one vector per image; {of} gives {list(result.shape)}")
    names = entry.weights_info(chosen).categories if chosen in entry.published else ()
    index = _index(target, result[0], names)
    node, cam = _cam(graph, module, pixels, [at] if at else _deepest_first(graph), of, index)
    out = out or photo.with_suffix(".why.png")
    out.write_bytes(b"".join(heatmap.write(data, graph.preprocessing, cam[:, None], "NCHW")))
    _print_top(result[0], names, index)
    print(f"wrote {out}: Grad-CAM of {of}[{index}] at {node}")


def _cam(
    graph: ModelGraph, module: nn.Module, pixels: Tensor, at: Sequence[str], of: str, index: int
) -> tuple[str, Tensor]:
    """Return the first usable node of ``at`` and its Grad-CAM, ``[1, H, W]``.

    A node is usable if the result depends on the image through its positions. After the last attention of a vision
    transformer, for example, only the class token matters.
    """
    from fxcore.attribution import gradcam, gradients, positions
    from fxcore.errors import BadTensor, UnknownNode
    from fxcore.extractor import build_extractor
    from fxcore.graph.cut import UnneededInput
    from fxcore.graph.model_part import closed

    flat = False
    for name in at:
        try:
            begin = graph.resolve(closed(graph, name, of))
        except UnneededInput:
            continue
        behind = build_extractor(graph, module, graph.resolve([of]), inputs=begin)
        values = behind.inputs_from((pixels,))
        found = gradients(behind.module, values, 0, index).values
        [info] = build_extractor(graph, module, graph.resolve([name])).outputs
        maps, slopes = (positions(one, info.layout, info.tokens) for one in (values[0], found))
        if len(at) == 1 or slopes.any():
            return info.node, gradcam(maps, slopes)
        flat = True
        if len(begin) == 1 and not found.any():
            break  # those before it reach the result only through it
    if flat:
        raise BadTensor(
            f"{of}[{index}] does not depend on any feature map: all gradients are zero, as those of an untrained head "
            "may be; choose other weights with --weights"
        )
    raise UnknownNode(
        f"there is no feature map between the image and {of}; name a node with --at", name=of, suggestions=[]
    )


def _last_vector(graph: ModelGraph) -> str:
    from fxcore.errors import BadTensor

    vectors = [node.name for node in graph.nodes if node.extractable and len(node.shape or ()) == 2]
    if not vectors:
        raise BadTensor(f"{graph.entry.name} has no node with one vector per image")
    return vectors[-1]


def _deepest_first(graph: ModelGraph) -> list[str]:
    levels = [level.node for level in graph.levels.values()]
    tokens = [node.name for node in graph.nodes if node.extractable and node.tokens is not None]
    return (levels or tokens)[::-1]


def _index(target: str, result: Tensor, names: Sequence[str]) -> int:
    """Return the index of the class named by ``target``.

    Case matters only between names that differ in nothing else: ImageNet has a Cardigan, a dog, and a cardigan.
    """
    if target == "max":
        return int(result.argmax())
    if target.isdecimal():
        if int(target) < len(result):
            return int(target)
        raise typer.BadParameter(f"--target must be from 0 to {len(result) - 1}, not {target}")
    lower = [name.lower() for name in names]
    same = [index for index, name in enumerate(lower) if name == target.lower()]
    exact = [index for index in same if names[index] == target]
    if len(found := exact or same) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{index} ({names[index]})" for index in found)
        raise typer.BadParameter(f"--target: {target!r} may be {listed}; give one of these numbers")
    if not names:
        raise typer.BadParameter("--target: the classes of these weights have no names; give a number, or max")
    near = difflib.get_close_matches(target.lower(), lower, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "name a class, its number, or max"
    raise typer.BadParameter(f"--target: there is no class {target!r}; {hint}")


def _print_top(result: Tensor, names: Sequence[str], index: int) -> None:
    """Print the largest values of a result, as probabilities, and the value at ``index``."""
    order = result.argsort(descending=True).tolist()
    shares = result.softmax(0)
    for rank, one in enumerate(order):
        if rank < _SHOWN or one == index:
            name = names[one] if one < len(names) else ""
            print(f"{'>' if one == index else ' '} {one:5} {shares[one]:7.4f}  {name}".rstrip())
