"""Discovery of models, their weights, nodes and graphs.

No weights are loaded. The name of the weights determines details of a model's structure, such as its heads.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BeforeValidator

from fxcore.graph.model_graph import model_graph
from fxcore.graph.multiples import multiple_of
from fxcore.images.decoding import PREPROCESS_MODES
from fxcore.models.catalog import Source, source_of
from fxcore.models.entry import ModelEntry, Task
from fxcore.models.timm_models import installed
from service import problems
from service.choices import GraphFormat
from service.engine.backends.choice import served_precisions
from service.http import graph_formats
from service.http.lookups import LOOKUP_PROBLEMS
from service.http.routing.declared import declares
from service.http.routing.strict_routes import StrictRoute
from service.http.scope import Calling
from service.http.state import Shared, State
from service.schemas.image_size import MAX_SIDE
from service.schemas.specs import MAX_NAME_LENGTH, WeightsName
from service.schemas.v1.models import ModelDetail, ModelList, NodeList

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=StrictRoute)

# Problems of every route of a model.
MODEL_PROBLEMS = (
    problems.UnknownModel,
    problems.NotTraceable,
    problems.Unsupported,
    problems.InvalidRequest,
    *LOOKUP_PROBLEMS,
)

Model = Annotated[
    str, Path(description="A name from `GET /v1/models`.", examples=["resnet50"], max_length=MAX_NAME_LENGTH)
]
Side = Annotated[
    int | None,
    Query(
        ge=1,
        le=MAX_SIDE,
        description="Size of the input in pixels, for computing shapes. Give both height and width, or neither.",
        examples=[480],
    ),
]
Weights = Annotated[
    WeightsName,
    Query(
        description="Weights, which determine the model's structure: `DEFAULT`, a name from the model's list, "
        "`random` or `file:NAME`. They are not loaded.",
        examples=["IMAGENET1K_V1"],
    ),
]


@router.get("", response_model=ModelList)
@declares("read", problems.InvalidRequest, problems.Unsupported, *LOOKUP_PROBLEMS)
async def list_models(
    state: Shared,
    caller: Calling,
    task: Annotated[
        Task | None,
        BeforeValidator(lambda text: text or None),  # clients send all fields of a form
        Query(description="Only models for this task.", examples=["classification"]),
    ] = None,
    source: Annotated[
        Source | None,
        Query(
            description="Only models from this source; `own` models are the operator's; `packaged` ones come with "
            "their weights.",
            examples=["torchvision"],
        ),
    ] = None,
    q: Annotated[
        str | None, Query(max_length=128, description="Only models whose name contains this.", examples=["resnet"])
    ] = None,
) -> Response:
    """List the models served, by name. timm's, over a thousand, are only counted unless `source=timm` is given."""
    loaded = {model for model, _ in state.engine.models.loaded_weights()}
    with_timm = source == "timm" or (source is None and installed())

    def find() -> bytes:
        timm_models = state.models("timm") if with_timm else []
        entries = [
            entry
            for entry in (timm_models if source == "timm" else state.models(source))
            if (task is None or entry.task == task) and (q is None or q.lower() in entry.name.lower())
        ]
        found = [
            {
                "name": entry.name,
                "task": entry.task,
                "weights": list(entry.weights),
                "default_weights": entry.default_weights,
                "loaded": entry.name in loaded,
            }
            for entry in entries
        ]
        # Also in OpenAI's shape, for its clients.
        data = [_as_openai(entry) for entry in entries]
        counted = {"models": len(timm_models), "list": "/v1/models?source=timm"} if with_timm else None
        return orjson.dumps({"models": found, "timm": counted, "object": "list", "data": data})

    async with state.listings.place(caller) as run:
        return _json(await run(find))


@router.get("/{model}", response_model=ModelDetail)
@declares("read", *MODEL_PROBLEMS, problems.UnknownWeights)
async def show_model(
    state: Shared,
    caller: Calling,
    model: Model,
    weights: Weights = "DEFAULT",
    categories: Annotated[
        bool, Query(description="Also list the names of the classes of each set of weights.", examples=[True])
    ] = False,
) -> Response:
    """Show a model: every set of its weights, and the inputs, preprocessing and pyramid levels of the chosen ones."""
    entry = await state.model(caller, model)
    return _json(await state.in_thread(caller, lambda: _detail(state, entry, weights, categories)))


