"""Problem documents (RFC 9457).

Every problem type has an entry in :data:`KINDS`: its slug (the end of ``type``), status and title. Exceptions of fxcore
and the engine map to theirs by class name: ``UnknownNode`` is ``/problems/unknown-node``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from fxcore.errors import FxError
from service.schemas.problem_kinds import KINDS, Kind

MEDIA_TYPE = "application/problem+json"


class Refusal(Exception):
    """A request refused by the HTTP layer, with a slug of :data:`KINDS`; ``extra`` adds fields to the problem."""

    def __init__(self, slug: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra


def slug_of(error: FxError) -> str:
    """Slug of an exception's class: ``UnknownNode`` → ``unknown-node``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def problem(error: FxError | Refusal) -> dict[str, Any]:
    """Build the problem document of ``error``."""
    slug = error.slug if isinstance(error, Refusal) else slug_of(error)
    kind = KINDS.get(slug) or Kind(getattr(error, "status", 422), slug.replace("-", " ").capitalize(), "")
    return {
        "type": f"/problems/{slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": error.detail,
        **{key: value for key, value in error.extra.items() if key not in ("type", "title", "status", "detail")},
    }


def invalid_request(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """Turn pydantic's errors into a refusal: the first as a sentence, all as a list for programs."""
    found: list[dict[str, str]] = []
    for error in _without_wrong_branches(errors):
        where, *path = (str(part) for part in error["loc"])
        message = error["msg"]
        if error["type"] == "json_invalid":
            path, message = [], f"not valid JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
        found.append({"in": where, "field": _field(path), "message": message})
    first = found[0]
    noun = {"query": "query parameter", "path": "path parameter", "header": "header", "body": "field"}.get(
        first["in"], ""
    )
    subject = f"{noun} {first['field']!r}" if first["field"] else "the body"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Refusal("invalid-request", f"{subject}: {first['message']}{more}", errors=found)


def invalid_body(error: ValidationError) -> Refusal:
    """:func:`invalid_request` for a JSON body that a route validates itself."""
    return invalid_request([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])


def _without_wrong_branches(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Clean up the errors of a field that may be a list or a map, of which pydantic reports both.

    Keep those of the type that was sent; if it was neither, merge them into one.
    """
    shown: list[Mapping[str, Any]] = []
    for _, group in groupby(errors, key=lambda error: [str(part) for part in error["loc"][:2]]):
        members = list(group)
        branches = [error for error in members if error["type"] in ("list_type", "dict_type")]
        others = [error for error in members if error not in branches]
        if len(branches) == 2:
            others = [{**branches[0], "msg": "Input should be a list of names or a map from name to key"}]
        shown += others or branches
    return shown


def _field(path: Sequence[Any]) -> str:
    """A field's path without pydantic's names for the members of a union, such as ``list[str]``."""
    return ".".join(str(part) for part in path if "[" not in str(part))


def documented(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI ``responses`` of a route for these problems, with an example of each."""
    responses: dict[int | str, dict[str, Any]] = {}
    for slug in slugs:
        kind = KINDS[slug]
        example = {
            "type": f"/problems/{slug}",
            "title": kind.title,
            "status": kind.status,
            "detail": kind.example,
            **kind.extra,
        }
        response = responses.setdefault(
            kind.status,
            {
                "description": HTTPStatus(kind.status).phrase,
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        response["content"][MEDIA_TYPE]["examples"][slug] = {"summary": kind.title, "value": example}
        if kind.status in (429, 503) and slug != "weights-unavailable":
            description = "Seconds to wait." if kind.status == 429 else "Seconds to wait; not with weights-unavailable."
            schema = {"type": "integer"}
            response["headers"] = {"Retry-After": {"description": description, "schema": schema, "example": 2}}
    return responses


def status_without_422(status: int) -> int:
    """Map 422 to 400, for protocols without it: V2 and OpenAI's."""
    return 400 if status == 422 else status
