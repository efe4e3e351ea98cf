"""Knobs: what channels, positions and heads that are switched off change, against PyTorch's forward hooks."""

import json
from urllib.parse import parse_qs, urlencode

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import torch
import torchvision

from tests.e2e.page.seen import CHELSEA, attention, looks, run_curl, shown, until

VIT, TIMES = "timm.vit_tiny_patch16_224", "\N{MULTIPLICATION SIGN}"
AT_BLOCK_2 = {"m": VIT, "n": "blocks.2", "w": "random", "v": "attention"}


def squeezenet(server, edit):
    """The values of ``features.9`` and the scores for the photo, with ``edit`` of those of ``features.3``."""
    weights = torchvision.models.SqueezeNet1_1_Weights.DEFAULT
    model = torchvision.models.squeezenet1_1()
    model.load_state_dict(torch.load(server.log.parent / "hub/checkpoints" / weights.url.rpartition("/")[2]))
    kept = {}
    model.features[3].register_forward_hook(lambda module, args, value: edit(value.clone()))
    model.features[9].register_forward_hook(lambda module, args, value: kept.update(map=value[0].numpy()))
    with torch.inference_mode():
        scores = model.eval()(weights.transforms()(PIL.Image.open(CHELSEA)).unsqueeze(0))[0].numpy()
    return kept["map"], scores


def first_classes(page, label):
    rows = page.locator(f'section[aria-label="{label}"] li[data-class]')
    return [int(row.get_attribute("data-class")) for row in rows.all()]


@pytest.mark.exhaustive
def test_what_is_switched_off_changes_the_maps_after_it_and_the_predictions(open_server, visit, tmp_path):
    page = visit(open_server.url).go("m=squeezenet1_1&n=features.3&v=channels&ch=7")
    shown(page, "features.3")
    page.get_by_role("button", name="Apply").click()
    page.locator('.stage[aria-label="Channel 7 of features.3 over chelsea.jpg, edited"]').wait_for()
    page.get_by_label("What to turn").select_option(label="Position 27, 27")
    page.get_by_label("How to turn it").select_option("4")
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("button", name=f"Take back: features.3 at 27, 27 {TIMES} 4").wait_for()

    def edit(value):
        value[:, 7] = 0
        value[:, :, 27, 27] *= 4
        return value

    page.locator('.tree [title="features.9"]').click()
    shown(page, "features.9")
    page.get_by_role("button", name="Heat-map").click()
    plain, scores = squeezenet(open_server, lambda value: value)
    edited, other_scores = squeezenet(open_server, edit)
    maps = [np.abs(one).mean(axis=0) for one in (plain, edited)]
    assert np.abs(maps[0] - maps[1]).max() > 1e-3 * maps[0].max()
    scale = min(map(np.min, maps)), max(map(np.max, maps))
    label = "Heat-map of features.9 over chelsea.jpg"
    for one, name in zip(maps, (label, f"{label}, edited"), strict=True):
        looks(page, name, one, scale)
    page.evaluate("location.hash += '&n2=features.12'")
    until(page, "document.querySelectorAll('.stages .scale-bar').length === 3")
    first, second, other = page.locator(".stages .scale-bar").all_inner_texts()
    assert first == second != other  # one scale for one node
    page.locator('section[aria-label="Predictions for chelsea.jpg, edited"]').wait_for()
    for found, name in ((scores, "chelsea.jpg"), (other_scores, "chelsea.jpg, edited")):
        assert first_classes(page, f"Predictions for {name}") == np.argsort(-found, kind="stable")[:5].tolist()
    (tmp_path / "chelsea.jpg").write_bytes(CHELSEA.read_bytes())
    run_curl(page.locator(".request code").inner_text(), tmp_path)
    found = safetensors.numpy.load_file(tmp_path / "features.9.safetensors")["features.9"]
    # Photos are resized in another way here than in torchvision's transforms of PIL images.
    assert np.linalg.norm(found[0] - edited) < 0.3 * np.linalg.norm(found[0] - plain)
    page.locator('.tree [title="features.0"]').click()  # before the edited node
    page.locator('.stage[aria-label="Heat-map of features.0 over chelsea.jpg"]').wait_for()
    until(page, "document.querySelectorAll('.stage').length === 2")  # and of the other node
    page.evaluate("() => document.querySelectorAll('.knobs .pill button').forEach((one) => one.click())")  # at once
    until(page, "!location.hash.includes('e=')")
    until(page, "!document.querySelector('.knobs .pill')")


