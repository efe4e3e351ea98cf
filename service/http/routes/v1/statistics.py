"""Statistics of a data set: the images with the largest values of each channel."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Path, Query, Response

from service import problems
from service.http.routes.v1.models import MODEL_PROBLEMS, Model
from service.http.routing.declared import declares
from service.http.routing.strict_routes import StrictRoute
from service.http.scope import Caller, Calling
from service.http.state import Shared, State
from service.http.top_images import TopImages
from service.schemas.specs import MAX_NAME_LENGTH
from service.schemas.v1.statistics import ChannelStatistics

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=StrictRoute)

_JPEG = "image/jpeg"


@router.get("/{model}/statistics", response_model=ChannelStatistics)
@declares("read", *MODEL_PROBLEMS, problems.NotFound, problems.UnknownNode)
async def show_statistics(
    state: Shared,
    caller: Calling,
    model: Model,
    node: Annotated[
        str,
        Query(
            max_length=MAX_NAME_LENGTH,
            description="A node listed in `statistics` of `GET /v1/models/{model}`, by any of its names, or the key of "
            "its output.",
            examples=["layer3.5.relu_2"],
        ),
    ],
    channel: Annotated[int, Query(ge=0, le=2**31, description="Channel of the node, from 0.", examples=[3])],
) -> Response:
    """List the images of the operator's data set with the largest values of a channel.

    They come from a run of `fxserve extract --reduce top:N`.
    """
    found = await _top_images(state, caller, model)
    name = found.known(node)
    if name is None:
        name = await state.in_thread(caller, lambda: found.resolve(node))
    at = f"/v1/models/{quote(model, safe='')}/statistics/images"
    top = [{"image": f"{at}/{entry.pop('key')}", **entry} for entry in found.top(name, channel)]
    about = {"weights": found.weights, "images": found.images, "nodes": list(found.nodes)}
    shown = {"model": model, **about, "node": name, "channel": channel, "channels": found.nodes[name], "top": top}
    return Response(orjson.dumps(shown), media_type="application/json")


@router.get(
    "/{model}/statistics/images/{image}",
    response_class=Response,
    responses={
        200: {
            "description": "A JPEG file.",
            "content": {_JPEG: {"schema": {"type": "string", "contentMediaType": _JPEG}, "example": "JFIF…"}},
        }
    },
)
@declares("read", *MODEL_PROBLEMS, problems.NotFound, problems.BadImage, problems.ImageTooLarge)
async def show_image(
    state: Shared,
    caller: Calling,
    model: Model,
    image: Annotated[
        str,
        Path(
            pattern="^[0-9a-f]{16}$",
            description="Key of the image: the last part of `image` in the list.",
            examples=["3f2a9c0d17b8e645"],
        ),
    ],
) -> Response:
    """Show an image listed by `GET /v1/models/{model}/statistics`, at most 256 pixels per side."""
    found = await _top_images(state, caller, model)
    async with state.pictures.place(caller) as run:
        picture = await run(lambda: found.picture(image))
    return Response(picture, media_type=_JPEG, headers={"Cache-Control": "private, max-age=3600"})


async def _top_images(state: State, caller: Caller, model: str) -> TopImages:
    await state.model(caller, model)
    if state.top_images is None or state.top_images.model != model:
        raise problems.NotFound(
            f"this server has no statistics of {model}; set FXSERVE_STATISTICS to a folder created by fxserve extract "
            "--reduce top:N"
        )
    return state.top_images
