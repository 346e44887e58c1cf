"""A clock that records its last prediction, so that another clock can make it again and its terms are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attention_service.cost import Clock, Estimate, Retrieval, Roofline, Term, Workload
from attention_service.cost.terms import forward_terms, gradient_terms, inspection_terms, retrieval_terms


@dataclass(frozen=True)
class Prediction:
    """One prediction of a clock."""

    again: Callable[[Clock], Estimate]
    """Makes it by another clock."""
    terms: Sequence[Term]


@dataclass(frozen=True)
class PredictionRecorder(Roofline):
    """A roofline clock that records its predictions."""

    made: list[Prediction] = field(default_factory=list)
    """The last prediction."""

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Record and predict."""
        self.made[:] = [Prediction(lambda clock: clock.forward(work, kernel), forward_terms(work, kernel))]
        return super().forward(work, kernel)

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Record and predict."""
        options = {"twice": twice, "checks": checks}
        terms = gradient_terms(work, kernel, twice=twice, checks=checks)
        self.made[:] = [Prediction(lambda clock: clock.gradients(work, kernel, **options), terms)]  # type: ignore[arg-type]
        return super().gradients(work, kernel, twice=twice, checks=checks)

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Record and predict."""
        again = Prediction(lambda clock: clock.inspection(work, named=named), inspection_terms(work, named=named))
        self.made[:] = [again]
        return super().inspection(work, named=named)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Record and predict."""
        self.made[:] = [Prediction(lambda clock: clock.retrieval(retrieval), retrieval_terms(retrieval))]
        return super().retrieval(retrieval)
