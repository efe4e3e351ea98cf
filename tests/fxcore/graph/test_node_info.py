from torch import nn

from fxcore.graph.node_info import definition
from fxcore.tracing.tracer import trace


class Described(nn.ReLU):
    def __init__(self) -> None:
        super().__init__()
        self.mark = object()

    def extra_repr(self) -> str:
        return str(self.mark)


def test_definitions_hold_no_addresses() -> None:
    """Else no two processes would agree on a fingerprint."""
    first, second = (trace(nn.Sequential(nn.ReLU(), Described()), leaf_modules=[Described]) for _ in range(2))
    assert str(first.get_submodule("1")) != str(second.get_submodule("1"))
    assert [definition(n, first) for n in first.graph.nodes] == [definition(n, second) for n in second.graph.nodes]
