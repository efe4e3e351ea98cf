"""The web page and the API reference: static files, which browsers revalidate by ETag."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response
from starlette.convertors import StringConvertor, register_url_convertor

from service import page
from service.http.routing.declared import declares


class _PageFile(StringConvertor):
    """Convertor for names of the page's files, so that only these are routes, which are open to everyone."""

    regex = "|".join(re.escape(path.removeprefix("/page/")) for path in page.PATHS if path.startswith("/page/"))


register_url_convertor("page_file", _PageFile())

router = APIRouter(tags=["operations"])


@router.get(
    "/",
    response_class=Response,
    responses={
        200: {
            "description": "HTML.",
            "content": {"text/html": {"schema": {"type": "string"}, "example": "<!doctype html>…"}},
        }
    },
)
@declares("open")
async def front_page(request: Request) -> Response:
    """Show the web page: models, their graphs, and the output of each node for a photo."""
    return _file(request, "/")


@router.get("/docs", include_in_schema=False)
@declares("open")
@router.get("/redoc", include_in_schema=False)
@declares("open")
async def reference(request: Request) -> Response:
    """Show the interactive API reference, at both of FastAPI's addresses."""
    return _file(request, "/docs")


@router.get("/page/{file:page_file}", include_in_schema=False)
@declares("open")
async def page_file(request: Request, file: str) -> Response:
    """Return a script, a stylesheet or a photograph of the two pages."""
    return _file(request, f"/page/{file}")


def _file(request: Request, path: str) -> Response:
    file = page.read(path)
    # no-cache: browsers keep the file but revalidate it each time, so an upgrade shows at once.
    headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in (tag.strip() for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    takes_gzip = re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", request.headers.get("accept-encoding", ""))
    if file.compressed is None or takes_gzip is None:
        return Response(file.content, headers=headers, media_type=file.media_type)
    return Response(file.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type)
