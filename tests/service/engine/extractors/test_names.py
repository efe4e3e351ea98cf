"""Names of extractors, without extractors."""

import pytest

from service.engine.extractors.names import MAX_NAMES, Names
from service.schemas.specs import ExtractorSpec


def test_suggestions_are_searched_among_the_latest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.extractors.names.COMPARED", 3)
    names = Names()
    for name in ("layer-1", "layer-2", "layer-3", "layer-1"):  # which makes that one the last
        names.give(name, "a")
    assert set(names.near("layer-x", ["layer-y"])) == {"layer-1", "layer-2", "layer-3"}
    names.give("other", "b")
    assert set(names.near("layer-x", ["layer-y"])) == {"layer-1", "layer-3"}
    names.forget("a")
    assert names.near("layer-x", ["layer-y", "layer-z", "layer-v"]) == ["layer-z", "layer-y"]


def test_unrelated_ids_are_not_suggested() -> None:
    ids = ["0f4be0b39ec5", "5b01f24b3a17", "9a6be0b38fc2"]
    assert Names().near("9a6be0b38fc3", ids) == ["9a6be0b38fc2"]  # and not the first, which shares half of it


def test_a_name_goes_from_one_to_another() -> None:
    names = Names()
    names.give("mine", "a")
    names.give("mine", "b")
    names.forget("a")
    assert names.id("mine") == "b"
    names.forget("b")
    assert names.id("mine") is None


def test_how_many_are_kept_is_documented() -> None:
    assert f"keeps the last {MAX_NAMES} names" in str(ExtractorSpec.model_fields["name"].description)
