"""fxserve why: the classes of efficientnet_lite0's published weights, and captum's Grad-CAM."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from captum.attr import LayerGradCam
from torchvision.io import decode_image

import fxcore.attribution
import fxcore.photos
from fxcore import get_model, load_model
from fxcore.attribution import gradients
from service.codecs import heatmap
from tests.hostile_images import saved
from tests.service.cli.running import fails, fxserve

LITE = ("--model", "efficientnet_lite0")


def test_the_classes_and_where_the_first_lies(files: list[Path]) -> None:
    files[0].write_bytes((Path(fxcore.photos.__file__).parent / "chelsea.jpg").read_bytes())
    done = fxserve("why", files[0], *LITE)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == [">", "285", lines[0].split()[2], "Egyptian", "cat"]
    assert {line.split()[0] for line in lines[1:4]} == {"281", "282", "287"}  # tabby, tiger cat, lynx
    out = files[0].with_suffix(".why.png")
    assert lines[5:] == [f"wrote {out}: Grad-CAM of classifier.1[285] at features.7.0.block.2.1"]

    entry = get_model("efficientnet_lite0")
    model, preprocessing = load_model(entry, entry.canonical_weights("DEFAULT")), entry.preprocessing()
    batch = entry.preset()(decode_image(files[0]))[None]
    assert float(lines[0].split()[2]) == pytest.approx(model(batch).softmax(1)[0, 285].item(), abs=1e-4)
    cam = LayerGradCam(model, model.features[7]).attribute(batch, 285, relu_attributions=True).detach()
    [expected] = heatmap.write(files[0].read_bytes(), preprocessing, cam, "NCHW")
    drawn, wanted = (np.asarray(PIL.Image.open(io.BytesIO(data))).astype(int) for data in (out.read_bytes(), expected))
    assert np.abs(drawn - wanted).max() <= 1


def test_nothing_is_printed_where_the_file_cannot_be_written(files: list[Path], tmp_path: Path) -> None:
    done = fxserve("why", files[0], *LITE, "--out", tmp_path / "gone/x.png")
    fails(done, 1, f"{tmp_path}/gone/x.png: No such file or directory\n")


def test_a_class_by_name_or_number(files: list[Path], tmp_path: Path) -> None:
    for target in ("espresso", "967"):
        done = fxserve("why", files[0], *LITE, "--target", target, "--at", "C4", "--out", tmp_path / "x.png")
        assert done.exit_code == 0, done.stderr
        assert "Grad-CAM of classifier.1[967] at features.5.2.add" in done.stdout
        assert done.stdout.splitlines()[5].split()[:2] == [">", "967"]  # after the five best


def test_names_that_differ_only_in_case(files: list[Path], tmp_path: Path) -> None:
    names = get_model("efficientnet_lite0").weights_info("IMAGENET1K").categories
    assert [name for name in names if name.lower() == "cardigan"] == ["Cardigan", "cardigan"]  # a dog, and a garment
    for target in ("Cardigan", "cardigan"):
        done = fxserve("why", files[0], *LITE, "--target", target, "--out", tmp_path / "x.png")
        assert f"Grad-CAM of classifier.1[{names.index(target)}] at" in done.stdout, done.stderr
    done = fxserve("why", files[0], *LITE, "--target", "CARDIGAN", "--out", tmp_path / "y.png")
    assert done.exit_code == 2
    assert "'CARDIGAN' may be 264 (Cardigan), 474 (cardigan); give one of these numbers" in done.stderr


@pytest.mark.exhaustive
def test_a_vision_transformer_is_explained_before_its_last_attention(tmp_path: Path) -> None:
    """Behind it only the class token counts."""
    (tmp_path / "noise.png").write_bytes(saved(PIL.Image.effect_noise((64, 64), 90).convert("RGB"), "PNG"))
    done = fxserve("why", tmp_path / "noise.png", "--model", "timm.test_vit", "--weights", "random")
    assert done.exit_code == 0, done.stderr
    at = done.stdout.split()[-1]
    model = load_model(get_model("timm.test_vit"), "random")
    last = max(int(name.split(".")[1]) for name, _ in model.named_modules() if name.startswith("blocks."))
    assert at.startswith(f"blocks.{last}.attn") or at == f"blocks.{last}.norm1"


def test_a_head_of_zeros_explains_nothing(
    files: list[Path], own_models: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's vision transformers begin with one. Its first gradient shows that those before it are zero too."""
    asked = []

    def recorded(*given: Any) -> fxcore.attribution.Gradients:
        asked.append(given)
        return gradients(*given)

    monkeypatch.setattr(fxcore.attribution, "gradients", recorded)
    own_models(
        """
        [models.mine]
        builder = "torchvision.models:VisionTransformer"
        preprocessing = { resize_size = 32, crop_size = 32 }

        [models.mine.arguments]
        image_size = 32
        patch_size = 16
        num_layers = 1
        num_heads = 1
        hidden_dim = 8
        mlp_dim = 8
        """
    )
    done = fxserve("why", files[0], "--model", "mine")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "does not depend on any feature map: all gradients are zero" in done.stderr
    assert len(asked) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*LITE, "--target", "taby"), "did you mean tabby"),
        ((*LITE, "--target", "1000"), "from 0 to 999"),
        ((*LITE, "--of", "C5"), "one vector per image; C5 gives [1, 320, 7, 7]"),
        ((*LITE, "--of", "features.*"), "--of must be one node, but 'features.*' stands for several"),
        ((*LITE, "--at", "features.1.*"), "--at must be one node"),
        ((*LITE, "--at", "classifier.1", "--of", "classifier.0"), "there is no feature map between"),
        (("--model", "resnet18", "--weights", "random", "--target", "tabby"), "have no names"),
        (("--model", "fasterrcnn_mobilenet_v3_large_fpn", "--weights", "random"), "no node with one vector per image"),
        (("--model", "quantized_resnet18"), "is quantized and has no gradients"),
    ],
)
def test_what_cannot_be_explained_is_said(files: list[Path], options: tuple[str, ...], said: str) -> None:
    done = fxserve("why", files[0], *options)
    assert done.exit_code in (1, 2)
    assert said in done.stderr
    assert list(files[0].parent.glob("*.png")) == []
