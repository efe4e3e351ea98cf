"""The grid of a transformer's tokens, against what timm's own modules say of theirs."""

import pytest
import timm

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


def test_torchvisions():
    found = token_grid(model_graph("vit_b_32").by_name["encoder.ln"])
    assert (found.height, found.width, found.prefix, found.class_token) == (7, 7, 1, True)
    assert {n.name: n.tokens for n in model_graph("vit_b_32").nodes}["encoder.ln"] == found


def test_what_is_no_tokens_has_none():
    graph = model_graph("resnet18")
    assert token_grid(graph.by_name["layer4.1.relu_1"]) is None
    assert token_grid(graph.by_name["flatten"]) is None
