"""A clock that records the terms of the last prediction: how a request's terms follow from its plan."""

from dataclasses import dataclass, field

from attention_service.cost import Estimate, Retrieval, Roofline, Term, Workload
from attention_service.cost.terms import forward_terms, gradient_terms, inspection_terms, retrieval_terms


@dataclass(frozen=True)
class Recorder(Roofline):
    """A roofline clock that records its terms."""

    asked: list[Term] = field(default_factory=list)
    """Terms of the last prediction."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Record the terms and predict."""
        self.asked[:] = forward_terms(work, kernel)
        return super().forward(work, kernel)

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Record the terms and predict."""
        self.asked[:] = gradient_terms(work, kernel, twice=twice, checks=checks)
        return super().gradients(work, kernel, twice=twice, checks=checks)

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Record the terms and predict."""
        self.asked[:] = inspection_terms(work, named=named)
        return super().inspection(work, named=named)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Record the terms and predict."""
        self.asked[:] = retrieval_terms(retrieval)
        return super().retrieval(retrieval)
