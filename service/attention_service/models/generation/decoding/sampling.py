"""The settings by which a generation chooses its tokens, of a request and of the checkpoint."""

from dataclasses import dataclass
from typing import Any, Final

from transformers import LogitsProcessor

from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_service.models.generation.decoding.logit_processors import DrawableLogits, LogitChanges

_COMPLETION_TOKENS: Final = 16
CHAT_TOKENS: Final = 4096
"""Tokens that are generated at most if the request names no number."""
_DRAWING: Final = "temperature", "top_p", "top_k", "min_p"
"""The settings of a checkpoint's GenerationConfig that count if it draws."""
_OF_CHECKPOINT: Final[dict[str, Any]] = {
    "stop_strings": None, "max_time": None, "token_healing": False,  # ``stops`` end the text
    "cache_implementation": None,  # a static cache has empty places
    "use_cache": True, "prefill_chunk_size": None,  # the first pass reads the prompt, each later one a token
    "return_dict_in_generate": False, "output_attentions": False, "output_hidden_states": False,
    "output_scores": False, "output_logits": False,  # the tokens alone
    "constraints": None, "force_words_ids": None, "penalty_alpha": None, "dola_layers": None,  # other searches
    "prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": False,  # several tokens a pass
    "guidance_scale": None,  # two passes a token
}  # fmt: skip
"""The settings of a checkpoint that are not taken, since each token is chosen from one pass over those before."""
TextRequest = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True)
class Sampling:
    """The settings of one generation."""

    new_tokens: int
    choices: int
    """For each prompt."""
    temperature: float
    """0 takes the likeliest token."""
    top_p: float
    top_k: int
    """0 for all tokens."""
    min_p: float
    """0 for all tokens."""
    seed: int | None
    stops: tuple[str, ...]
    logprobs: int | None
    """The likeliest tokens to name beside each one; None for no log-probabilities."""
    changes: LogitChanges | None
    named_tokens: tuple[int, ...] = ()
    """Further tokens to name beside each one."""
    least_tokens: int = 0
    """The number of tokens before which a choice does not end."""
    repetition: float | None = None
    """A penalty of the tokens before; None for the checkpoint's."""
    first_token: int | None = None
    """The token that is forced to be the first; None for the checkpoint's."""
    stop_ids: frozenset[int] = frozenset()
    """Further tokens that end a choice."""
    ignores_end: bool = False
    """True if the checkpoint's tokens do not end a choice."""

    @classmethod
    def of(cls, request: TextRequest, most_tokens: int, checkpoints: Any, first_token: int | None = None) -> "Sampling":
        """Read the settings of a request. ``most_tokens``: tokens that the model has positions for behind the prompts.

        ``checkpoints``: the GenerationConfig that the checkpoint brings; ``first_token``: the forced one.
        """
        logprobs = request.logprobs if isinstance(request, CompletionRequest) else None
        wanted, default = request.max_tokens, _COMPLETION_TOKENS
        if isinstance(request, ChatCompletionRequest):
            wanted, default = request.max_completion_tokens or wanted, CHAT_TOKENS
            logprobs = (request.top_logprobs or 0) if request.logprobs else None
        stop: Any = checkpoints.stop_strings if request.stop is None else request.stop
        stops = [
            ending for ending in ([stop] if isinstance(stop, str) else stop or []) if isinstance(ending, str) and ending
        ]
        # What a request leaves out, such as top_k, is the checkpoint's, and not a default of transformers.
        own = {name: getattr(checkpoints, name) or 0 for name in _DRAWING if checkpoints.do_sample}
        temperature = (own.get("temperature") or 1.0) if request.temperature is None else request.temperature
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
        return cls(
            new_tokens=min(most_tokens, default) if wanted is None else wanted,
            choices=request.n or 1,
            temperature=temperature,
            top_p=request.top_p or own.get("top_p") or 1.0,
            top_k=own.get("top_k", 0) if request.top_k is None else max(request.top_k, 0),
            min_p=own.get("min_p", 0.0) if request.min_p is None else request.min_p,
            seed=request.seed,
            stops=tuple(stops),
            logprobs=logprobs,
            changes=LogitChanges(presence, frequency, bias) if presence or frequency or bias else None,
            least_tokens=request.min_tokens or 0,
            repetition=request.repetition_penalty,
            first_token=first_token,
            stop_ids=frozenset(request.stop_token_ids or ()),
            ignores_end=bool(request.ignore_eos),
        )

    def processors(self) -> list[LogitsProcessor]:
        """The processors of the logits, besides those of ``generate`` for the options."""
        changes: list[LogitsProcessor] = [] if self.changes is None else [self.changes]
        return changes if self.temperature == 0 else [*changes, DrawableLogits(self.temperature)]

    def options(self) -> dict[str, Any]:
        """The arguments of ``generate``."""
        options: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": self.new_tokens}
        options |= _OF_CHECKPOINT
        if self.least_tokens:
            options["min_new_tokens"] = self.least_tokens
        if self.repetition is not None:
            options["repetition_penalty"] = self.repetition
        if self.first_token is not None:
            options["forced_bos_token_id"] = self.first_token
        if self.temperature == 0:
            return options | {"do_sample": False}
        return options | {
            "do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "min_p": self.min_p or None,
        }  # fmt: skip
