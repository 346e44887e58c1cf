"""One layer of a ``SessionCache``: its keys and values lie in a session on the server.

``update`` appends nothing yet. It returns placeholders of all keys and values, which have their shape and no memory.
The attention function of the service gets them next, and sends the new keys and values with the queries as one step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from attention_client.sessions.live_session import Session
from attention_client.streams.step_stream import StepStream
from attention_client.torch.attention_function import tensor_like
from attention_client.transformers.identity_modules import RawAttention
from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.schemas.sessions import StepReply
from attention_transformers.model_layers import UnsupportedModel

_MARK: Final = "attention_service_new_tokens"
Past = tuple[Tensor, Tensor]
"""Keys ``[B, Hkv, P, D]`` and values ``[B, Hkv, P, Dv]``."""


class LayerOwner(Protocol):
    """The cache that a layer belongs to."""

    stream: StepStream | None
    """The connection that steps travel on; None for a request each."""

    def open(self, layer: "SessionLayer", raw: RawAttention, sinks: Tensor | None, sequences: int) -> None:
        """Open the session of a layer, and those of other layers that are expected to be like it."""
        ...

    def roll_back(self, length: int) -> None:
        """Truncate every layer to a length, after a pass that failed in the middle."""
        ...

    def check_attached(self) -> None:
        """Raise UnsupportedModel unless the model's attention runs on the service."""
        ...


@dataclass(eq=False)
class NewTokens:
    """The tokens that a layer was updated with."""

    layer: "SessionLayer"
    key: Tensor
    """``[B, Hkv, L, D]``"""
    value: Tensor
    """``[B, Hkv, L, Dv]``"""


def new_tokens(key: Tensor) -> NewTokens | None:
    """Return the tokens that keys stand for; None for keys of another cache, or of none."""
    tokens: NewTokens | None = getattr(key, _MARK, None)
    return tokens


def padded(states: Tensor, missing: int) -> Tensor:
    """Return keys or values with zeros for ``missing`` tokens before them, which no query sees any more."""
    return torch.nn.functional.pad(states, (0, 0, missing, 0))


class SessionLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A cache layer that holds a session instead of tensors. It holds every token, in a sliding window too."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: LayerOwner, window: int | None, *, sliding: bool) -> None:
        """``window``: the number of latest keys that a query sees; None for all. ``sliding``: the kind of its mask."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = sliding
        self.window = window
        self.raw: RawAttention | None = None
        """The attention that the session was opened for."""
        self.session: Session | None = None
        self.past: Past | None = None
        """The past to begin with, until the first step has succeeded."""
        self.shortest = 0
        """The length below which tokens before the past would be seen that it does not hold."""
        self._owner = owner
        self._pending: NewTokens | None = None
        self._like = torch.empty(0)

    # ── the pass ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; the session opens with the first step."""
        self._like = key_states.new_empty(0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Past:
        """Return placeholders of all keys and values, NaN in every place, that lead the attention to the new ones.

        Raises UnsupportedModel if the model's attention does not run on the service, and if it has not attended to the
        tokens of the last update; InvalidRequest if a gradient is wanted.
        """
        self._owner.check_attached()
        self._check_attended()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise InvalidRequest.at(
                "past_key_values",
                "a SessionCache gives no gradients; call the model under torch.no_grad(), or pass a DynamicCache",
            )
        self.lazy_initialization(key_states, value_states)
        self._pending = NewTokens(self, key_states, value_states)
        keys, values = self._placeholder(key_states), self._placeholder(value_states)
        setattr(keys, _MARK, self._pending)
        return keys, values

    def _placeholder(self, states: Tensor) -> Tensor:
        batch, heads, tokens, width = states.shape
        return states.new_full((), torch.nan).expand(batch, heads, self.length + tokens, width)

    def step(self, tokens: NewTokens, raw: RawAttention, sinks: Tensor | None, fields: dict[str, Any]) -> StepReply:
        """Send the new tokens, and append them. A step that fails takes the whole pass back."""
        if tokens is not self._pending:
            raise UnsupportedModel.at(
                "past_key_values",
                "several attentions of the model share one layer's keys, which a SessionCache does not support; "
                "generate with a DynamicCache",
            )
        self._pending, length = None, self.length
        try:
            sequences = len(fields["query"])
            if self.session is None or raw != self.raw or (not length and self.sequences != sequences):
                self._reopen(raw, sinks, sequences)
            assert self.session is not None  # noqa: S101 - it is open now
            stream = self._owner.stream
            with self.session.stream(stream) if stream is not None else nullcontext():
                reply = self.session.step(**fields)
        except BaseException:
            try:
                self._owner.roll_back(length)
            except AttentionError:  # layers before this one may hold the tokens: refuse the next pass
                self._pending = tokens
            raise
        self.past = None
        return reply

    def _reopen(self, raw: RawAttention, sinks: Tensor | None, sequences: int) -> None:
        if self.session is not None and self.past is None and self.session.length:
            raise UnsupportedModel.at(
                "past_key_values", f"the layer's attention was {self.raw} and is now {raw}; call reset() first"
            )
        self.close_session()
        self._owner.open(self, raw, sinks, sequences)

    def _check_attended(self) -> None:
        if self._pending is not None:
            raise UnsupportedModel.at(
                "past_key_values",
                "the attention of this layer never got the keys of its last pass. Either the model changes keys "
                "after it has cached them, as latent attention does, and needs a DynamicCache; or the pass failed "
                "and could not be taken back, and the cache needs reset()",
            )

    # ── lengths ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def length(self) -> int:
        """Number of tokens that were appended."""
        if self.session is not None:
            return self.session.length
        return 0 if self.past is None else self.past[0].shape[2]

    def get_seq_length(self) -> int:
        """Return the number of tokens, those that are about to be appended included."""
        return self.length + (0 if self._pending is None else self._pending.key.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first. A window hides keys by the mask alone."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return −1: there is no maximum."""
        return -1

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected a negative number of tokens to remove, got {tokens_to_remove}")
        self._check_attended()
        self.truncate(max(self.length + tokens_to_remove, 0))

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens. Raises RuntimeError where a window no longer holds them."""
        self._pending = None
        if length >= self.length:
            return
        if length < self.shortest:
            raise RuntimeError(
                f"crop: this layer began with the last tokens of a sliding window alone, and cannot go back to "
                f"{length} tokens; the shortest is {self.shortest}"
            )
        if not self._change_past(lambda tensor: tensor[:, :, :length]) and self.session is not None:
            self.session.truncate(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue what ``beam_idx[b]`` was."""
        self._check_attended()
        rows = beam_idx.tolist()
        if self._change_past(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device))) or self.session is None:
            return
        if rows != list(range(self.session.sequences)):
            self.session.reorder(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        if self.sequences:
            self.reorder_cache(torch.arange(self.sequences).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences; ``indices`` are numbers, or a bool for each sequence."""
        if self.sequences:
            self.reorder_cache(torch.arange(self.sequences)[indices.cpu()])

    @property
    def sequences(self) -> int:
        """Number of sequences; 0 for an empty layer."""
        if self.session is not None:
            return self.session.sequences
        return 0 if self.past is None else len(self.past[0])

    def _change_past(self, change: Callable[[Tensor], Tensor]) -> bool:
        """Change the past that waits for its first step. Return True if there is one."""
        if self.past is None:
            return False
        self.close_session()
        self.past = change(self.past[0]), change(self.past[1])
        return True

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, past: Past, *, cut: bool) -> None:
        """Begin with a past. ``cut``: its first keys stand for those that a window has cut off."""
        self.past = past
        self.shortest = past[0].shape[2] if cut else 0
        self.lazy_initialization(*past)

    def fetch(self) -> Past | None:
        """Return all keys and values; None of an empty layer."""
        if self.past is not None:
            return self.past
        if self.session is None or not self.session.length:
            return None
        cache = self.session.cache()
        return tensor_like(cache.past_key, self._like), tensor_like(cache.past_value, self._like)

    def copy_of(self, source: "SessionLayer") -> None:
        """Become a copy of another layer, whose session is forked."""
        self.raw, self.past, self.shortest, self._like = source.raw, source.past, source.shortest, source._like
        self.is_initialized = source.is_initialized
        self.session = None if source.session is None else source.session.fork()

    def reset(self) -> None:
        """Forget everything and end the session."""
        self._pending = self.past = None
        self.shortest = 0
        self.close_session()

    def close_session(self) -> None:
        """End the session, if there is one."""
        session, self.session, self.raw = self.session, None, None
        if session is not None:
            session.close()

    def offload(self) -> None:
        """Do nothing: there is nothing here to move."""

    def prefetch(self) -> None:
        """Do nothing: there is nothing here to move."""
