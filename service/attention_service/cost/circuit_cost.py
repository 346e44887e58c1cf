"""Cost of the circuits of a module: decompositions of thin factors and of whole parameters, in float64.

Operation counts are those of Golub & Van Loan, "Matrix Computations", 4th edition, sections 5.2, 7.5 and 8.6.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attention_contract.schemas.analyses.circuits import CircuitPart
from attention_service.core.multihead import Sizes, parameter_shapes
from attention_service.cost.clock import Rates

_FLOAT64_BYTES = 8
_DECOMPOSITION_COPIES = 4
"""Copies of a matrix that its decomposition holds: as float64, by columns, the workspace and the factor."""
_SMALL = 12
"""Square matrices of a head's width that are held at a time."""
_FACTORING_RATE, _PRODUCT_RATE = 0.16, 0.4
"""Rates of decompositions and of products in float64, as shares of the device's rate; measured on a CPU."""
_STARTS_OF_A_HEAD, _STARTS_OF_A_SPECTRUM, _STARTS_OF_A_READER = 8, 4, 6
"""Small operations, in starts of an attention; measured."""


@dataclass(frozen=True)
class CircuitWork:
    """The sizes of one request."""

    sizes: Sizes
    heads: int
    """Selected heads."""
    parts: frozenset[CircuitPart]
    vectors: bool = False
    later: Sizes | None = None
    """The sizes of a later module with whose heads those of this one are composed."""

    @property
    def factors(self) -> dict[CircuitPart, tuple[int, int, int]]:
        """The two widths and the inner width of each requested circuit."""
        return {part: shape for part, shape in _factors(self.sizes).items() if part in self.parts}

    @property
    def readers(self) -> list[tuple[int, int, int]]:
        """The circuits of a later head that are composed with this module's: W_QKᵀ, W_QK and W_OV."""
        if self.later is None:
            return []
        qk, ov = _factors(self.later).values()
        return [(qk[1], qk[0], qk[2]), qk, ov]

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """Count, rows and columns of each parameter whose spectrum is requested."""
        return parameter_matrices(self.sizes) if "spectra" in self.parts else []

    @property
    def flops(self) -> int:
        """FLOPs of all decompositions and products."""
        return sum(self._decompositions) + sum(self._products)

    @property
    def peak_bytes(self) -> int:
        """Upper bound on the bytes that one request holds at a time, its reply included."""
        at_once = [_DECOMPOSITION_COPIES * count * rows * columns for count, rows, columns in self.matrices]
        at_once += [_thin(shape) for shape in self.factors.values()]
        kept = sum(
            self.heads * width * ((left + right if self.vectors else 0) + 4)
            for left, right, width in self.factors.values()
        )  # fmt: skip
        kept += sum(count * (min(rows, columns) + 3) for count, rows, columns in self.matrices)
        if self.later is not None:
            ov = _factors(self.sizes)["ov"]
            inner = self.heads * ov[2]
            writers = 2 * inner * (ov[0] + ov[1]) + 2 * inner * ov[2]
            at_once += [writers + _thin(reader) + 4 * reader[2] * inner for reader in self.readers]
            kept += 3 * self.heads * self.later.heads
        return _FLOAT64_BYTES * (max(at_once, default=0) + 2 * kept)  # kept results are stacked once, which copies them

    def seconds(self, rates: Rates) -> float:
        """Seconds of one request, by a device's rates."""
        starts = len(self.factors) * self.heads * _STARTS_OF_A_HEAD + _STARTS_OF_A_SPECTRUM * len(self.matrices)
        if self.later is not None:
            starts += _STARTS_OF_A_READER * len(self.readers) * self.later.heads
        factoring = sum(self._decompositions) / (_FACTORING_RATE * rates.flops_per_s)
        return factoring + sum(self._products) / (_PRODUCT_RATE * rates.flops_per_s) + starts * rates.overhead_s

    @property
    def _decompositions(self) -> Iterator[int]:
        for part, (left, right, width) in self.factors.items():
            products = 4 * (left + right) * width**2 + 21 * width**3 if self.vectors else _values_of(left, right, width)
            yield self.heads * (products + 10 * width**3 * (part == "ov"))
        for count, rows, columns in self.matrices:
            yield count * spectrum_flops(rows, columns)
        if self.later is not None:
            ov = _factors(self.sizes)["ov"]
            yield self.heads * 2 * _values_of(*ov)
            yield sum(2 * self.later.heads * _values_of(*reader) for reader in self.readers)

    @property
    def _products(self) -> Iterator[int]:
        for left, right, width in self.factors.values():
            yield self.heads * (2 * width**3 + 2 * width**2 * (left + right) * (1 + self.vectors))
        if self.later is not None:
            written = self.sizes.value_dim
            for left, _, width in self.readers:
                product = (
                    2 * width * self.sizes.d_model * written
                    + 2 * min(left, width) * width * written
                    + 2 * width * written**2
                )
                yield self.heads * self.later.heads * product


def parameter_matrices(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Count, rows and columns of the matrices that each parameter consists of."""
    shapes = [(1, 1, *shape)[-max(len(shape), 2) :] for shape in parameter_shapes(sizes).values()]
    return [(math.prod(shape[:-2]), shape[-2], shape[-1]) for shape in shapes]


def _factors(sizes: Sizes) -> dict[CircuitPart, tuple[int, int, int]]:
    return {
        "qk": (sizes.d_model, sizes.key_width, sizes.head_dim),
        "ov": (sizes.d_model, sizes.value_width, sizes.value_dim),
    }


def spectrum_flops(rows: int, columns: int) -> int:
    """FLOPs of the singular values of one matrix, through its QR decomposition where that takes fewer."""
    long, short = max(rows, columns), min(rows, columns)
    return min(4 * long * short**2, 2 * long * short**2 + 2 * short**3)


def _values_of(left: int, right: int, width: int) -> int:
    """FLOPs of the singular values of a product of two factors."""
    return 2 * (left + right) * width**2 + 3 * width**3


def _thin(shape: tuple[int, int, int]) -> int:
    left, right, width = shape
    return _DECOMPOSITION_COPIES * (left + right) * width + _SMALL * width**2
