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
from fxcore.models.user_models import UserEntry, read_models

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
    ("name", "node", "module", "closed"),
    [
        ("dinov2", "encoder.layer.0", "encoder.layer.0", "encoder.layer.1.attention"),
        ("dinov2", "encoder.layer.1.mlp.fc1", "encoder.layer.1.mlp.fc1", "embeddings"),
        ("siglip", "encoder.layers.1", "encoder.layers.1", "encoder.layers.1.self_attn"),
        ("siglip", "head", "head", "encoder.layers.0.self_attn"),
        ("vit", "layers.1", "layers.1", "layers.1.attention"),
    ],
)
def test_nodes_are_what_hooks_see(
    entries: dict[str, UserEntry], tmp_path: Path, name: str, node: str, module: str, closed: str
) -> None:
    entry = entries[name]
    graph = model_graph(entry, entry.structure())
    assert [spec.name for spec in graph.inputs] == ["pixel_values"]
    assert closed in {part.path for part in graph.untraceable}
    kind, _ = models()[name]
    reference = kind.from_pretrained(tmp_path / name).eval()
    seen: list[torch.Tensor] = []
    hook = reference.get_submodule(module).register_forward_hook(lambda m, i, output: seen.append(output))
    x = torch.rand(2, 3, *graph.input_size, generator=torch.Generator().manual_seed(0))
    extractor = build_extractor(graph, load_model(entry, "builder"), graph.resolve({node: "key"}))
    with hook, torch.no_grad():
        reference(x)
        value = extractor.module(x)["key"]
    assert torch.allclose(value, seen[0], atol=1e-5)


def test_untraceable_modules_say_why(entries: dict[str, UserEntry]) -> None:
    graph = model_graph(entries["dinov2"], "builder")
    with pytest.raises(UnknownNode, match=r"which cannot be traced: .* iterates over a traced value"):
        graph.resolve(["encoder.layer.0.attention.attention"])
