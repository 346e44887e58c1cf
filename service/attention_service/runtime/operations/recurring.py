"""Requests that come again and again, alike but for their numbers: by the shortest way from tensors to the device."""

from dataclasses import dataclass
from weakref import ref

from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.cost import Clock
from attention_service.modules.resident import Module
from attention_service.runtime.binding.request_signature import Outline, inputs_of
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations import forward
from attention_service.runtime.planning.planner import quickly_planned
from attention_service.runtime.scheduling.passes import Answer, Ended, Waiting, ran


@dataclass(eq=False, slots=True)
class Recurring:
    """Forward passes of one module that have one outline."""

    engine: Engine
    request: ForwardRequest
    """Without its tensors."""
    module: "ref[Module]"
    """What is known of a module does not keep its parameters."""
    version: str
    outline: Outline
    clock: Clock
    room: int
    output_bytes: int
    """Of one of them."""

    def begin(self, inputs: dict[str, Array], answer: Answer) -> Waiting | None:
        """Have one run, and tell how it ended, maybe before this returns.

        None where it must go the long way: the module, the clock or the memory is another now, or there is to be a
        refusal.
        """
        engine, module = self.engine, self.module()
        if module is None or engine.state != "ready" or not engine.library.holds(module):
            return None
        if engine.device.clock is not self.clock:
            return None
        job = forward.job_of(self.outline, self.outline.filled(module, inputs), self.request, engine.device)
        if not engine.budget.take(job.plan.peak_bytes, self.room):
            return None
        return engine.execution.begin(job, answer)

    def reply(self, ended: Ended) -> ForwardReply:
        """What is said of one that ended."""
        outline = self.outline
        said = ran(outline.plan, outline.bound.dtype, self.version, ended, self.engine.device)
        return ForwardReply(**ended.fields, ran=said)


def recurring(engine: Engine, name: str, request: ForwardRequest) -> Recurring | None:
    """What requests like this one have in common; None for those that are better bound anew.

    Raises what ``Engine.forward`` does before anything runs.
    """
    engine.check_ready()
    module, device, room = engine.library.get(name, request.version), engine.device, engine.budget.room
    if not quickly_planned(module, request):
        return None
    outline = forward.outline_of(module, request, device, room)
    if outline is None or list(request.return_) != ["output"]:
        return None
    bare = request.model_copy(update=dict.fromkeys(inputs_of(request)))
    bound = outline.bound
    numbers = bound.batch * bound.queries * module.sizes.d_model
    output_bytes = numbers * TORCH_DTYPES[bound.reply_dtype].itemsize
    return Recurring(engine, bare, ref(module), module.version, outline, device.clock, room, output_bytes)
