"""Errors as they go over the wire: RFC 9457 problems, and ``{"error": …}`` under ``/v2``.

Every kind of error has one entry in :data:`KINDS`: its slug (the end of ``type``), status and title. What fxcore and
the engine raise finds its kind by its class name: ``UnknownNode`` is ``/problems/unknown-node``.
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
    """A request that this layer refuses, by a slug of :data:`KINDS`; ``extra`` goes into the problem."""

    def __init__(self, slug: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra


def slug_of(error: FxError) -> str:
    """The slug of an error's class: ``UnknownNode`` → ``unknown-node``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()


def problem(error: FxError | Refusal) -> dict[str, Any]:
    """The problem document of ``error``."""
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
    """What pydantic found wrong, as one sentence and as a list for programs."""
    said: list[dict[str, str]] = []
    for error in _without_wrong_branches(errors):
        where, *path = (str(part) for part in error["loc"])
        message = error["msg"]
        if error["type"] == "json_invalid":
            path, message = [], f"it is not JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
        said.append({"in": where, "field": _field(path), "message": message})
    first = said[0]
    noun = {"query": "query parameter", "path": "path parameter", "header": "header", "body": "field"}.get(
        first["in"], ""
    )
    subject = f"{noun} {first['field']!r}" if first["field"] else "the body"
    more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
    return Refusal("invalid-request", f"{subject}: {first['message']}{more}", errors=said)


def invalid_body(error: ValidationError) -> Refusal:
    """:func:`invalid_request` for a JSON body that a route validates itself."""
    return invalid_request([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])


def _without_wrong_branches(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """For a field that may be a list or a map, pydantic reports errors of both kinds. Keep those of the kind that was
    sent; where it was neither, make one of them."""
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
    """The ``responses`` of a route that may answer these problems, with an example of each."""
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
    """The status of a problem in a protocol that knows no 422 and has 400 instead: V2, OpenAI's."""
    return 400 if status == 422 else status
