"""Requests that come again and again, alike but for their numbers: by the shortest way from tensors to the device."""

from dataclasses import dataclass
from weakref import ref

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.cost import Clock
from attention_service.modules.resident import Module
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations import forward
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.planning.quickness import quickly_planned
from attention_service.runtime.scheduling.passes import Answer, Ended, Waiting, ran

_INPUTS = ("query", "key", "value")
_PLAIN = frozenset({*_INPUTS, "return_", "average_heads", "kernel", "version", "encoding"})
"""Fields of which shapes and dtypes are checked, and numbers are not."""


@dataclass(eq=False, slots=True)
class Recurring:
    """Forward passes of one module that differ in their numbers alone."""

    engine: Engine
    request: ForwardRequest
    """Without its tensors."""
    module: "ref[Module]"
    """A weak reference, so that the module's parameters are not kept."""
    version: str
    plan: Plan
    dtype: str
    clock: Clock
    room: int
    output_bytes: int
    """The size of the output of one of them."""

    def begin(self, inputs: dict[str, Array], answer: Answer) -> Waiting | None:
        """Start one, which may end before this returns. None if the module, the clock or the memory has changed."""
        engine, module = self.engine, self.module()
        if module is None or engine.state != "ready" or not engine.library.holds(module):
            return None
        if engine.device.clock is not self.clock:
            return None
        job = forward.prepare(module, self.request.model_copy(update=inputs), engine.device, self.room)
        if not engine.budget.take(job.plan.peak_bytes, self.room):
            return None
        return engine.execution.begin(job, answer)

    def reply(self, ended: Ended) -> ForwardReply:
        """The reply to a request that ended."""
        return ForwardReply(**ended.fields, ran=ran(self.plan, self.dtype, self.version, ended, self.engine.device))


def inputs_of(request: ForwardRequest) -> dict[str, Array]:
    """The tokens of a request, by their field."""
    return {name: array for name in _INPUTS if (array := getattr(request, name)) is not None}


def recurring(engine: Engine, name: str, request: ForwardRequest) -> Recurring | None:
    """The common part of requests like this one; None for those that are better bound anew.

    Raises as ``Engine.forward`` does before anything runs.
    """
    engine.check_ready()
    module, device, room = engine.library.get(name, request.version), engine.device, engine.budget.room
    others = request.model_fields_set - _PLAIN
    plain = type(request) is ForwardRequest and not any(_present(request.__dict__[each]) for each in others)
    if not plain or not quickly_planned(module, request) or list(request.return_) != ["output"]:
        return None
    job = forward.prepare(module, request, device, room)
    bare = request.model_copy(update=dict.fromkeys(inputs_of(request)))
    numbers = request.query.size // request.query.shape[-1] * module.sizes.d_model
    reply_dtype = bind(module, request).reply_dtype
    output_bytes = numbers * TORCH_DTYPES[reply_dtype].itemsize
    return Recurring(engine, bare, ref(module), module.version, job.plan, job.dtype, device.clock, room, output_bytes)


def _present(value: object) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | dict) and not value)
