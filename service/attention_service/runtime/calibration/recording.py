"""A clock that keeps what it was asked last: how the terms of a request are had from its plan."""

from dataclasses import dataclass, field

from attention_service.cost import Estimate, Retrieval, Roofline, Term, Workload
from attention_service.cost.terms import forward_terms, gradient_terms, inspection_terms, retrieval_terms


@dataclass(frozen=True)
class Recorder(Roofline):
    """Answers by the rates."""

    asked: list[Term] = field(default_factory=list)
    """The terms of what was predicted last."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """As without keeping it."""
        self.asked[:] = forward_terms(work, kernel)
        return super().forward(work, kernel)

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """As without keeping it."""
        self.asked[:] = gradient_terms(work, kernel, twice=twice, checks=checks)
        return super().gradients(work, kernel, twice=twice, checks=checks)

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """As without keeping it."""
        self.asked[:] = inspection_terms(work, named=named)
        return super().inspection(work, named=named)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """As without keeping it."""
        self.asked[:] = retrieval_terms(retrieval)
        return super().retrieval(retrieval)
