"""Parse nodes and keys from one line of text, for queries and the command line."""

from __future__ import annotations

from service.schemas.v1 import MAX_NAME_LENGTH, MAX_NODES, key_fault


def node_pairs(text: str) -> list[tuple[str, str]]:
    """Parse ``"layer3:C4,layer4"`` into pairs of node and key, in order. The key defaults to the node.

    Raises:
        ValueError: a name is empty or too long, a key is not allowed, or there are too many nodes.

    >>> node_pairs("layer3:C4, layer4")
    [('layer3', 'C4'), ('layer4', 'layer4')]
    """
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        node, colon, key = (piece.strip() for piece in part.partition(":"))
        if not node or (colon and not key):
            raise ValueError(f"{part[:100]!r} is not NODE or NODE:KEY")
        if max(len(node), len(key)) > MAX_NAME_LENGTH:
            raise ValueError(f"names and keys have at most {MAX_NAME_LENGTH} characters")
        fault = key_fault(key or node)
        if fault is not None:
            raise ValueError(fault)
        pairs.append((node, key or node))
    if len(pairs) > MAX_NODES:
        raise ValueError(f"at most {MAX_NODES} nodes are allowed")
    return pairs
