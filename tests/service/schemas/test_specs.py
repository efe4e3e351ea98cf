"""What FXSERVE_PRELOAD and embeddings' models say."""

import pytest
from pydantic import ValidationError

from service.schemas.specs import STORED, ExtractorSpec, model_of_text, spec_of_text


@pytest.mark.parametrize(
    ("text", "model", "weights", "nodes"),
    [
        ("resnet50:C4,C5,C4", "resnet50", "DEFAULT", ["C4", "C5"]),
        ("resnet50:layer1.*", "resnet50", "DEFAULT", ["layer1.*"]),
        ("a@random:features.8=C4", "a", "random", {"features.8": "C4"}),
        (" a @ random : x = y , z ", "a", "random", {"x": "y", "z": "z"}),
        ("a@file:mine.safetensors:layer3=C4,C5", "a", "file:mine.safetensors", {"layer3": "C4", "C5": "C5"}),
        ("a@:C4", "a", "DEFAULT", ["C4"]),
    ],
)
def test_what_is_to_be_built(text: str, model: str, weights: str, nodes: list[str] | dict[str, str]) -> None:
    spec = spec_of_text(text)
    assert (spec.model, spec.weights, spec.return_nodes) == (model, weights, nodes)


@pytest.mark.parametrize("text", ["resnet50", "resnet50:", ":C4", "@random:C4", "resnet50@file:mine.pth", "a@file:b:"])
def test_what_names_no_nodes_of_a_model(text: str) -> None:
    with pytest.raises(ValueError, match="is not MODEL:NODE,NODE, such as resnet50:C4,C5"):
        spec_of_text(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (" resnet50 ", ("resnet50", "DEFAULT")),
        ("a @ random", ("a", "random")),
        ("a@", ("a", "DEFAULT")),
        ("a@file:mine.pth", ("a", "file:mine.pth")),
        ("resnet50:", None),
        ("resnet50:C4", None),
        ("a@file:mine.pth:C4", None),
        ("@random", None),
        (" ", None),
    ],
)
def test_what_names_a_model_alone(text: str, names: tuple[str, str] | None) -> None:
    assert model_of_text(text) == names


@pytest.mark.parametrize("nodes", ["layer4=A,layer4=B", "layer4,layer3,layer4=B"])
def test_a_node_with_several_keys_is_refused(nodes: str) -> None:
    """A map of nodes to keys would drop all but the last."""
    with pytest.raises(ValueError, match="'layer4' has several keys, but each node has one output"):
        spec_of_text(f"resnet50:{nodes}")


def test_a_name_that_looks_like_an_id_is_refused_unless_it_was_given_before() -> None:
    fields = {"model": "resnet18", "return_nodes": ["fc"]}
    wrong = {**fields, "name": "0123456789ab"}
    with pytest.raises(ValidationError, match="cannot have the name '0123456789ab', which looks like an id"):
        ExtractorSpec.model_validate(wrong)
    assert ExtractorSpec.model_validate(wrong, context=STORED).name == "0123456789ab"
    for name in ("0123456789a", "0123456789abc", "0123456789AB", "r50-c4c5", "0123456789ag"):
        assert ExtractorSpec(**fields, name=name).name == name  # type: ignore[arg-type]
