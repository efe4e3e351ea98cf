"""Small modules as tutorials write them: an extractor returns what forward hooks see, or says why it cannot."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxcore
from fxcore.errors import FxError
from tests.fxcore.hooks import hooked
from tests.fxcore.written import Of

IMAGE, SEQUENCE, IDS = (2, 3, 16, 16), (2, 5, 8), "ids"


class Case(NamedTuple):
    function: Callable[[Any, Tensor], Any]
    parts: Callable[[], dict[str, nn.Module]]
    shape: Any = IMAGE


def conv(out: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, out, 3, padding=1, **options)


def lstm_last(m: Any, x: Tensor) -> Tensor:
    out, (h, _) = m.rnn(x)
    return m.out(out[:, -1] + h[-1])


def crnn(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x).mean(2).permute(2, 0, 1)
    y, _ = m.rnn(h)
    t, n, c = y.shape
    return m.out(y.reshape(t * n, c)).view(t, n, -1)


def branch(choose: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.out(m.conv(x)) if choose(x) else m.out(m.conv(x) * 3)


def loop_over_images(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.stack([m.conv(image[None])[0] for image in x]))


def caught(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    with contextlib.suppress(Exception):
        h = h * float(h.mean())
    return m.out(h)


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.out(m.conv(x)).float()


def mixture(m: Any, x: Tensor) -> Tensor:
    weights = m.gate(x).softmax(-1)
    return m.out(torch.stack([e(x) for e in m.experts], -1).mul(weights[..., None, :]).sum(-1))


def positions(m: Any, x: Tensor) -> Tensor:
    return m.out(x + torch.arange(x.shape[1], device=x.device)[None, :, None])


def tied(m: Any, x: Tensor) -> Tensor:
    return m.out(F.linear(m.words(x), m.words.weight))


def sequence(m: Any, x: Tensor) -> Any:
    return m.out(m.part(x))


def on_conv() -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"conv": conv(), "out": nn.ReLU()}


def with_part(part: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"part": part(), "out": nn.Tanh()}


CASES: dict[str, Case] = {
    "crnn": Case(crnn, lambda: {"conv": conv(), "rnn": nn.LSTM(4, 3, bidirectional=True), "out": nn.Linear(6, 5)}),
    "lstm last": Case(lstm_last, lambda: {"rnn": nn.LSTM(8, 6, batch_first=True), "out": nn.Linear(6, 5)}, SEQUENCE),
    "mixture": Case(
        mixture,
        lambda: {
            "gate": nn.Linear(8, 2),
            "experts": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            "out": nn.LayerNorm(8),
        },
        SEQUENCE,
    ),
    "positions": Case(positions, lambda: {"out": nn.LayerNorm(8)}, SEQUENCE),
    "tied": Case(tied, lambda: {"words": nn.Embedding(10, 8), "out": nn.Softmax(-1)}, IDS),
    "orthogonal": Case(sequence, with_part(lambda: parametrizations.orthogonal(nn.Linear(8, 8))), SEQUENCE),
    "loop over images": Case(loop_over_images, on_conv()),
    "caught": Case(caught, on_conv()),
    "autocast": Case(autocast, on_conv()),
    **{
        f"branch on {name}": Case(branch(choose), on_conv())
        for name, choose in {
            "isinstance": lambda x: isinstance(x, Tensor),
            "type": lambda x: type(x) is Tensor,
            "is_tensor": torch.is_tensor,
            "hasattr": lambda x: not hasattr(x, "mask"),
            "dtype": lambda x: x.dtype is torch.float32,
            "dtype equal": lambda x: x.dtype == torch.float32,
            "size": lambda x: x.shape[-1] == 16,
            "rank": lambda x: x.dim() == 4,
            "device": lambda x: x.is_cuda,
            "values": lambda x: x.mean() > 0,
            "dictionary": lambda x: {16: True}.get(x.shape[-1], False),
            "set": lambda x: x.size(1) in {3},
            "list": lambda x: x.size(1) in [3],
            "grad": lambda _: torch.is_grad_enabled(),
            "none": lambda x: x is not None,
            "callable": callable,
            "len": lambda x: len(x) == 2,
        }.items()
    },
    **{
        f"flat: {name}": Case(lambda m, x, way=way: m.out(way(m.conv(x))), on_conv())  # type: ignore[misc]
        for name, way in {
            "view": lambda x: x.view(x.size(0), -1),
            "reshape": lambda x: x.reshape(x.shape[0], -1),
            "flatten": lambda x: torch.flatten(x, 1),
            "unpacked": lambda x: x.view(*x.shape[:1], -1),
            "stack": lambda x: torch.stack([x, x * 2]).flatten(0, 1),
            "expand": lambda x: x[None].expand(3, -1, -1, -1, -1).reshape(-1, *x.shape[1:]),
            "repeat": lambda x: x.repeat(2, 1, 1, 1),
            "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
            "gram": lambda x: x.flatten(2) @ x.flatten(2).mT,
            "roll": lambda x: torch.roll(x, (1, 1), (2, 3)),
            "topk": lambda x: x.flatten(1).topk(3).values,
            "norm": lambda x: F.normalize(x.flatten(1), dim=1),
            "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
            "chunk": lambda x: x.chunk(2, dim=1)[0].sigmoid(),
            "pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
            "unfold": lambda x: F.unfold(x, 3),
            "patches": lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3),
            "shuffle": lambda x: F.pixel_shuffle(x, 2),
            "where": lambda x: torch.where(x > 0, x, x.exp() - 1),
            "in place": lambda x: x.mul_(2).clamp_(min=0),
            "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
            "new": lambda x: x.new_zeros(x.shape[0], 4, 16, 16) + x,
            "mask fill": lambda x: x.masked_fill_(x < 0, 0.5),
            "scatter": lambda x: torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1.0),
            "cumsum": lambda x: x.cumsum_(1),
            "standard": lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True),
            "batch": lambda x: x - x.mean(0),
            "tuple sum": lambda x: sum((x, x, 1)),
            "complex": lambda x: torch.fft.rfft2(x).abs(),
            "sort": lambda x: x.flatten(1).sort(1)[0],
            "numpy": lambda x: torch.from_numpy(x.detach().numpy() * 2),
            "item": lambda x: x * x.mean().item(),
            "scaled": lambda x: x / math.sqrt(x.shape[1]),
            "even": lambda x: x[:, ::2, :-1],
            "newaxis": lambda x: x[:, :, None].squeeze(2),
        }.items()
    },
    **{
        f"layer: {name}": Case(sequence, with_part(make), shape)
        for name, make, shape in [
            ("encoder", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
            ("encoder, time first", lambda: nn.TransformerEncoderLayer(8, 2, 16), SEQUENCE),
            (
                "encoders",
                lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
                SEQUENCE,
            ),
            ("group norm", lambda: nn.GroupNorm(5, 5), SEQUENCE),
            ("batch norm", lambda: nn.BatchNorm1d(5), SEQUENCE),
            ("batch norm of the batch", lambda: nn.BatchNorm1d(5, track_running_stats=False), SEQUENCE),
            ("dropout", lambda: nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout()), SEQUENCE),
            ("embedding bag", lambda: nn.EmbeddingBag(10, 8), IDS),
            ("lazy", lambda: nn.LazyLinear(3), SEQUENCE),
            ("prelu", lambda: nn.PReLU(5), SEQUENCE),
            ("bilinear up", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
            ("transposed", lambda: nn.ConvTranspose2d(3, 2, 2, 2), IMAGE),
            ("pool with places", lambda: nn.MaxPool2d(2), IMAGE),
            ("channels last", lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), IMAGE),
            ("instance norm", lambda: nn.InstanceNorm2d(3, affine=True), IMAGE),
            ("conv and norm", lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), IMAGE),
        ]
    },
}

REFUSED = {
    *(name for name in CASES if name.startswith("branch on ") and name != "branch on none"),
    *("loop over images", "caught", "autocast"),
    *("flat: unpacked", "flat: expand", "flat: numpy"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_hooks_see_or_a_reason(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = Of(case.function, **case.parts()).eval()
    x = torch.arange(10).view(2, 5) if case.shape == IDS else torch.randn(case.shape)
    if name == "layer: lazy":
        module(x)
    if name in REFUSED:
        with pytest.raises(FxError) as caught:
            fxcore.create_extractor(module, ["out"], x)
        assert len(caught.value.detail) > 30
        return
    extractor = fxcore.create_extractor(module, ["out"], x)
    with torch.no_grad():
        assert torch.equal(extractor(x)["out"], hooked(module, "out", x.clone()))
