"""Names of extractors, without models."""

from dataclasses import replace
from functools import cache

import pytest
from prometheus_client import CollectorRegistry, Counter

from service.engine import ExtractorRecord
from service.engine.description import Description
from service.engine.lifecycle.records import MAX_NAMES, Records
from service.problems import UnknownExtractor
from service.schemas.specs import ExtractorSpec
from tests.service.engine.running import runtime_alone


@cache
def description() -> Description:
    return runtime_alone().description


def known(*ids: str) -> tuple[Records, list[ExtractorRecord]]:
    records = Records(Counter("evictions", "", ("kind", "reason"), registry=CollectorRegistry()))
    made = [ExtractorRecord(replace(description(), id=id)) for id in ids]
    for record in made:
        records.add(record)
    return records, made


def near(records: Records, wrong: str) -> list[str]:
    with pytest.raises(UnknownExtractor) as unknown:
        records.find(wrong)
    suggestions: list[str] = unknown.value.extra["suggestions"]
    return suggestions


@pytest.mark.exhaustive
def test_suggestions_are_searched_among_the_latest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.lifecycle.records.COMPARED", 3)
    records, [other, one, *_] = known("other", "layer-v", "layer-z", "layer-y")
    for name in ("layer-1", "layer-2", "layer-3", "layer-1"):  # which makes that one the last
        records.name(one, name)
    assert set(near(records, "layer-x")) == {"layer-1", "layer-2", "layer-3"}
    records.name(other, "mine")
    assert set(near(records, "layer-x")) == {"layer-1", "layer-3"}
    records.free_names(one)
    assert near(records, "layer-x") == ["layer-z", "layer-y"]


def test_unrelated_ids_are_not_suggested() -> None:
    records, _ = known("0f4be0b39ec5", "5b01f24b3a17", "9a6be0b38fc2")
    assert near(records, "9a6be0b38fc3") == ["9a6be0b38fc2"]  # and not the first, which shares half of it


def test_a_name_goes_from_one_to_another() -> None:
    records, [one, other] = known("a", "b")
    records.name(one, "first")
    records.name(one, "mine")
    records.name(other, "mine")
    assert (one.name, other.name) == ("first", "mine")
    records.forget(one)
    assert (records.known("mine"), records.known("first")) == (other, None)
    records.forget(other)
    assert records.known("mine") is None


def test_a_name_that_is_the_id_of_another_extractor_belongs_to_its_own() -> None:
    """Such names are refused since, but a store may have one."""
    records, [one, other] = known("a", "b")
    records.name(one, "mine")
    records.name(other, "a")
    assert (one.name, other.name, records.known("a")) == ("mine", "a", one)
    records.free_name("a")
    assert (one.name, other.name) == ("mine", None)


def test_how_many_are_kept_is_documented() -> None:
    assert f"keeps the last {MAX_NAMES} names" in str(ExtractorSpec.model_fields["name"].description)
