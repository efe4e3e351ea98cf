"""All graph passes: those that serving needs (:mod:`fxcore.passes`) and others (:mod:`fxcore.toolbox`).

A pass takes a ``torch.fx.GraphModule`` and returns a new one; the original is not changed. Parameters are shared,
except those that the pass changes. The values that the graph returns stay the same unless the pass documents otherwise;
a pass that cannot keep a value raises. :func:`applied` lists the passes that were applied to a module;
:func:`list_transforms` and :func:`apply_transforms` find and run passes by name.
"""

from fxcore.passes.attention import attention_maps
from fxcore.passes.base import (
    Applied,
    BadParameter,
    CannotKeep,
    CannotTransform,
    Transform,
    UnknownTransform,
    applied,
    transform,
)
from fxcore.passes.fold_constants import fold_constants
from fxcore.passes.fold_normalization import fold_normalization
from fxcore.passes.fuse_conv_bn import fuse_conv_bn
from fxcore.passes.keep_float import keep_float
from fxcore.passes.out_of_place import out_of_place
from fxcore.passes.registry import apply_transforms, described, get_transform, list_transforms
from fxcore.passes.remove import remove
from fxcore.toolbox.arguments import normalize_arguments
from fxcore.toolbox.clean_up import eliminate_common_subexpressions, eliminate_dead_code
from fxcore.toolbox.decompose import decompose
from fxcore.toolbox.fuse_linear_bn import fuse_linear_bn
from fxcore.toolbox.insert import insert_after, wrap
from fxcore.toolbox.invert import NotInvertible, invert
from fxcore.toolbox.pattern import BadPattern, op, replace_pattern
from fxcore.toolbox.replace import replace_activation, replace_module, replace_op
from fxcore.toolbox.split import Halves, split_at

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
