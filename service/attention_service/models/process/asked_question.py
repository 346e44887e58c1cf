"""A request to the model of a process, from its arrival to its answer."""

from dataclasses import dataclass, field
from typing import Any

from attention_contract.tensors import Encoding
from attention_contract.wire import SAFETENSORS
from attention_service.core.cancellation import Cancellation
from attention_service.models.inputs.long_texts import TextsRead
from attention_service.models.process.served import Parts, PricedRun
from attention_service.models.reply_memory import ReplySpace


@dataclass(eq=False)
class AskedQuestion:
    """A request that has not ended."""

    number: int
    caller: str
    cancellation: Cancellation
    memory: ReplySpace
    form: str = SAFETENSORS
    """The media type of its reply."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""
    waits: dict[str, float] = field(default_factory=dict)
    """The fields of ``ran`` that the server told when it admitted the request."""
    owner: str | None = None
    """The owner of its recording, as told then."""
    alone: bool = False
    """True if its numbers are to be the same bits every time."""
    work: PricedRun | None = None
    """Its next work: to be admitted, or to begin; None once it runs."""
    need: int = 0
    """The most bytes that it was priced at."""
    texts: TextsRead = field(default_factory=TextsRead)
    """Its long texts that were read beside the loop."""
    parts: Parts | None = None
    """The parts that are left of a question that has begun."""
    running: Any = None
    """Its generation, once that has begun."""
    seconds: float = 0.0
    """The time of its next part, or of a pass over the whole text of its generation, if that is long."""
