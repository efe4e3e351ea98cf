"""The grid of a transformer's tokens, and those before it, against what timm's own modules say of theirs."""

import copy
from functools import partial

import pytest
import timm
import torch
from torch import nn

from fxcore import Edit, UserModel, build_extractor, get_model, load_model, model_graph
from fxcore.edits import BadEdit
from fxcore.errors import BadTensor
from fxcore.graph.model_graph import trace_graph
from fxcore.graph.tokens.prefix_tokens import NO_PREFIX, UNKNOWN_PREFIX, PrefixTokens
from fxcore.graph.tokens.token_grid import TokenGrid, prefix_tokens, token_grid
from fxcore.models.user_models import user_entry
from fxcore.pooling import pool
from tests.fxcore.hooks import hooked
from tests.fxcore.model_list import SWEPT
from tests.fxcore.written import Of

KINDS = [
    "vit_tiny_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "deit_tiny_distilled_patch16_224",
    "vit_medium_patch16_reg4_gap_256",
    "vit_little_patch16_reg1_gap_256",
    "vit_medium_patch16_rope_reg1_gap_256",
]
MORE = sorted(
    {name for pattern in ("vit_*reg*", "vit_*gap*", "eva02_*") for name in timm.list_models(pattern)} - set(KINDS)
)[::16]


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=SWEPT) for name in MORE)])
def test_as_timm_counts_and_pools_them(name):
    torch.manual_seed(0)
    made = timm.create_model(name, img_size=112, num_classes=3, depth=1).eval()
    entry = user_entry(f"tokens_{name}", UserModel(lambda: made, preprocessing={"resize_size": 112, "crop_size": 112}))
    graph = model_graph(entry)
    node = graph.resolve(["blocks.0"])["blocks.0"]
    found = token_grid(graph.by_name[node])
    assert found is not None
    assert (found.height, found.width) == made.patch_embed.grid_size
    assert found.prefix == made.num_prefix_tokens
    assert found.class_token == (made.cls_token is not None)
    prefix = prefix_tokens(graph.by_name[node])
    assert prefix == PrefixTokens(found.prefix, found.class_token)
    image = torch.rand(1, 3, 112, 112)
    with torch.no_grad():
        values = build_extractor(graph, load_model(entry, "DEFAULT"), {"tokens": node}).module(image)["tokens"]
        tokens = made.norm(values)
        for method, theirs in (("avg", "avg"), ("max", "max"), *((("cls", "token"),) if found.class_token else ())):
            mine = pool(tokens, "tokens", method, prefix)
            plain = hasattr(made, "pool") and made.attn_pool is None
            expected = made.pool(tokens, theirs) if plain else timm_pool(made, tokens, theirs)
            assert torch.allclose(mine, expected, atol=1e-6), method
    if not found.class_token:
        with pytest.raises(BadTensor, match="class token"):
            pool(tokens, "tokens", "cls", prefix)


def timm_pool(made, tokens, theirs):
    """What timm's model would pool if it had no attention pooling."""
    return timm.models.vision_transformer.global_pool_nlc(tokens, theirs, made.num_prefix_tokens)


def cait():
    return timm.create_model("cait_xxs24_224", depth=1)


@pytest.mark.parametrize(
    ("name", "node", "expected"),
    [
        ("timm.test_vit", "norm", PrefixTokens(1, True)),
        pytest.param(cait, "blocks.0", PrefixTokens(0, False), marks=SWEPT),
        pytest.param(cait, "norm", PrefixTokens(1, True), marks=SWEPT),
        pytest.param("timm.naflexvit_base_patch16_gap", "norm", PrefixTokens(4, False), marks=SWEPT),
        ("vit_b_32", "encoder.ln", PrefixTokens(1, True)),
        pytest.param("mvit_v2_s", "norm", PrefixTokens(1, True), marks=SWEPT),
        ("swin_t", "features.1", PrefixTokens(0, False)),
    ],
)
def test_tokens_of_other_models(name, node, expected):
    """Of clips, before class attention, and without a grid."""
    graph = model_graph(name if isinstance(name, str) else user_entry("built", UserModel(name)))
    assert prefix_tokens(graph.by_name[graph.resolve([node])[node]]) == expected


class OneToken(nn.Module):
    """A transformer's stem with one token whose parameter's name says what it is."""

    def __init__(self, name):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 16, 16)
        self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, 8)))
        self.taken = name
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([getattr(self, self.taken).expand(patches.shape[0], -1, -1), patches], 1))


