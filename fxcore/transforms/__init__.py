"""Passes over graphs: each takes a ``torch.fx.GraphModule`` and returns another, one pass a file.

The original is not changed. Parameters are shared; only changed ones are new. The values that the graph returns stay
the same unless the pass says otherwise; a pass that cannot keep one raises. :func:`applied` lists the passes that a
module went through; :func:`list_transforms` and :func:`apply_transforms` find and run passes by name.
"""

from fxcore.transforms.arguments import normalize_arguments
from fxcore.transforms.attention import attention_maps
from fxcore.transforms.base import (
    Applied,
    BadParameter,
    CannotKeep,
    CannotTransform,
    Transform,
    UnknownTransform,
    applied,
    transform,
)
from fxcore.transforms.common_subexpressions import eliminate_common_subexpressions
from fxcore.transforms.dead_code import eliminate_dead_code
from fxcore.transforms.decompose import decompose
from fxcore.transforms.fold_constants import fold_constants
from fxcore.transforms.fold_normalization import fold_normalization
from fxcore.transforms.fuse_conv_bn import fuse_conv_bn
from fxcore.transforms.fuse_linear_bn import fuse_linear_bn
from fxcore.transforms.insert import insert_after, wrap
from fxcore.transforms.invert import NotInvertible, invert
from fxcore.transforms.keep_float import keep_float
from fxcore.transforms.out_of_place import out_of_place
from fxcore.transforms.pattern import BadPattern, op, replace_pattern
from fxcore.transforms.registry import apply_transforms, described, get_transform, list_transforms
from fxcore.transforms.remove import remove
from fxcore.transforms.replace import replace_activation, replace_module, replace_op
from fxcore.transforms.split import Halves, split_at

__all__ = [
    "Applied",
    "BadParameter",
    "BadPattern",
    "CannotKeep",
    "CannotTransform",
    "Halves",
    "NotInvertible",
    "Transform",
    "UnknownTransform",
    "applied",
    "apply_transforms",
    "attention_maps",
    "decompose",
    "described",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "fold_constants",
    "fold_normalization",
    "fuse_conv_bn",
    "fuse_linear_bn",
    "get_transform",
    "insert_after",
    "invert",
    "keep_float",
    "list_transforms",
    "normalize_arguments",
    "op",
    "out_of_place",
    "remove",
    "replace_activation",
    "replace_module",
    "replace_op",
    "replace_pattern",
    "split_at",
    "transform",
    "wrap",
]
