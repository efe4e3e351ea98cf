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
from torch.nn.utils import parametrizations, prune

import fxcore
from fxcore.errors import FxError

IMAGE, SEQUENCE, IDS = (2, 3, 16, 16), (2, 5, 8), "ids"


class Of(nn.Module):
    """``forward`` is ``function(self, x)`` with the parts by their names."""

    def __init__(self, function: Callable[[Any, Tensor], Any], parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Case(NamedTuple):
    function: Callable[[Any, Tensor], Any]
    parts: Callable[[], dict[str, nn.Module]]
    shape: Any = IMAGE


def conv(out: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, out, 3, padding=1, **options)


def no_grad_block(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.conv(x)
    return m.out(h)


def augmented(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    skip = h
    h += 1
    return m.out(h * skip)


def lstm_last(m: Any, x: Tensor) -> Tensor:
    out, (h, _) = m.rnn(x)
    return m.out(out[:, -1] + h[-1])


def crnn(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x).mean(2).permute(2, 0, 1)
    y, _ = m.rnn(h)
    t, n, c = y.shape
    return m.out(y.reshape(t * n, c)).view(t, n, -1)


def attention(m: Any, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    w = (q @ k.mT / math.sqrt(c // 2)).softmax(-1)
    return m.out((w @ v).transpose(1, 2).reshape(b, n, c))


def self_attention(m: Any, x: Tensor) -> Tensor:
    return m.out(m.att(x, x, x, need_weights=False)[0])


def class_token(m: Any, x: Tensor) -> Tensor:
    t = m.conv(x).flatten(2).transpose(1, 2)
    t = torch.cat([m.token.weight[None].expand(t.shape[0], -1, -1), t], 1)
    return m.out(t)[:, 0]


def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    return m.out(h * m.gate(F.adaptive_avg_pool2d(h, 1)))


def unet(m: Any, x: Tensor) -> Tensor:
    a = m.conv(x)
    b = F.interpolate(m.down(a), size=a.shape[2:], mode="bilinear", align_corners=False)
    return m.out(torch.cat([a, b], 1))


def shuffle(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    b, c, height, width = h.size()
    return m.out(h.view(b, 2, c // 2, height, width).transpose(1, 2).contiguous().view(b, -1, height, width))


def dense(m: Any, x: Tensor) -> Tensor:
    found = [x]
    for layer in (m.a, m.b):
        found.append(layer(torch.cat(found, 1)))
    return m.out(torch.cat(found, 1))


def masked(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    h[h < 0] = 0
    h[:, 0] = 1
    return m.out(h)


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


def hooked(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda _, __, output: output * 2)
    return part


def spectral(part: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(part)


def plain(m: Any, x: Tensor) -> Any:
    return m.out(m.conv(x))


def sequence(m: Any, x: Tensor) -> Any:
    return m.out(m.part(x))


def on_conv(**more: nn.Module) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"conv": conv(), "out": nn.ReLU(), **more}


def with_part(part: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"part": part(), "out": nn.Tanh()}


def with_conv(make: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"conv": make(), "out": nn.ReLU()}


CASES: dict[str, Case] = {
    "augmented": Case(augmented, on_conv()),
    "no_grad": Case(no_grad_block, on_conv()),
    "masked assignment": Case(masked, on_conv()),
    "crnn": Case(crnn, lambda: {"conv": conv(), "rnn": nn.LSTM(4, 3, bidirectional=True), "out": nn.Linear(6, 5)}),
    "lstm last": Case(lstm_last, lambda: {"rnn": nn.LSTM(8, 6, batch_first=True), "out": nn.Linear(6, 5)}, SEQUENCE),
    "attention": Case(attention, lambda: {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)}, SEQUENCE),
    "torch's attention": Case(
        self_attention, lambda: {"att": nn.MultiheadAttention(8, 2, batch_first=True), "out": nn.LayerNorm(8)}, SEQUENCE
    ),
    "class token": Case(
        class_token, lambda: {"conv": nn.Conv2d(3, 8, 4, 4), "token": nn.Embedding(1, 8), "out": nn.LayerNorm(8)}
    ),
    "squeeze and excite": Case(squeeze_excite, on_conv(gate=nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid()))),
    "unet": Case(unet, on_conv(down=nn.Conv2d(4, 4, 3, 2))),
    "channel shuffle": Case(shuffle, on_conv()),
    "dense": Case(dense, lambda: {"a": nn.Conv2d(3, 2, 1), "b": nn.Conv2d(5, 2, 1), "out": nn.ReLU(inplace=True)}),
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
    "inner hook": Case(plain, lambda: {"conv": hooked(conv()), "out": hooked(nn.ReLU())}),
    "spectral norm": Case(plain, lambda: {"conv": spectral(conv()), "out": nn.ReLU()}),
    "weight norm": Case(plain, lambda: {"conv": parametrizations.weight_norm(conv()), "out": nn.ReLU()}),
    "orthogonal": Case(sequence, with_part(lambda: parametrizations.orthogonal(nn.Linear(8, 8))), SEQUENCE),
    "pruned": Case(plain, lambda: {"conv": prune.l1_unstructured(conv(), "weight", 0.5), "out": nn.ReLU()}),
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
    module = Of(case.function, case.parts()).eval()
    x = torch.arange(10).view(2, 5) if case.shape == IDS else torch.randn(case.shape)
    if name == "layer: lazy":
        module(x)
    seen: list[Tensor] = []
    handle = module.get_submodule("out").register_forward_hook(lambda _, __, output: seen.append(output.clone()))
    with torch.no_grad():
        module(x.clone())
    handle.remove()
    if name in REFUSED:
        with pytest.raises(FxError) as caught:
            fxcore.create_extractor(module, ["out"], x)
        assert len(caught.value.detail) > 30
        return
    extractor = fxcore.create_extractor(module, ["out"], x)
    with torch.no_grad():
        assert torch.equal(extractor(x)["out"], seen[0])
