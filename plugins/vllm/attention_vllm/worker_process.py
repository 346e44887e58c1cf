"""The observer of a worker's process, which vLLM's layers and worker both reach.

vLLM makes its layers and its worker by the names of their classes, so neither can be handed to the other.
"""

from typing import Final

from attention_vllm.pass_observer import PassObserver
from attention_vllm.result_channel import Message, ResultChannel

OBSERVER: Final = PassObserver(ResultChannel())
"""One for each process: a worker runs one pass at a time."""


def take_results(name: str) -> list[Message]:
    """Return the results of the ask of this id since the last call, in the process of the worker.

    A result has ``position`` and ``layers``, with the fields of the schema ``TokensAttention`` as numpy arrays; or
    ``refused``, a problem document, and is then the last.
    """
    return OBSERVER.channel.take(name)