@pytest.mark.exhaustive
def test_what_a_link_edits_is_shown_and_taken_back_where_it_is_refused(open_server, visit):
    refused = {"node": "features.3", "channels": [900], "scale": 0}
    others = [None, 7, {"node": "features.3"}, *({**refused, key: [0]} for key in ("tokens", "images", "shift", "box"))]
    others += [{**refused, "channels": [1, 5]}, {**refused, "scale": [0]}]
    tab = visit(open_server.url)
    page = tab.go(urlencode({"m": "squeezenet1_1", "n": "features.3", "e": json.dumps([*others, refused])}))
    page.locator(".failure").wait_for()
    assert page.locator(".knobs .pill").count() == 1
    page.get_by_role("button", name=f"Take back: features.3 channel 900 {TIMES} 0").click()
    shown(page, "features.3")
    assert page.locator(".failure").count() == 0
    assert "e=" not in page.evaluate("location.hash")
    edits = [{"node": "features.3", "channels": [channel], "scale": 0} for channel in range(20)]
    page.evaluate("edits => (location.hash += `&e=${JSON.stringify(edits)}`)", edits)
    until(page, "document.querySelectorAll('.knobs .pill').length === 16")  # as many as a request may have
    assert not [complaint for complaint in tab.complaints if "422" not in complaint]


@pytest.mark.exhaustive
def test_a_head_of_attention_is_switched_off_by_what_it_writes(open_server, visit):
    page = visit(open_server.url).go(urlencode({**AT_BLOCK_2, "head": "1"}))
    page.locator(".stage").wait_for(timeout=90_000)
    page.get_by_role("button", name="Apply").click()
    note = page.get_by_text("No edit changes the weights of blocks.2.attn.attention")
    note.wait_for()
    [edit] = json.loads(parse_qs(page.evaluate("location.hash"))["e"][0])
    graph = open_server.http.get(f"/v1/models/{VIT}/graph", params={"format": "json", "weights": "random"}).json()
    [source] = next(node["args"] for node in graph["nodes"] if node["name"] == "blocks.2.attn.proj")
    assert edit == {"node": source, "channels": list(range(64, 128)), "scale": 0}  # of 192 for 3 heads
    call = {"node": "blocks.2.attn.scaled_dot_product_attention", "scale": 0}
    page.goto(f"{open_server.url}/#{urlencode({**AT_BLOCK_2, 'head': '3', 'e': json.dumps([call])})}")
    page.locator('.stage[aria-label="Mean of all heads of blocks.2.attn.attention over chelsea.jpg"]').wait_for()
    note.wait_for()
    assert page.get_by_role("button", name="Apply").count() == 0  # there is no fourth head
    page.get_by_role("button", name="The attention after").click()
    node = "blocks.3.attn.attention"
    plain, edited = (attention(open_server, VIT, node, edits=edits).mean(axis=0) for edits in ([], [call]))
    rows = [one[1 + 7 * 14 + 7, 1:].reshape(14, 14) for one in (plain, edited)]
    assert np.abs(rows[0] - rows[1]).max() > 1e-3 * rows[0].max()
    scale = min(map(np.min, rows)), max(map(np.max, rows))
    label = f"Mean of all heads of {node} over chelsea.jpg"
    for row, name in zip(rows, (label, f"{label}, edited"), strict=True):
        looks(page, name, row, scale)