@pytest.mark.parametrize(("name", "class_token"), [("cls_token", True), ("class_embedding", True), ("register", False)])
def test_a_lone_token_is_what_it_is_called(name, class_token):
    entry = user_entry(f"one_{name}", UserModel(lambda: OneToken(name), preprocessing={"crop_size": 64}))
    graph = model_graph(entry)
    assert prefix_tokens(graph.by_name["norm"]) == PrefixTokens(1, class_token)


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


@pytest.mark.parametrize("name", ["timm.mixer_s32_224", pytest.param("timm.gmixer_12_224", marks=SWEPT)])
def test_patches_keep_their_places_when_a_residual_mixes_all_of_them(name):
    """The mixing layers have another number of channels than there are patches."""
    graph, model = model_graph(name), load_model(get_model(name), "random").eval()
    (info,) = build_extractor(graph, model, graph.resolve(["norm"])).outputs
    assert (info.tokens.height, info.tokens.width) == model.stem.grid_size
    assert info.prefix == NO_PREFIX
    with torch.no_grad():
        tokens = model.forward_features(torch.rand(1, 3, 224, 224))
        expected = model.forward_head(tokens, pre_logits=True)
    assert torch.allclose(pool(tokens, info.layout, "avg", info.prefix), expected, atol=1e-6)


@pytest.mark.parametrize(("side", "cells"), [(100, 7), (224, 14)])
def test_a_grid_at_its_own_size_is_itself(side, cells):
    """Also where its positions do not divide the image."""
    grid = TokenGrid("map", cells, cells, 1, True)
    assert grid.at((side, side), (side, side), cells**2 + 1) == (cells, cells)
    assert grid.at((2 * side, side), (side, side), 2 * cells**2 + 1) == (2 * cells, cells)


def test_what_is_no_tokens_has_none():
    graph = model_graph("resnet18")
    assert token_grid(graph.by_name["layer4.1.relu_1"]) is None
    assert token_grid(graph.by_name["flatten"]) is None


class Arranged(nn.Module):
    """Sixteen patches and a class token, arranged by a function of both."""

    def __init__(self, arrange):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.arrange = arrange
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return self.block(self.arrange(patches, self.cls_token.expand(x.shape[0], -1, -1)))


def arranged(arrange):
    """The model, its extractor, an image, and the values that a hook sees."""
    torch.manual_seed(0)
    model = Arranged(arrange).eval()
    entry = user_entry("arranged", UserModel(lambda: copy.deepcopy(model), preprocessing={"crop_size": 32}))
    graph = trace_graph(entry)
    image = torch.rand(2, 3, 32, 32)
    build = partial(build_extractor, graph, load_model(entry, "DEFAULT"), {"block": "block"})
    return build, image, hooked(model, "block", image)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda patches, cls: torch.cat([patches, cls], dim=1),
        lambda patches, cls: torch.cat([patches[:, :8], cls, patches[:, 8:]], dim=1),
        lambda patches, cls: torch.cat([cls, patches], dim=1).roll(1, 1),
        lambda patches, cls: torch.cat([cls, patches], dim=1).flip(1),
        lambda patches, cls: torch.cat([cls, patches], dim=1).flip(dims=(-2,)),
        lambda patches, cls: torch.cat([cls, patches], dim=1)[:, :-1],
        lambda patches, cls: torch.cat([cls, patches], dim=1).index_select(1, torch.arange(16, -1, -1)),
        lambda patches, cls: torch.hstack([patches, cls]),
        lambda patches, cls: torch.cat([patches.mT, cls.mT], dim=-1).mT,
        lambda patches, cls: torch.cat([cls, patches], dim=1) + torch.cat([patches, cls], dim=1),
    ],
)
def test_tokens_among_or_after_the_patches_are_no_prefix(arrange):
    """They cannot be pooled, and no box of them can be edited."""
    build, image, seen = arranged(arrange)
    extractor = build()
    (info,) = extractor.outputs
    assert (info.layout, info.tokens, info.prefix) == ("tokens", None, UNKNOWN_PREFIX)
    with torch.no_grad():
        value = extractor.module(image)["block"]
    assert torch.allclose(value, seen, atol=1e-6)
    for method in ("cls", "avg", "max", "cls+avg"):
        with pytest.raises(BadTensor, match="which tokens stand for positions"):
            pool(value, info.layout, method, info.prefix)
    edited = build(edits={"block": "block"})
    with pytest.raises(BadEdit, match="neither a map nor tokens on a grid"):
        edited.factors([Edit("block", box=[0, 0, 1, 1], scale=0)], image)


