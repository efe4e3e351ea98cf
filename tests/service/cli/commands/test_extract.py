"""``fxserve extract``: the values and the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from sklearn.random_projection import SparseRandomProjection

from fxcore import build_extractor, get_model, load_model, model_graph
from tests.decoding import decoded
from tests.service.cli.running import fails, fxserve, rows

RESNET = ("--model", "resnet18", "--weights", "random", "--device", "cpu")


def expected(files: list[Path], nodes: dict[str, str]) -> dict[str, torch.Tensor]:
    """What resnet18 with random weights gives, straight from fxcore."""
    entry, graph = get_model("resnet18"), model_graph("resnet18")
    extractor = build_extractor(graph, load_model(entry, "random"), graph.resolve(nodes))
    preprocessing = entry.preprocessing()
    with torch.inference_mode():
        batch = torch.stack([preprocessing.pixels(decoded(file.read_bytes())) for file in files])
        response: dict[str, torch.Tensor] = extractor.module(batch)
    return response


def test_extract_writes_a_folder_of_shards(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "features"
    result = fxserve("extract", tmp_path, *RESNET, "--nodes", "C4,layer4:last", "--out", out)
    assert result.exit_code == 0, result.stderr
    right = expected(files, {"C4": "C4", "layer4": "last"})
    with safe_open(out / "shard-000000.safetensors", "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"C4", "last"}
        for key, value in right.items():
            torch.testing.assert_close(file.get_tensor(key), value, rtol=1e-4, atol=1e-4)
    assert metadata["model"] == "resnet18"
    assert metadata["weights"] == "random"
    assert json.loads(metadata["nodes"]) == {"C4": "layer3.1.relu_1", "last": "layer4.1.relu_1"}
    assert metadata["fingerprint"] == model_graph("resnet18").fingerprint
    assert json.loads(metadata["path"]) == [str(photo) for photo in files]
    assert rows(result.stdout, "output") == [
        ["C4", "layer3.1.relu_1", "256x14x14", "float32"],
        ["last", "layer4.1.relu_1", "512x7x7", "float32"],
    ]
    assert result.stdout.splitlines()[-1] == f"{out}: 2 of 2 images in 1 shard"
    assert result.stderr == ""  # the bar is for terminals
    names = ["errors.jsonl", "index.sqlite", "shard-000000.safetensors", "spec.json"]
    assert sorted(path.name for path in out.iterdir()) == names


@pytest.mark.exhaustive
def test_extract_takes_groups_of_nodes(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSERVE_MAX_NODES", "3")
    command = ["extract", files[0], *RESNET, "--pool", "avg"]
    result = fxserve(*command, "--nodes", "layer1.*,C5", "--out", tmp_path / "a")
    assert result.exit_code == 0, result.stderr
    nodes = {"layer1.0": "layer1.0.relu_1", "layer1.1": "layer1.1.relu_1", "C5": "layer4.1.relu_1"}
    assert json.loads((tmp_path / "a/spec.json").read_text())["spec"]["return_nodes"] == nodes
    result = fxserve(*command, "--nodes", "layer1.*,layer2.*", "--out", tmp_path / "b")
    assert result.exit_code == 1
    assert "4 nodes, and groups may stand for at most 3" in result.stderr


def test_extract_fails_where_it_has_done_no_image(tmp_path: Path) -> None:
    root, out = tmp_path / "in", tmp_path / "out"
    root.mkdir()
    command = ["extract", root, "--model", "squeezenet1_1", "--nodes", "features.5", "--weights", "random"]
    command += ["--device", "cpu", "--pool", "avg", "--out", out]
    fails(fxserve(*command), 1, f"no images found in {root}\n")
    for name in ("a.txt", "b.txt", "notes"):
        (root / name).write_text("text")
    skipped = "skipped 3 files that are not images: 2 .txt, notes"
    fails(fxserve(*command), 1, f"no images found in {root}; {skipped}\n")
    (root / "broken.jpg").write_bytes(b"junk")
    broken = fxserve(*command)
    assert broken.exit_code == 1
    told = f"{out}: 0 of 1 images in 0 shards, 1 could not be read: see {out}/errors.jsonl"
    assert broken.stdout.splitlines()[-2:] == [told, skipped]
    Image.new("RGB", (64, 64)).save(root / "right.png")
    assert [fxserve(*command).exit_code for _ in range(2)] == [0, 0]


def test_extract_pools_casts_and_normalises(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "f"
    base = ["extract", *files, *RESNET, "--format", "npz"]
    options = ["--pool", "avg+max", "--dtype", "float16", "--normalize", "l2", "--image-size", 96]
    wrong = fxserve(*base, "--nodes", "layer3", "--pool", "avg+sum", "--out", out)
    assert wrong.exit_code == 2
    assert "joined by +" in " ".join(wrong.stderr.replace("│", " ").split())
    assert fxserve(*base, "--nodes", "layer3,layer4", *options, "--out", out).exit_code == 0
    with np.load(out / "shard-000000.npz") as archive:
        assert archive.files == ["path", "layer3", "layer4"]
        assert (archive["layer4"].shape, archive["layer4"].dtype) == ((2, 1024), np.float16)
        np.testing.assert_allclose(np.linalg.norm(archive["layer3"].astype(np.float32), axis=1), 1, rtol=1e-3)
    asked = {"pool": "avg+max", "dtype": "float16", "normalize": "l2", "preprocess": "default"}
    assert json.loads((out / "spec.json").read_text())["options"] == asked


@pytest.mark.exhaustive
def test_extract_projects(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "f"
    command = ["extract", *files, *RESNET, "--out", out, "--nodes", "layer4", "--project", 40]
    assert fxserve(*command, "--seed", 3).exit_code == 0
    whole = expected(files, {"layer4": "layer4"})["layer4"].flatten(1).numpy()
    right = SparseRandomProjection(n_components=40, random_state=3).fit_transform(whole)
    np.testing.assert_allclose(load_file(out / "shard-000000.safetensors")["layer4"], right, rtol=1e-3, atol=1e-3)
    spec = json.loads((out / "spec.json").read_text())
    assert (spec["options"]["project"], spec["options"]["seed"], spec["outputs"][0]["shape"]) == (40, 3, [40])
    other = fxserve(*command)
    assert other.exit_code == 1
    assert "made with seed 3, not 0" in other.stderr


def test_extract_in_half_precision_and_another_size(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "f"
    options = ["--nodes", "C5", "--precision", "bfloat16", "--image-size", 96, "--out", out]
    assert fxserve("extract", files[0], *RESNET, *options).exit_code == 0
    with safe_open(out / "shard-000000.safetensors", "pt") as file:
        assert file.get_tensor("C5").dtype is torch.bfloat16
        assert file.get_tensor("C5").shape == (1, 512, 3, 3)


@pytest.mark.exhaustive
def test_models_of_ones_own(files: list[Path], tmp_path: Path, own_models: Callable[[str], None]) -> None:
    own_models(
        """
        [models.mine]
        builder = "timm:create_model"
        arguments = { model_name = "mobilenetv3_small_050", num_classes = 7 }
        preprocessing = { resize_size = 72, crop_size = 64 }

        [models.broken]
        weights = "gone.safetensors"
        """
    )
    (listed,) = rows(fxserve("models", "--query", "mine").stdout, "model")
    assert listed[:3] == ["mine", "classification", "builder"]
    assert ["C5", "blocks.5.0.aa", "288", "32"] in rows(fxserve("nodes", "mine").stdout, "level")
    assert "the description of model 'broken' is invalid" in fxserve("nodes", "broken").stderr
    out = tmp_path / "features"
    result = fxserve("extract", *files, "--model", "mine", "--nodes", "C5", "--device", "cpu", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert load_file(out / "shard-000000.safetensors")["C5"].shape == (2, 288, 2, 2)
    assert json.loads((out / "spec.json").read_text())["spec"]["weights"] == "builder"


@pytest.mark.exhaustive
def test_a_detectors_values_do_not_depend_on_the_other_images(files: list[Path], tmp_path: Path) -> None:
    # Alone the second photo is padded to 480 pixels, in a batch with the first to 512.
    common = [*RESNET, "--model", "fasterrcnn_mobilenet_v3_large_320_fpn", "--nodes", "C4"]
    common += ["--pool", "avg", "--format", "npz"]
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert fxserve("extract", files[1], *common, "--out", alone).exit_code == 0
    assert fxserve("extract", *files, *common, "--out", both).exit_code == 0
    with np.load(alone / "shard-000000.npz") as one, np.load(both / "shard-000000.npz") as two:
        np.testing.assert_array_equal(one["C4"][0], two["C4"][1])
