"""Problem documents (RFC 9457), and the other shapes of errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from fxcore.errors import FxError
from service.problems import FIELDS, AdmissionFull, InvalidRequest, Problem, WeightsUnavailable
from service.schemas.problem_examples import EXAMPLES

Document = dict[str, Any]

_NAMED = {kind.__name__: kind for kind in Problem.kinds.values()}


def problem(error: FxError | Problem) -> Document:
    """Build the problem document of ``error``.

    An error of fxcore becomes the problem whose class has the same name. Other errors, which libraries on top of fxcore
    may raise, become ``invalid-request``.
    """
    kind = type(error) if isinstance(error, Problem) else _NAMED.get(type(error).__name__, InvalidRequest)
    return {
        "type": f"/problems/{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "detail": error.detail,
        **{key: value for key, value in error.extra.items() if key not in FIELDS},
    }


@dataclass(frozen=True)
class Shape:
    """The format of problems on some paths.

    Attributes:
        media_type: media type of the body.
        schema: name of the body's schema in the OpenAPI document.
        body: converts a problem document to the body.
        has_422: whether clients know status 422; otherwise it becomes 400.
    """

    media_type: str
    schema: str
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    has_422: bool = False

    def status(self, status: int) -> int:
        """Return the response status for a problem with ``status``."""
        return 400 if status == 422 and not self.has_422 else status


PROBLEM = Shape("application/problem+json", "Problem", lambda document: document, has_422=True)


def documented(*kinds: type[Problem], shape: Shape = PROBLEM) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI ``responses`` of a route for these problems, each with an example."""
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        status = shape.status(kind.status)
        schema = {"$ref": f"#/components/schemas/{shape.schema}"}
        content = {shape.media_type: {"schema": schema, "examples": {}}}
        response = responses.setdefault(status, {"description": HTTPStatus(status).phrase, "content": content})
        shown = shape.body(problem(EXAMPLES[kind]))
        response["content"][shape.media_type]["examples"][kind.slug] = {"summary": kind.title, "value": shown}
        if status in (429, 503) and kind is not WeightsUnavailable:
            more = "" if kind is AdmissionFull else "; not with weights-unavailable"
            response["headers"] = {
                "Retry-After": {
                    "description": f"Seconds to wait{more}.",
                    "schema": {"type": "integer"},
                    "example": 2,
                }
            }
    return responses


def invalid_request(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Convert pydantic's errors to a problem: the first one as a sentence, and all as a list for programs."""
    found: list[dict[str, str]] = []
    for error in sorted(errors, key=lambda error: error["type"] != "unknown_field"):
        where, *path = (str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")  # pydantic's prefix of validators' messages
        if error["type"] == "json_invalid":
            path, message = [], f"not valid JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
        elif error["type"] in ("model_type", "model_attributes_type", "dict_type"):  # pydantic names Python's classes
            message = "Input should be a JSON object"
        elif error["type"] in ("too_short", "too_long"):  # "List should have at least 1 item after validation, not 0"
            message = f"Input {message.partition(' ')[2]}".replace(" after validation", "")
        field = ".".join(part for part in path if part != "[key]")  # pydantic's mark of an error in the key itself
        found.append({"in": where, "field": field, "message": message})
    first = found[0]
    noun = {"query": "query parameter", "path": "path parameter", "header": "header", "body": "field"}.get(
        first["in"], ""
    )
    subject = f"{noun} {first['field']!r}" if first["field"] else "the body"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return InvalidRequest(f"{subject}: {first['message']}{more}", errors=found)


def invalid_body(error: ValidationError) -> InvalidRequest:
    """Convert the errors of a JSON body that a route validates itself; see :func:`invalid_request`."""
    return invalid_request([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
