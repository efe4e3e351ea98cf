"""timm's models: names, values, levels, preprocessing and weights, all against timm itself."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import PIL.Image
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._features_fx import get_graph_node_names
from timm.models._hub import HF_WEIGHTS_NAME, _get_safe_alternatives

from fxcore import build_extractor, get_model, list_models, load_model, model_graph
from fxcore.errors import BadTensor, UnknownModel, UnknownNode, UnknownWeights, WeightsUnavailable
from fxcore.models.hub import HubWeights
from fxcore.photos import photos
from tests.fxcore.hooks import hooked
from tests.fxcore.model_list import SWEPT
from tests.processes import QuietHandler, serving
from tests.seeded import seeded

FAMILIES = [
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "convnextv2_atto",
    "swinv2_tiny_window8_256",
    "tf_efficientnetv2_b0",
    "hiera_tiny_224",
    "fastvit_t8",
]
QUICK = ["mobilenetv4_conv_small", "test_vit"]
SEVERAL_SCALES = ["coat_tiny", "efficientvim_m1"]
"""CoaT computes three scales in one module, and EfficientViM's stages end with the reduction to the next."""


def without_mask(model: torch.nn.Module) -> torch.nn.Module:
    """``model``, a Hiera, with images as its only input: a trace would take its mask as given."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.masked_forward(x)
        return found

    # torch.fx keeps those functions whole that it finds among the globals of the forward.
    own = types.FunctionType(forward.__code__, vars(sys.modules[type(model).__module__]))
    model.__class__ = type("Unmasked", (type(model),), {"forward": own, "masked_forward": type(model).forward})
    return model


@pytest.mark.parametrize("architecture", [*QUICK, *(pytest.param(f, marks=SWEPT) for f in FAMILIES)])
def test_names_values_levels_and_preprocessing_are_timms(architecture: str) -> None:
    entry = get_model(f"timm.{architecture}")
    graph = model_graph(entry, entry.structure())
    model = seeded(timm.create_model, architecture)
    traced = without_mask(seeded(timm.create_model, architecture)) if architecture.startswith("hiera") else model
    assert (graph.train_nodes, graph.eval_nodes) == get_graph_node_names(traced)
    ours = load_model(entry, "random")
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), model.eval().parameters(), strict=True))
    x = torch.rand(1, 3, *graph.input_size, generator=torch.Generator().manual_seed(0))
    maps = [(info["module"], info["num_chs"], info["reduction"]) for info in model.feature_info]
    expected = {path: hooked(model, path, x) for path in (maps[0][0], maps[-1][0])}
    with torch.no_grad():
        expected[""] = model(x)
    extractor = build_extractor(graph, ours, graph.resolve({path or graph.eval_nodes[-1]: path for path in expected}))
    with torch.no_grad():
        found = extractor.module(x)
    for path, value in expected.items():
        assert found[path].shape == value.shape
        assert (found[path] - value).abs().max() <= 1e-4 * value.abs().max(), path
    strides = {stride for _, _, stride in maps}
    levels = {f"C{stride.bit_length() - 1}": channels for _, channels, stride in maps} if len(strides) > 1 else {}
    assert {name: level.channels for name, level in graph.levels.items()} == levels
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    assert torch.equal(entry.preprocessing().image(photos()[0]), transform(photos()[0]))


@pytest.mark.exhaustive
def test_untraceable_modules_stay_leaves_and_say_why() -> None:
    graph = model_graph("timm.gemma4_vit_167m")
    assert [part.path for part in graph.untraceable] == ["encoder"]
    assert "branches on a value" in graph.untraceable[0].reason
    with pytest.raises(UnknownNode, match="which cannot be traced"):
        graph.resolve(["encoder.layers.0"])


@pytest.mark.parametrize("architecture", ["convnextv2_atto", *(pytest.param(f, marks=SWEPT) for f in SEVERAL_SCALES)])
def test_levels_are_timms(architecture: str) -> None:
    graph, ours = model_graph(f"timm.{architecture}"), load_model(get_model(f"timm.{architecture}"), "random")
    model = timm.create_model(architecture).eval()
    model.load_state_dict(ours.state_dict())
    x = torch.rand(1, 3, *graph.input_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = model.forward_intermediates(x, intermediates_only=True)
        found = build_extractor(graph, ours, graph.resolve(list(graph.levels))).module(x)
    theirs = {info["reduction"]: made for info, made in zip(model.feature_info, maps, strict=True)}
    assert [level.stride for level in graph.levels.values()] == sorted(stride for stride in theirs if stride <= 32)
    for key, level in graph.levels.items():
        expected = theirs[level.stride]
        mine = found[key]
        if mine.ndim == 3:  # tokens, after the class token
            mine = mine[:, 1:].transpose(1, 2).reshape(expected.shape)
        assert torch.allclose(mine, expected, atol=1e-5), key


def test_no_levels_where_the_resolution_is_one() -> None:
    graph = model_graph("timm.test_vit")
    assert graph.levels == {}
    with pytest.raises(UnknownNode, match=r"timm\.test_vit has no level 'C4': it has none; ask for one of its nodes"):
        graph.resolve(["C4"])


# Cropped, squashed, and with borders; of photographs of two sides.
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("resnet50", "center"), ("vit_small_patch14_dinov2", "center"),
     ("maxvit_tiny_tf_384", "squash"), ("test_resnet", None), ("ecaresnet26t", None)],
)  # fmt: skip
def test_preprocessing_is_timms_to_the_bit(architecture: str, mode: str | None) -> None:
    entry = get_model(f"timm.{architecture}")
    preprocessing = entry.preprocessing()
    model = entry.build_weightless(str(entry.default_weights))
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    if mode is not None:
        assert preprocessing.describe()["crop_mode"] == config["crop_mode"] == mode
    for photo in (photos()[0], photos()[0].transpose(PIL.Image.Transpose.ROTATE_90)):
        made = preprocessing.image(photo)
        assert torch.equal(made, transform(photo))
        assert made.shape[1:] == preprocessing.output_size(photo.height, photo.width)
        raw = preprocessing.without_normalization().image(photo)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in preprocessing.normalization() or ())
        assert torch.equal((raw - mean) / std, made)


def test_borders_are_the_mean_as_timm_makes_them() -> None:
    entry, tag, published = next(
        (entry, tag, config)
        for entry in list_models("timm")
        for tag in entry.weights
        if (config := timm.get_pretrained_cfg(f"{entry.name.removeprefix('timm.')}.{tag}")).crop_mode == "border"
    )
    config = timm.data.resolve_data_config(pretrained_cfg=published.to_dict())
    transform = timm.data.create_transform(**config, is_training=False)
    assert torch.equal(entry.preprocessing(tag).image(photos()[0]), transform(photos()[0]))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(hub: Path, repository: str, state: dict[str, torch.Tensor]) -> Path:
    """The structure that huggingface_hub itself gives a repository with this one file."""
    folder, revision = hub / f"models--{repository.replace('/', '--')}", "a" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    file = folder / "snapshots" / revision / "model.safetensors"
    file.parent.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in state.items()}, file)
    return file


def test_weights_of_the_hubs_cache(hub: Path) -> None:
    entry = get_model("timm.test_vit")
    info = entry.weights_info("DEFAULT")
    assert not info.cached
    assert info.revision is None
    torch.manual_seed(7)
    trained = timm.create_model("test_vit").eval()
    file = cached(hub, "timm/test_vit.r160_in1k", trained.state_dict())
    assert (info.cached, info.revision, info.file) == (True, "a" * 40, file)
    model = load_model(entry, entry.canonical_weights("DEFAULT"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[key]), key
    x = torch.rand(1, 3, 160, 160)
    assert torch.equal(model(x), trained(x))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsUnavailable, match="damaged"):
        load_model(entry, "r160_in1k")
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(WeightsUnavailable, match="does not fit"):
        load_model(entry, "r160_in1k")


def test_without_a_network_the_file_and_its_folder_are_named(hub: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="weights=random") as caught:
        load_model(get_model("timm.test_vit"), "r160_in1k")
    assert caught.value.extra["file"] == "model.safetensors"
    assert caught.value.extra["folder"] == str(hub / "models--timm--test_vit.r160_in1k")


@pytest.fixture
def refusing_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A hub on this machine that refuses every file with the code and status put into the dictionary."""
    said: dict[str, str] = {}

    class Refuse(QuietHandler):
        def do_HEAD(self) -> None:
            said["asked"] = said.get("asked", "") + "+"
            self.send_response(int(said["status"]))
            self.send_header("X-Error-Code", said["code"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

    constants = huggingface_hub.constants
    with serving(Refuse) as url:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield said


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        ("403", "GatedRepo", "HF_TOKEN of one who accepted its licence at https://huggingface.co/timm/test_vit"),
        ("404", "EntryNotFound", "hf download timm/test_vit.r160_in1k"),
        ("401", "RepoNotFound", "hf download timm/test_vit.r160_in1k"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    refusing_hub: dict[str, str], hub: Path, status: str, code: str, advice: str
) -> None:
    refusing_hub.update(status=status, code=code)
    with pytest.raises(WeightsUnavailable) as caught:
        load_model(get_model("timm.test_vit"), "r160_in1k")
    assert advice in caught.value.detail
    assert "weights=random" in caught.value.detail
    assert caught.value.extra["folder"] == str(hub / "models--timm--test_vit.r160_in1k")


def test_an_unreachable_hub_is_asked_once(refusing_hub: dict[str, str]) -> None:
    """huggingface_hub itself would try for half a minute, and a request wait as long for its answer."""
    refusing_hub.update(status="503", code="")
    with pytest.raises(WeightsUnavailable, match="503"):
        load_model(get_model("timm.test_vit"), "r160_in1k")
    assert refusing_hub["asked"] == "+"


def test_what_there_is_not_is_suggested() -> None:
    with pytest.raises(UnknownModel, match="vit_small_patch14_dinov2"):
        get_model("timm.vit_smal_patch14_dinov2")
    with pytest.raises(UnknownModel, match=r"did you mean timm\.vit_small_patch14_dinov2"):
        get_model("vit_small_patch14_dinov2")
    with pytest.raises(UnknownModel, match=r"timm\.vit_small_patch14_dinov2 with weights=lvd142m"):
        get_model("timm.vit_small_patch14_dinov2.lvd142m")
    with pytest.raises(UnknownModel, match=r"timm\.vit_small_patch14_dinov2 with weights lvd142m, random"):
        get_model("timm.vit_small_patch14_dinov2.lvd142n")
    with pytest.raises(UnknownWeights, match="lvd142m"):
        get_model("timm.vit_small_patch14_dinov2").canonical_weights("lvd142n")
    many = get_model("timm.resnet50")
    with pytest.raises(UnknownWeights) as error:  # of 20 tags the nearest
        many.canonical_weights("a1_in1")
    assert error.value.extra["suggestions"][0] == "a1_in1k"
    assert set(many.weights) < set(error.value.extra["available"])
    assert "did you mean a1_in1k" in error.value.detail
    assert "fb_swsl_ig1b_ft_in1k" not in error.value.detail
    with pytest.raises(UnknownWeights, match=r"ask for one of .*fb_swsl_ig1b_ft_in1k"):
        many.canonical_weights("nothing like it")
    graph = model_graph("timm.test_vit")
    with pytest.raises(BadTensor, match="usual size"):
        graph.at(100, 100)


def test_all_of_them_are_listed() -> None:
    assert [entry.name.removeprefix("timm.") for entry in list_models("timm")] == sorted(timm.list_models())
    assert not any(entry.name.startswith("timm.") for entry in list_models())
    tags = {f"{e.name.removeprefix('timm.')}.{tag}" for e in list_models("timm") for tag in e.weights}
    assert tags == {name for name in timm.list_pretrained() if "." in name}


@pytest.mark.exhaustive
def test_timm_is_imported_only_when_asked_for() -> None:
    """And where it is not installed, the extra is named."""
    code = (
        "import sys, service.app, fxcore\n"
        "assert len(fxcore.list_models()) > 100\n"
        "assert 'timm' not in sys.modules\n"
        "sys.modules['timm'] = None\n"
        "try: fxcore.get_model('timm.resnet18')\n"
        "except fxcore.FxError as error: print(error.detail)\n"
        "fxcore.get_model('resnet18').preprocessing()\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "fxserve[timm]" in told


@pytest.mark.parametrize("file", [None, "open_clip_pytorch_model.bin", "vit_b_16.bin", "weights.pth"])
def test_the_files_that_timm_looks_for(file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = file or HF_WEIGHTS_NAME
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    weights = HubWeights("a1_in1k", "", None, {}, (), repository="timm/resnet18.a1_in1k", filename=file)
    assert weights.file.name == [*_get_safe_alternatives(name), name][0]
