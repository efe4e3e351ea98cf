"""Examples of documents, composed from those of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compose(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Compose an example of a document; a schema's own example is used if it has one.

    Args:
        schema: a JSON schema as pydantic generates it.
        schemas: the schemas that it refers to, by name.
    """
    if "$ref" in schema:
        return compose(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for own in ("examples", "enum"):
        if own in schema:
            return schema[own][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return compose(schema["anyOf"][0], schemas)
    if schema.get("type") == "array":
        return [compose(schema["items"], schemas)]
    if schema.get("type") == "object":
        example = {name: compose(field, schemas) for name, field in schema.get("properties", {}).items()}
        others = schema.get("additionalProperties")
        return example | ({"name": compose(others, schemas)} if isinstance(others, dict) else {})
    return schema.get("default")