@pytest.mark.parametrize(
    ("arrange", "prefix"),
    [
        (lambda patches, cls: torch.cat([cls, patches], dim=1), 1),
        (lambda patches, cls: torch.hstack([cls, patches]), 1),
        (lambda patches, cls: torch.cat([patches, cls], dim=1).roll(1, 1), 1),
        (lambda patches, cls: torch.cat([patches, cls], dim=1)[:, :-1], 0),
        (lambda patches, cls: torch.cat([cls, patches], dim=1).split([1, 16], dim=1)[1], 0),
        (lambda patches, cls: torch.cat([cls.mT, patches.mT], dim=-1).mT, 1),
        (lambda patches, cls: torch.cat([cls, patches.flip(1).flip(1)], dim=1), 1),
        (lambda patches, cls: torch.cat([cls, in_windows(in_windows(patches))], dim=1), 1),
    ],
)
def test_tokens_that_end_with_the_patches_have_their_grid(arrange, prefix):
    build, image, seen = arranged(arrange)
    extractor = build()
    (info,) = extractor.outputs
    assert (info.tokens.height, info.tokens.width, info.tokens.prefix) == (4, 4, prefix)
    assert info.prefix == PrefixTokens(prefix, prefix > 0)
    with torch.no_grad():
        value = extractor.module(image)["block"]
    assert torch.allclose(pool(value, info.layout, "avg", info.prefix), seen[:, prefix:].mean(1), atol=1e-6)
    if prefix:
        assert torch.allclose(pool(value, info.layout, "cls", info.prefix), seen[:, 0], atol=1e-6)
    edited = build(edits={"block": "block"})
    with torch.no_grad():
        changed = edited.module(image, *edited.factors([Edit("block", box=[0, 0, 1, 1], scale=0)], image))["block"]
    assert (changed[0] != value[0]).any(-1).nonzero().flatten().tolist() == [prefix]


class Others(nn.Module):
    """Sixteen patches, with or without a class token, of which other tokens are made."""

    def __init__(self, others, class_token):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 8, 8)
        if class_token:
            self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.queries = nn.Parameter(torch.randn(1, 20, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.others, self.class_token, self.norm = others, class_token, nn.LayerNorm(8)

    def forward(self, x):
        tokens = self.proj(x).flatten(2).transpose(1, 2)
        if self.class_token:
            tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1)
        return self.norm(self.others(self, tokens, self.queries.expand(x.shape[0], -1, -1)))


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize(
    "others",
    [
        lambda model, tokens, queries: model.transformer(tokens, queries),
        lambda model, tokens, queries: model.attention(queries, tokens, tokens)[0],
        lambda model, tokens, queries: queries + model.attention(queries, tokens, tokens, need_weights=False)[0],
        lambda model, tokens, queries: nn.functional.pad(tokens, (0, 0, 0, 4)),
    ],
)
def test_queries_and_padding_are_no_patches(others, class_token):
    entry = user_entry("others", UserModel(lambda: Others(others, class_token), preprocessing={"crop_size": 32}))
    (info,) = build_extractor(trace_graph(entry), load_model(entry, "DEFAULT"), {"norm": "norm"}).outputs
    assert (info.layout, info.tokens, info.prefix) == ("tokens", None, UNKNOWN_PREFIX)


def in_windows(tokens):
    """Tokens of a grid of 4 x 4, window after window of 2 x 2."""
    return tokens.view(-1, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda patches, cls: patches.flip(1) + cls,
        lambda patches, cls: in_windows(patches) + cls,
        lambda patches, cls: in_windows(patches.view(-1, 4, 4, 8)) + cls,
        lambda patches, cls: patches.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2) + cls,
    ],
)
def test_patches_in_another_order_are_pooled_without_a_grid(arrange):
    build, image, seen = arranged(arrange)
    extractor = build()
    (info,) = extractor.outputs
    assert (info.layout, info.tokens, info.prefix) == ("tokens", None, NO_PREFIX)
    with torch.no_grad():
        pooled = pool(extractor.module(image)["block"], info.layout, "avg", info.prefix)
    assert torch.allclose(pooled, seen.mean(1), atol=1e-6)


def test_modules_named_like_methods():
    """A layer called ``flatten`` is not the tensors' method."""
    layers = {"proj": nn.Conv2d(3, 8, 8, 8), "flatten": nn.Flatten(2), "norm": nn.LayerNorm(8)}
    model = Of(lambda m, x: m.norm(m.flatten(m.proj(x)).transpose(1, 2)), **layers)
    graph = trace_graph(user_entry("named", UserModel(lambda: model, preprocessing={"crop_size": 32})))
    tokens = {node.name: node.tokens for node in graph.nodes}["norm"]
    assert (tokens.height, tokens.width, tokens.prefix) == (4, 4, 0)
