"""torch.fx passes and checks for interactive use, which serving does not need.

Only :mod:`fxcore` and :mod:`fxcore.transforms`, which list the public names, import it.
"""

from fxcore.passes.base import Transform
from fxcore.passes.registry import register
from fxcore.toolbox.arguments import normalize_arguments
from fxcore.toolbox.clean_up import eliminate_common_subexpressions
from fxcore.toolbox.decompose import RULES, decompose
from fxcore.toolbox.fuse_linear_bn import fuse_linear_bn
from fxcore.toolbox.insert import insert_after
from fxcore.toolbox.replace import ACTIVATIONS, replace_activation, replace_module

_FUNCTION = {"type": "string", "enum": sorted(ACTIVATIONS)}

register(
    Transform(
        "fuse_linear_bn",
        "Fold batch norms into the linear layers before them.",
        {
            "assume_2d": {
                "type": "boolean",
                "default": False,
                "description": "Assume that linear layers return [N, C] where their shape is not known.",
            }
        },
        fuse_linear_bn,
    ),
    Transform(
        "eliminate_common_subexpressions",
        "Merge nodes that apply the same operation to the same values.",
        {},
        eliminate_common_subexpressions,
    ),
    Transform(
        "normalize_arguments",
        "Pass all arguments of torch's functions but the first by keyword.",
        {},
        normalize_arguments,
    ),
    Transform(
        "decompose",
        "Replace operations with simpler ones, such as ReLU with (x > 0) * x.",
        {"operations": {"type": "array", "items": {"type": "string", "enum": sorted(RULES)}, "default": sorted(RULES)}},
        decompose,
    ),
    Transform(
        "replace_activation",
        "Replace one activation function with another, wherever it occurs.",
        {"old": _FUNCTION, "new": _FUNCTION},
        replace_activation,
        exact=False,
    ),
    Transform(
        "replace_module",
        "Replace a module, or all modules of a pattern such as `layer4.*.relu`, with an activation function.",
        {"old": {"type": "string"}, "new": _FUNCTION},
        replace_module,
        exact=False,
    ),
    Transform(
        "insert_after",
        "Apply a function to a node's value before the nodes after it read it.",
        {"node": {"type": "string"}, "function": _FUNCTION, "outputs": {"type": "boolean", "default": False}},
        insert_after,
        exact=False,
    ),
)
