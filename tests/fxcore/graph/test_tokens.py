"""The grid of a transformer's tokens, against what timm's own modules say of theirs."""

import pytest
import timm
import torch

from fxcore import UserModel, model_graph
from fxcore.graph.tokens import token_grid
from fxcore.models.user_models import user_entry


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch16_siglip_224",
        "deit_tiny_distilled_patch16_224",
        "vit_medium_patch16_reg4_gap_256",
        "vit_small_patch16_dinov3",
    ],
)
def test_as_timm_counts_them(name):
    made = timm.create_model(name, img_size=112, num_classes=3, depth=1)
    entry = user_entry(f"tokens_{name}", UserModel(lambda: made, preprocessing={"resize_size": 112, "crop_size": 112}))
    graph = model_graph(entry)
    found = token_grid(graph.by_name[graph.resolve(["blocks.0"])["blocks.0"]])
    assert found is not None
    assert (found.height, found.width) == made.patch_embed.grid_size
    assert found.prefix == made.num_prefix_tokens
    assert found.class_token == (made.cls_token is not None)


def test_tokens_in_another_order_have_no_grid():
    """Hiera's are in the order of its windows, so that no region of an image can be cut out of them."""
    made = timm.create_model("hiera_tiny_224", stages=(1, 1, 1, 1), num_classes=3)
    graph = model_graph(user_entry("tokens_hiera", UserModel(lambda: made)))
    blocks = {name: graph.resolve([name])[name] for name in ("blocks.0", "blocks.1", "blocks.3")}
    infos = {node.name: node for node in graph.nodes}
    assert [infos[node].layout for node in blocks.values()] == ["tokens"] * 3
    assert [infos[node].shape for node in blocks.values()] == [[None, 3136, 96], [None, 784, 192], [None, 49, 768]]
    assert [infos[node].tokens for node in blocks.values()] == [None] * 3
    assert infos["patch_embed.transpose"].tokens is not None
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedded = made.eval().patch_embed(image) + made.pos_embed
        assert not torch.equal(made.unroll(embedded), embedded)
        assert torch.equal(made.unroll(embedded).sort(dim=1)[0], embedded.sort(dim=1)[0])


def test_torchvisions():
    found = token_grid(model_graph("vit_b_32").by_name["encoder.ln"])
    assert (found.height, found.width, found.prefix, found.class_token) == (7, 7, 1, True)
    assert {n.name: n.tokens for n in model_graph("vit_b_32").nodes}["encoder.ln"] == found


def test_what_is_no_tokens_has_none():
    graph = model_graph("resnet18")
    assert token_grid(graph.by_name["layer4.1.relu_1"]) is None
    assert token_grid(graph.by_name["flatten"]) is None
