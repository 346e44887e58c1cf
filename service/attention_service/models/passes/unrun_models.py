"""The error for a model whose short run fails: the inputs that it needs besides, or what transformers says."""

import inspect
import re
import traceback
from typing import Any, Final

from transformers import PreTrainedModel

from attention_contract.errors import InvalidCheckpoint

NOT_RUNNING: Final = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""The errors of a model that does not run."""
_GIVEN: Final = {"pixel_values": "an image", "input_ids": "a text"}
"""The input of a short run by the main argument of the model; of others a sound."""
_TOKEN_ARGUMENTS: Final = frozenset({"input_ids", "inputs_embeds"})
_CARRIED: Final = frozenset({
    "attention_mask", "position_ids", "token_type_ids", "decoder_input_ids", "labels", "return_dict", "use_cache",
    "output_attentions", "output_hidden_states", "past_key_values", "args", "kwargs",
})  # fmt: skip
"""Arguments of models that are no inputs, or that no request lacks."""


def does_not_run(model: PreTrainedModel, fault: Exception) -> InvalidCheckpoint:
    """Return the error for a model whose short run fails with this fault."""
    name = type(model).__name__
    if model.main_input_name == "pixel_values" and (reason := reads_videos(model.config, name)) is not None:
        return InvalidCheckpoint.at("checkpoint", reason)
    if needed := _needed_inputs(model, fault):
        given = _GIVEN.get(model.main_input_name, "a sound")
        return InvalidCheckpoint.at(
            "checkpoint",
            f"{name} does not run on {given} alone: it needs {', '.join(needed)} too, which requests to a model of "
            "this type do not carry",
        )
    reason = str(fault).partition("\n")[0]
    return InvalidCheckpoint.at("checkpoint", f"{name} does not run: {reason}")


def reads_videos(config: Any, name: str) -> str | None:
    """The reason for which a model of videos is refused, by its name; None for another model."""
    frames = getattr(config, "num_frames", None)
    return f"{name} reads videos of {frames} frames, and a request has images" if isinstance(frames, int) else None


def _needed_inputs(model: PreTrainedModel, fault: Exception) -> list[str]:
    """The arguments of a model that a fault names, in its words or in the line of code that raised it."""
    frames = traceback.extract_tb(fault.__traceback__)
    line = str(frames[-1].line or "") if frames and isinstance(fault, AttributeError | TypeError) else ""
    words = {word.lower() for word in re.findall(r"\w+", f"{fault} {line}")}
    main = model.main_input_name
    given = _CARRIED | {main} | (_TOKEN_ARGUMENTS if main == "input_ids" else frozenset())
    return [name for name in inspect.signature(model.forward).parameters if name in words - given]
