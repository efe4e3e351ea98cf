"""Extractors in one line of text, as ``FXSERVE_PRELOAD`` and the model of an embedding name them."""

from __future__ import annotations

import re

from service.schemas.v1 import ExtractorSpec

_WRITTEN = re.compile(r"(?P<model>[^:@]+)(@(?P<weights>file:[^:]+|(?!file:)[^:]*))?:(?P<nodes>.*)")


def spec_of_text(text: str) -> ExtractorSpec:
    """``MODEL[@WEIGHTS]:NODE[=KEY],…`` → the extractor it means.

    Raises:
        ValueError: it is not written like that.

    >>> spec_of_text("resnet50@random:layer3=C4,C5").return_nodes
    {'layer3': 'C4', 'C5': 'C5'}
    >>> spec_of_text("resnet50@file:mine.safetensors:C4").weights
    'file:mine.safetensors'
    """
    written = _WRITTEN.fullmatch(text.strip())
    pairs = [node.partition("=") for node in written["nodes"].split(",") if node.strip()] if written else []
    if written is None or not written["model"].strip() or not pairs:
        raise ValueError(f"{text[:200]!r} is no extractor; write MODEL:NODE,NODE as in resnet50:C4,C5")
    return ExtractorSpec(
        model=written["model"].strip(),
        weights=(written["weights"] or "").strip() or "DEFAULT",
        return_nodes={node.strip(): key.strip() or node.strip() for node, _, key in pairs},
    )
