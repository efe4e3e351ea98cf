"""Remove parametrisations (``torch.nn.utils.parametrize``: weight norm, spectral norm), which recompute weights at
every call.

``remove_parametrizations`` is not used: it changes the module's class, which copies of the module share.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import fx, nn
from torch.nn.utils import parametrize

from fxcore.passes.base import called_modules, finish, fork, replace_modules


def with_plain_weights(module: fx.GraphModule) -> fx.GraphModule:
    """Copy ``module`` with plain parameters and buffers in place of parametrised ones; return it unchanged if it has
    none.

    Parametrised modules have generated classes, which can be neither pickled nor imported.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    >>> plain = with_plain_weights(fx.symbolic_trace(nn.Sequential(layer).eval()))
    >>> type(plain.get_submodule("0")).__name__, sorted(plain.state_dict())
    ('Linear', ['0.bias', '0.weight'])
    """
    if not any(map(_is_parametrized, called_modules(module).values())):
        return module
    private = fork(module)
    replace_modules(private, lambda called: _plain(called) if _is_parametrized(called) else called)
    return finish(private)


def _is_parametrized(module: nn.Module) -> bool:
    return any(map(parametrize.is_parametrized, module.modules()))


def _plain(module: nn.Module) -> nn.Module:
    children = {name: child and _plain(child) for name, child in module._modules.items()}
    # Not copy.copy: these classes reject it, as they reject pickling.
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    made: nn.Module = kind.__new__(kind)
    made.__dict__.update(vars(module))
    made.__dict__ |= {key: dict(vars(module)[key]) for key in ("_parameters", "_buffers")} | {"_modules": children}
    if parametrize.is_parametrized(module):
        made._load_state_dict_pre_hooks = OrderedDict()  # drop weight norm's hook, which reads old state dicts
        for name, tensors in made._modules.pop("parametrizations").items():  # type: ignore[union-attr,operator]
            value = getattr(module, name).detach()
            if next(tensors.parameters(recurse=False), None) is None:
                made.register_buffer(name, value)
            else:
                made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made