@router.get("/{model}/nodes", response_model=NodeList)
@declares("read", *MODEL_PROBLEMS, problems.UnknownWeights)
async def list_nodes(
    state: Shared,
    caller: Calling,
    model: Model,
    weights: Weights = "DEFAULT",
    transforms: Annotated[
        Literal["attention_maps"] | None,
        Query(
            description="Also list the eval nodes that this transform adds: none if the model has no attention, for "
            "which `POST /v1/extractors` refuses it.",
            examples=["attention_maps"],
        ),
    ] = None,
) -> Response:
    """List the names of a model's nodes in order of execution, as torchvision's `get_graph_node_names` does."""
    entry = await state.model(caller, model)
    structure = entry.structure(weights)
    key = ("nodes", model, structure, transforms)
    return _json(await state.document(caller, key, lambda: _nodes(entry, structure, transforms)))


@router.get("/{model}/graph", responses={200: graph_formats.RESPONSE})
@declares("read", *MODEL_PROBLEMS, problems.UnknownWeights, problems.NotAcceptable, problems.BadTensor)
async def show_graph(
    request: Request,
    state: Shared,
    caller: Calling,
    model: Model,
    weights: Weights = "DEFAULT",
    height: Side = None,
    width: Side = None,
    format: Annotated[
        GraphFormat | None,
        Query(
            description="`table` and `code` are plain text; `layout` is JSON with the positions of nested boxes, one "
            "per module. By default, `Accept` decides.",
            examples=["svg"],
        ),
    ] = None,
    depth: graph_formats.Depth = None,
    expanded: graph_formats.Expanded = None,
) -> Response:
    """Show a model's eval graph, with shape, layout, stride, parameters and FLOPs of each node."""
    entry = await state.model(caller, model)
    chosen = graph_formats.chosen_format(format, request)
    if (height is None) != (width is None):
        missing = "height" if height is None else "width"
        raise problems.InvalidRequest(f"query parameter {missing!r}: give height and width, or neither", field=missing)
    size = None if height is None or width is None else (height, width)
    modules = graph_formats.parse_expanded(expanded, chosen, depth)
    structure = entry.structure(weights)
    # A list of modules may have 64 kB, and the cache counts only its values.
    opened = None if modules is None else hashlib.sha256(",".join(modules).encode()).digest()

    def written() -> bytes:
        graph = model_graph(entry, structure)
        return graph_formats.write(graph if size is None else graph.at(*size), chosen, depth, modules)

    key = ("graph", model, structure, size, chosen, depth, opened)
    return graph_formats.response(await state.document(caller, key, written), chosen, format)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _nodes(entry: ModelEntry, structure: str, transforms: str | None) -> bytes:
    graph = model_graph(entry, structure)
    if transforms is not None:
        graph = graph.with_nodes_of(transforms)
    return orjson.dumps(
        {
            "model": entry.name,
            "train_nodes": graph.train_nodes,
            "eval_nodes": graph.eval_nodes,
            "levels": graph.levels,
            "leaf_modules": graph.leaf_modules,
            "fingerprint": graph.fingerprint,
            "closed": graph_formats.closed_parts(graph),
        }
    )


def _as_openai(entry: ModelEntry) -> dict[str, Any]:
    return {"id": entry.name, "object": "model", "created": 0, "owned_by": source_of(entry)}


def _detail(state: State, entry: ModelEntry, chosen: str, categories: bool) -> bytes:
    structure, preprocess = entry.structure(chosen), state.engine.settings.preprocess
    graph = model_graph(entry, structure)
    weights: dict[str, dict[str, Any]] = {}
    for name in entry.weights:
        info = entry.weights_info(name)
        counted = graph.num_params if name == graph.weights else None
        weights[name] = {
            "num_params": info.num_params if info.num_params is not None else counted,
            "url": info.url or None,
            "metrics": info.metrics,
            "categories": info.num_categories,
            "cached": info.cached,
            "revision": info.revision,
        }
        if categories:
            weights[name]["category_names"] = info.categories or None
    return orjson.dumps(
        {
            **_as_openai(entry),
            "name": entry.name,
            "task": entry.task,
            "default_weights": entry.default_weights,
            "weights": weights,
            "inputs": [{"name": i.name, "layout": i.layout, "shape": list(i.shape)} for i in graph.inputs],
            "preprocessing": entry.preprocessing(chosen).describe(),
            "default_preprocess": {"way": preprocess, "meaning": PREPROCESS_MODES[preprocess]},
            "levels": graph.levels,
            "multiple": multiple_of(graph),
            "precisions": served_precisions(state.engine.device, entry, structure, state.engine.settings.lowering),
            "closed": graph_formats.closed_parts(graph),
            "statistics": None if state.top_images is None else state.top_images.summary(entry.name),
        }
    )
