"""The kernel of a workload, for the facts that it states of itself."""

from attention_service.core.kernels import KERNELS, Kernel
from attention_service.core.kernels.materialized import Materialized
from attention_service.cost.approximate import approximated
from attention_service.cost.workload import Workload


def kernel_of(work: Workload, name: str) -> Kernel:
    """Return the kernel of this name; for a method that approximates, its own arithmetic.

    Raises KeyError for a name that is not registered.
    """
    return KERNELS[name].make() if approximated(work) is None else _OWN


class _OwnArithmetic(Materialized):
    """A method that approximates: its costs are its own, and no kernel computes it."""

    keeps = frozenset()
    recomputes = True


_OWN = _OwnArithmetic()
