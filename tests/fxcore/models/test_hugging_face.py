"""Vision models of transformers, by the example's models.toml, against hooks on the models themselves."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fxcore import build_extractor, load_model, model_graph
from fxcore.errors import UnknownNode
from fxcore.models.descriptions import read_models
from fxcore.models.user_models import UserEntry
from fxcore.photos import photos
from tests.fxcore.hooks import hooked

pytestmark = pytest.mark.exhaustive

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@functools.cache
def models() -> dict[str, tuple[Any, Any]]:
    """Class and configuration by the name that the example gives them."""
    import transformers as hf  # takes seconds, which processes that run other tests save

    return {
        "dinov2": (hf.Dinov2Model, hf.Dinov2Config(**SMALL, image_size=224, patch_size=14)),
        "siglip": (hf.SiglipVisionModel, hf.SiglipVisionConfig(**SMALL, image_size=224, patch_size=16)),
        "vit": (hf.ViTModel, hf.ViTConfig(**SMALL, image_size=224, patch_size=16)),
    }


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, UserEntry]:
    """What the example describes, with small models in folders in place of the hub's."""
    monkeypatch.syspath_prepend(EXAMPLE)
    text = (EXAMPLE / "models.toml").read_text()
    for name, (kind, config) in models().items():
        torch.manual_seed(1)
        kind(config).save_pretrained(tmp_path / name)
        text = re.sub(rf"(\[models.{name}\].*?)\"[a-z]+/[\w-]+\"", rf'\1"{tmp_path / name}"', text, flags=re.DOTALL)
    (tmp_path / "models.toml").write_text(text)
    found = dict(read_models(tmp_path))
    for entry in found.values():
        if isinstance(entry, Exception):
            raise entry
    return {name: entry for name, entry in found.items() if isinstance(entry, UserEntry)}


@pytest.mark.parametrize(
    ("name", "node", "closed"),
    [
        ("dinov2", "encoder.layer.1.mlp.fc1", "encoder.layer.1.attention"),
        ("siglip", "head", "encoder.layers.1.self_attn"),
        ("vit", "layers.1", "layers.1.attention"),
    ],
)
def test_nodes_are_what_hooks_see(
    entries: dict[str, UserEntry], tmp_path: Path, name: str, node: str, closed: str
) -> None:
    entry = entries[name]
    graph = model_graph(entry, entry.structure())
    assert [spec.name for spec in graph.inputs] == ["pixel_values"]
    assert closed in {part.path for part in graph.untraceable}
    kind, _ = models()[name]
    reference = kind.from_pretrained(tmp_path / name).eval()
    x = torch.rand(2, 3, *graph.input_size, generator=torch.Generator().manual_seed(0))
    extractor = build_extractor(graph, load_model(entry, "builder"), graph.resolve({node: "key"}))
    with torch.no_grad():
        value = extractor.module(x)["key"]
    assert torch.allclose(value, hooked(reference, node, x), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "node", "grid"),
    [
        ("dinov2", "layernorm", (16, 16, 1, True)),
        ("siglip", "post_layernorm", (14, 14, 0, False)),
        ("vit", "layers.0.mlp.fc2", (14, 14, 1, True)),
    ],
)
def test_tokens_are_known_after_a_closed_part_made_them(
    entries: dict[str, UserEntry], name: str, node: str, grid: tuple[int, int, int, bool]
) -> None:
    graph = model_graph(entries[name], "builder")
    (info,) = (found for found in graph.nodes if found.name == node)
    assert info.layout == "tokens"
    assert info.tokens is not None
    assert (info.tokens.height, info.tokens.width, info.tokens.prefix, info.tokens.class_token) == grid


@pytest.mark.parametrize("name", ["dinov2", "siglip", "vit"])
def test_preprocessing_is_about_that_of_the_published_processor(entries: dict[str, UserEntry], name: str) -> None:
    """Which resizes tensors of integers, and not images of PIL: some values differ by a grey level or two."""
    import transformers as hf

    processor: Any = {
        "dinov2": lambda: hf.BitImageProcessor(
            size={"shortest_edge": 256}, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
        ),
        "siglip": hf.SiglipImageProcessor,
        "vit": hf.ViTImageProcessor,
    }[name]()
    for photo in photos()[:2]:
        expected = processor(photo, return_tensors="pt")["pixel_values"][0]
        found = entries[name].preprocessing().image(photo)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 3 / 255 / 0.22
        assert (found - expected).abs().mean() < 0.1 / 255 / 0.22


def test_untraceable_modules_say_why(entries: dict[str, UserEntry]) -> None:
    graph = model_graph(entries["dinov2"], "builder")
    with pytest.raises(UnknownNode, match=r"which cannot be traced: .* iterates over a traced value"):
        graph.resolve(["encoder.layer.0.attention.attention"])
