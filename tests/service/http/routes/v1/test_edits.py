"""Edits in JSON bodies, on both routes, equal forward hooks; wrong ones are refused by their index."""

import json

import pytest
import torch

from fxcore import get_model
from fxcore.models.weights import load_model
from tests.wire import close, created, images, read, refused

EDITS = [
    {"node": "C3", "channels": [1, 5], "scale": [0, -2], "shift": [0.5, 0]},
    {"node": "layer2", "box": [0, 1, 14, 28], "scale": 3, "images": [1]},
]


def body(photos, edits):
    return images([photos["chelsea"], photos["rocket"]], edits=edits)


def ask(client, document, query="nodes=layer2,fc"):
    return client.post(f"/v1/models/resnet18/features?weights=random&{query}", json=document)


def test_equal_to_a_hook_on_both_routes(client, photos, reference):
    plain = reference("resnet18", "layer2.1.relu_1", [photos["chelsea"], photos["rocket"]])
    model = load_model(get_model("resnet18"), "random").eval()
    wanted = plain.clone()
    wanted[:, 1] = 0.5
    wanted[:, 5] *= -2
    wanted[1, :, 1:28, :14] *= 3
    with torch.no_grad():
        end = model.fc(model.avgpool(model.layer4(model.layer3(wanted))).flatten(1))
    found = read(ask(client, body(photos, EDITS)))
    close(found["layer2"], wanted)
    close(found["fc"], end)
    id = created(client, model="resnet18", weights="random", return_nodes=["layer2", "fc"])["id"]
    again = client.post(f"/v1/extractors/{id}/features?pool=avg", json=body(photos, EDITS))
    close(read(again)["layer2"], wanted.mean((2, 3)))
    close(read(ask(client, body(photos, [])))["layer2"], plain)
    [told] = client.get(f"/v1/extractors/{id}").json()["edits"]
    assert (told["nodes"], told["backend"]) == (["layer2.1.relu_1"], "eager")
    assert told["images"] >= 4


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"node": "layer2", "channels": [128]}, "no channel 128 in layer2.1.relu_1: it has 128"),
        ({"node": "layer2", "box": [0, 0, 1]}, "is not [x1, y1, x2, y2]"),
        ({"node": "layer5"}, "did you mean layer4"),
        ({"node": "layer1.*"}, "stands for several nodes"),
        ({"node": "layer2", "scale": float("nan")}, "not a finite float32 number"),
    ],
)
def test_wrong_edits_are_named(client, photos, edit, said):
    text = json.dumps(body(photos, [{"node": "C3"}, edit]))  # with NaN, which httpx does not write
    url = "/v1/models/resnet18/features?weights=random&nodes=layer2,fc"
    response = client.post(url, content=text, headers={"content-type": "application/json"})
    document = refused(response, "bad-edit", said)
    assert document["edit"] == 1
    assert document["detail"].startswith("edit 1: ")


def test_edits_behind_the_nodes_asked_for_are_refused(client, photos):
    assert refused(ask(client, body(photos, [{"node": "fc"}]), "nodes=layer2"), "bad-edit")["edit"] == 0


@pytest.mark.parametrize(
    "edits",
    [
        [{"channels": [1]}],
        [{"node": "layer2", "channels": [1.5]}],
        [{"node": "layer2", "channels": [True]}],
        [{"node": "layer2", "scale": "0"}],
        [{"node": "layer2", "rows": [1]}],
        [{"node": "layer2"}] * 17,
        {"node": "layer2"},
    ],
)
def test_other_fields_and_types_are_refused_by_their_place(client, photos, edits):
    response = ask(client, body(photos, edits))
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"].startswith("edits")


def test_attributions_take_no_edits(client, photos):
    document = {**body(photos, EDITS), "images": body(photos, [])["images"][:1]}
    response = client.post("/v1/models/resnet18/attributions?weights=random&of=fc&at=layer4", json=document)
    refused(response, "invalid-request", "POST …/features")


def test_int8_is_refused_before_weights_are_loaded(client, photos, checkpoints):
    (checkpoints / "mobilenet_v3_large-5c1a4163.pth").write_bytes(b"cut short")
    url = "/v1/models/mobilenet_v3_large/features?nodes=C5&precision=int8"
    refused(client.post(url, json=body(photos, [{"node": "C3", "scale": 0}])), "bad-edit", "precision=float32")
