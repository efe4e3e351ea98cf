"""Which places attention weights are of, against the values of positions that are told apart."""

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from fxcore import model_graph
from fxcore.graph.tokens.attention_grid import attention_grid


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "node", "expected"),
    [
        ("vit_b_32", "encoder.layers.encoder_layer_3.self_attention.attention", (7, 7, 1, None, (0, 0))),
        ("swin_t", "features.1.0.attn.attention", (56, 56, 0, (7, 7), (0, 0))),
        ("swin_t", "features.5.3.attn.attention", (14, 14, 0, (7, 7), (3, 3))),
        ("swin_t", "features.7.1.attn.attention", (7, 7, 0, (7, 7), (0, 0))),
    ],
)
def test_the_grid_is_the_modules_own(name, node, expected):
    graph = model_graph(name).with_nodes_of("attention_maps")
    found = attention_grid(graph.by_name[node])
    assert found is not None
    assert (found.height, found.width, found.prefix, found.window, found.shift) == expected
    if found.window is not None:
        block = torchvision.models.get_model(name, weights=None).get_submodule(node.removesuffix(".attention"))
        assert isinstance(block, ShiftedWindowAttention)
        assert list(found.window) == block.window_size
        assert list(found.shift) in (block.shift_size, [0, 0])


@pytest.mark.exhaustive
def test_unknown_attention_has_no_grid():
    graph = model_graph("maxvit_t").with_nodes_of("attention_maps")
    weights = [n for name, n in graph.by_name.items() if name.endswith(".attention")]
    assert weights
    assert {attention_grid(n) for n in weights} == {None}
    plain = model_graph("swin_t").by_name["features.1.0.attn.shifted_window_attention"]
    assert attention_grid(plain) is None


def test_a_window_holds_what_the_grid_says():
    """torchvision's own function, with values that only one position has: its window and place are where they are."""
    graph = model_graph("swin_t").with_nodes_of("attention_maps")
    grid = attention_grid(graph.by_name["features.5.3.attn.attention"])
    assert grid is not None
    assert grid.window is not None
    row, column = 5, 13
    attention = ShiftedWindowAttention(8, list(grid.window), list(grid.shift), 1).eval()
    nn.init.zeros_(attention.relative_position_bias_table)
    # Keys and queries are the image itself: the weights of a place's window alone change with it.
    image = torch.zeros(1, grid.height, grid.width, 8)
    changed = image.clone()
    changed[0, row, column] = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 10
    with torch.no_grad():
        difference = (attention(changed) - attention(image)).abs().sum(-1)[0]
    high, wide = grid.window
    rows = [(r - grid.shift[0]) % grid.height // high for r in range(grid.height)]
    columns = [(c - grid.shift[1]) % grid.width // wide for c in range(grid.width)]
    for r in range(grid.height):
        for c in range(grid.width):
            if difference[r, c] > 0:
                assert (rows[r], columns[c]) == (rows[row], columns[column])
