"""Parse an extractor from one line of text, for ``FXSERVE_PRELOAD`` and the model of an embedding."""

from __future__ import annotations

import re

from service.schemas.v1 import ExtractorSpec

_PATTERN = re.compile(r"(?P<model>[^:@]+)(@(?P<weights>file:[^:]+|(?!file:)[^:]*))?:(?P<nodes>.*)")


def spec_of_text(text: str) -> ExtractorSpec:
    """Parse ``MODEL[@WEIGHTS]:NODE[=KEY],…`` into a spec.

    Raises:
        ValueError: the text has another form.

    >>> spec_of_text("resnet50@random:layer3=C4,C5").return_nodes
    {'layer3': 'C4', 'C5': 'C5'}
    >>> spec_of_text("resnet50@file:mine.safetensors:C4").weights
    'file:mine.safetensors'
    """
    match = _PATTERN.fullmatch(text.strip())
    pairs = [node.partition("=") for node in match["nodes"].split(",") if node.strip()] if match else []
    if match is None or not match["model"].strip() or not pairs:
        raise ValueError(f"{text[:200]!r} is not MODEL:NODE,NODE, such as resnet50:C4,C5")
    return ExtractorSpec(
        model=match["model"].strip(),
        weights=(match["weights"] or "").strip() or "DEFAULT",
        return_nodes={node.strip(): key.strip() or node.strip() for node, _, key in pairs},
    )
