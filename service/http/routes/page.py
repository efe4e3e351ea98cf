"""The page for people and the API's reference: static files, which browsers revalidate by ETag."""

from __future__ import annotations

import re

from fastapi import APIRouter, HTTPException, Request, Response

from service import page

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
async def front_page(request: Request) -> Response:
    """A page for people: models, their graphs, and the output of each node for a photo."""
    return _file(request, "/")


@router.get("/docs", include_in_schema=False)
@router.get("/redoc", include_in_schema=False)
async def reference(request: Request) -> Response:
    """This API, to read and to try; at both addresses where FastAPI has one."""
    return _file(request, "/docs")


@router.get("/page/{file}", include_in_schema=False)
async def page_file(request: Request, file: str) -> Response:
    """A script, a style or a photograph of the two pages."""
    path = f"/page/{file}"
    if path not in page.PATHS:
        raise HTTPException(404)
    return _file(request, path)


def _file(request: Request, path: str) -> Response:
    file = page.read(path)
    # no-cache: browsers keep the file and revalidate it each time, so an upgrade is seen at once.
    headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in (tag.strip() for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    takes_gzip = re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", request.headers.get("accept-encoding", ""))
    if file.compressed is None or takes_gzip is None:
        return Response(file.content, headers=headers, media_type=file.media_type)
    return Response(file.compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type)
