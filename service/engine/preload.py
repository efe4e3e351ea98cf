"""``FXSERVE_PRELOAD``: extractors in one line of text."""

from __future__ import annotations

from service.schemas import ExtractorSpec


def preload_spec(text: str) -> ExtractorSpec:
    """``MODEL[@WEIGHTS]:NODE[=KEY],…`` → the extractor it means.

    Raises:
        ValueError: it is not written like that.

    >>> preload_spec("resnet50@random:layer3=C4,C5").return_nodes
    {'layer3': 'C4', 'C5': 'C5'}
    """
    head, _, tail = text.partition(":")
    model, _, weights = head.partition("@")
    pairs = [node.partition("=") for node in tail.split(",") if node.strip()]
    if not model.strip() or not pairs:
        raise ValueError(f"cannot preload {text!r}; write MODEL:NODE,NODE as in resnet50:C4,C5")
    return ExtractorSpec(
        model=model.strip(),
        weights=weights.strip() or "DEFAULT",
        return_nodes={node.strip(): key.strip() or node.strip() for node, _, key in pairs},
    )
