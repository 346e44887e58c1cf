"""The work beside each pass: find the rows that ask, compute their weights, edit them, send reports.

A worker calls ``begin`` and ``end`` around a pass, and each attention layer in it calls ``observe`` after vLLM's own
kernel. vLLM's output is left as it is but for the heads that a request edits, in its own rows. A fault in here refuses
the ask, and never ends a request.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.errors import AttentionError, InternalError, InvalidRequest
from attention_service.core.inspection.statistics import statistics_of
from attention_service.core.inspection.weights import weights_of
from attention_service.core.problem import Selection
from attention_vllm.asked_requests import AskedRequest, KernelCall
from attention_vllm.asks import ask_id, read_ask
from attention_vllm.attention_outputs import AttentionOutputs, edit_output
from attention_vllm.bound_asks import OUTPUT, KnownModel, bind_ask
from attention_vllm.edited_rows import edited_contexts
from attention_vllm.kernel_trial import KernelTrial, departure
from attention_vllm.pass_rows import PassRow, rows_of, tokens_of
from attention_vllm.result_channel import ResultChannel
from attention_vllm.text_taps import read_taps
from attention_vllm.token_reports import TokenWeights, token_reports

_log = logging.getLogger(__name__)
_UNBOUNDED: Final = 2**31


class PassObserver:
    """The requests of one worker that ask, and the pass that runs."""

    def __init__(self, channel: ResultChannel) -> None:
        self.channel = channel
        self.model = KnownModel({})
        self.outputs = AttentionOutputs({})
        self.refusal: str | None = "the self-test did not run"
        """The reason why no ask is answered; None if they are."""
        self.trial: KernelTrial | None = None
        self._asked: dict[str, AskedRequest] = {}
        self._active: list[AskedRequest] = []
        self._scheduled: frozenset[str] = frozenset()
        self._runner: Any = None
        self._rows: dict[int, dict[str, PassRow]] = {}
        """The rows of requests, by the metadata of layers."""
        self._rows_by_layer: dict[int, dict[str, PassRow]] = {}
        self._hooks: AbstractContextManager[object] = nullcontext()
        """The hooks of outputs in the pass."""
        self._told: list[TokenWeights] = []

    def begin(self, scheduled: Any, runner: Any) -> None:
        """Begin a pass, as a ``SchedulerOutput`` says."""
        for name in scheduled.finished_req_ids:
            self._asked.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self._asked:  # V2 begins a preempted request anew
                self._take(new)
        self._runner, self._told, self._rows, self._rows_by_layer = runner, [], {}, {}
        self._scheduled = frozenset(scheduled.num_scheduled_tokens)
        self._active = [asked for name, asked in self._asked.items() if name in self._scheduled]
        outputs = set[int]()
        for asked in self._active:
            asked.seen, asked.outputs_seen, asked.tapped = set(), set(), {}
            outputs.update(asked.outputs)
        self._hooks.__exit__(None, None, None)  # of a pass that did not end
        self._hooks = self.outputs.hooked(sorted(outputs), self._see_output) if outputs else nullcontext()

    @property
    def idle(self) -> bool:
        """True if no layer of the pass is told of."""
        return not self._active and self.trial is None

    def observe(self, call: KernelCall) -> None:
        """Tell of a layer, and edit it. Never raises."""
        if self.trial is not None:
            self._try(call, self.trial)
        active = [each for each in self._active if each.bound.reads(call.layer)]
        if not active:
            return
        if call.refused is not None:
            for asked in active:
                self._refuse(asked, InvalidRequest.at("attention", f"layer {call.layer}: {call.refused}"))
            return
        try:
            rows = self._rows_by_layer[call.layer] = self._rows_of(call, [asked.name for asked in self._active])
            for asked in active:
                self._one(call, asked, rows[asked.name])
                if asked.bound.taps and asked in self._active:
                    read_taps(call, self.model.facts[call.layer], asked, rows[asked.name])
            self._weigh(call, [(asked, rows[asked.name]) for asked in active if asked in self._active])
        except Exception as fault:
            _log.exception("attention of layer %d", call.layer)
            for asked in active:
                self._refuse(asked, InternalError(f"layer {call.layer}: {type(fault).__name__}: {str(fault)[:300]}"))

    def end(self) -> None:
        """Send what the pass has found."""
        try:
            self._send()
        except Exception as fault:
            _log.exception("attention of a pass")
            for asked in [*self._active]:
                self._refuse(asked, InternalError(f"{type(fault).__name__}: {str(fault)[:300]}"))
        self._hooks.__exit__(None, None, None)
        self._hooks = nullcontext()
        self._active, self._told, self._rows, self._rows_by_layer = [], [], {}, {}

    def _take(self, new: Any) -> None:
        """Read the ask of a new request, if it has one."""
        settings = new.sampling_params
        given = None if settings is None or settings.extra_args is None else settings.extra_args.get("attention")
        if given is None:
            return
        prompt = new.prompt_token_ids or ()
        try:
            ask = read_ask(given)
            if self.refusal is not None:
                raise InvalidRequest.at("attention", f"not answered here: {self.refusal}")
            if not prompt:
                raise InvalidRequest.at("prompt", "expected tokens: embeddings have none")
            most = _UNBOUNDED if settings.max_tokens is None else len(prompt) + settings.max_tokens
            bound = bind_ask(ask, self.model, prompt, most)
        except AttentionError as fault:
            name, reply_to = ask_id(given)
            if name is not None:
                self.channel.put({"id": name, "refused": fault.to_problem()}, reply_to)
            return
        self._asked[new.req_id] = AskedRequest(new.req_id, bound, len(prompt))

    def _refuse(self, asked: AskedRequest, fault: AttentionError) -> None:
        if self._asked.pop(asked.name, None) is None:
            return
        self._active = [request for request in self._active if request is not asked]
        self._told = [row for row in self._told if row.name != asked.name]
        ask = asked.bound.ask
        self.channel.put({"id": ask.id, "refused": fault.to_problem()}, ask.reply_to)

    def _rows_of(self, call: KernelCall, names: Sequence[str]) -> dict[str, PassRow]:
        """The rows of requests, found once for all layers of one metadata."""
        key = id(call.metadata)
        if key not in self._rows:
            self._rows[key] = {row.name: row for row in rows_of(names, self._runner, call.metadata)}
        return self._rows[key]

    def _one(self, call: KernelCall, asked: AskedRequest, row: PassRow) -> None:
        """Compare the first pass of a request with the kernel's output, then make its edits."""
        asked.seen.add(call.layer)
        facts, edits = self.model.facts[call.layer], asked.bound.edits.get(call.layer, ())
        if asked.checked and not edits:
            return
        keys, values = call.keys_and_values(row)
        if not asked.checked:
            last = call.query[row.stop - 1 : row.stop].transpose(0, 1)
            fault = departure(facts, last, keys, values, call.output[row.stop - 1 : row.stop], row.length - 1)
            if fault is not None:
                self._refuse(asked, InvalidRequest.at("attention", f"layer {call.layer}: {fault}"))
                return
        if edits:
            self._edit(call, asked, row, keys, values)

    def _edit(self, call: KernelCall, asked: AskedRequest, row: PassRow, keys: Tensor, values: Tensor) -> None:
        """Write the context of the edited heads over the kernel's; the weights of an edited last query are told of."""
        q, output = call.query[row.start : row.stop].transpose(0, 1), call.output[row.start : row.stop]
        facts, edits = self.model.facts[call.layer], asked.bound.edits[call.layer]
        heads = list(asked.bound.edited_heads[call.layer])
        for part, context, weights in edited_contexts(facts, q, keys, values, edits, row.first, asked.begin):
            output[part, heads] = context[heads].transpose(0, 1).to(output.dtype)
            if part.stop == q.shape[1] and call.layer in asked.bound.layers and asked.chooses(row):
                self._tell(call.layer, asked, row, weights[:, -1])

    def _weigh(self, call: KernelCall, asked_rows: Sequence[tuple[AskedRequest, PassRow]]) -> None:
        """Compute the weights of the last queries of all rows that no edit has changed at once."""
        told = {row.name for row in self._told if row.layer == call.layer}
        chosen = [
            (asked, row)
            for asked, row in asked_rows
            if call.layer in asked.bound.layers and asked.name not in told and asked.chooses(row)
        ]
        if not chosen:
            return
        rows = [row for _, row in chosen]
        keys = call.keys(rows)
        query = call.query[[row.stop - 1 for row in rows]][:, :, None]  # [R, H, 1, D]
        places = torch.tensor([row.length - 1 for row in rows], device=query.device)
        problem = self.model.facts[call.layer].problem(query, keys, keys[..., :1], places)  # no values
        weights = weights_of(problem, Selection())[:, :, 0]
        for at, (asked, row) in enumerate(chosen):
            self._tell(call.layer, asked, row, weights[at])

    def _tell(self, layer: int, asked: AskedRequest, row: PassRow, weights: Tensor) -> None:
        able = statistics_of(self.model.facts[layer].spec)
        heads = asked.bound.heads[layer].heads
        self._told.append(TokenWeights(asked.bound, asked.name, layer, row.length, weights, heads, able))

    def _see_output(self, layer: int, output: Tensor) -> None:
        """Edit and read the output of a layer in the rows of the requests that ask for it. Never raises."""
        rows = self._rows_by_layer.get(layer, {})
        for asked in [each for each in self._active if layer in each.outputs and each.name in rows]:
            try:
                row = rows[asked.name]
                own = output[row.start : row.stop]
                if edits := asked.bound.output_edits.get(layer):
                    edit_output(own, edits, row.first, asked.begin)
                if OUTPUT in asked.bound.taps and self.model.share.rank == 0:  # it is the same on all ranks
                    asked.tapped.setdefault(layer, {})[OUTPUT] = own.float().cpu().numpy().copy()
                asked.outputs_seen.add(layer)
            except Exception as fault:
                _log.exception("output of layer %d", layer)
                self._refuse(asked, InternalError(f"layer {layer}: {type(fault).__name__}: {str(fault)[:300]}"))

    def _try(self, call: KernelCall, trial: KernelTrial) -> None:
        """Compare every query of the requests of a trial."""
        try:
            if call.refused is not None:
                trial.fault = trial.fault or f"layer {call.layer}: {call.refused}"
                return
            for row in rows_of(sorted(trial.names & self._scheduled), self._runner, call.metadata):
                keys, values = call.keys_and_values(row)
                part = slice(row.start, row.stop)
                facts, q = self.model.facts[call.layer], call.query[part].transpose(0, 1)
                trial.compare(call.layer, facts, q, keys, values, call.output[part], row.first)
        except Exception as fault:
            _log.exception("self-test of layer %d", call.layer)
            trial.fault = trial.fault or f"layer {call.layer}: {type(fault).__name__}: {fault}"

    def _send(self) -> None:
        for asked in [*self._active]:
            expected = {*asked.bound.heads, *asked.bound.edits, *asked.bound.output_edits}
            if missing := sorted(expected - asked.seen):
                reason = f"layers {missing} are computed by an attention that is not read here"
                self._refuse(asked, InvalidRequest.at("attention", reason))
            elif missing := sorted(asked.outputs - asked.outputs_seen):
                reason = f"the outputs of layers {missing} were not seen in a pass"
                self._refuse(asked, InvalidRequest.at("attention.edits", reason))
            asked.checked = True
        for asked in [each for each in self._active if each.tapped]:
            place = next(iter(self._rows_by_layer.values()))[asked.name]
            fields = [asked.bound.placed(layer) | asked.tapped[layer] for layer in asked.bound.heads]
            message = {"id": asked.bound.ask.id, "first": place.first, "stop": place.length, "layers": fields}
            self.channel.put(message | self.model.share.named, asked.bound.ask.reply_to)
        if not self._told:
            return
        named = {row.name: row for row in self._told}
        tokens: dict[str, list[int] | None] = {}
        for name, row in named.items():
            if row.bound.reads_tokens:
                tokens[name] = tokens_of(name, self._runner)
                own = (tokens[name] or [])[: row.length]
                if len(own) < row.length or min(own) < 0:  # a negative one stands for a token that is not known yet
                    reason = "the tokens of the text are not known, as in model runner V2 and async scheduling"
                    self._refuse(self._asked[name], InvalidRequest.at("attention.statistics", reason))
        lengths = {row.name: row.length for row in self._told}
        for name, layers in token_reports(self._told, tokens).items():
            asked = self._asked[name]
            asked.sent = lengths[name]
            ask = asked.bound.ask
            fields = [asked.bound.placed(layer) | layers[layer] for layer in asked.bound.layers]
            message = {"id": ask.id, "position": lengths[name], "layers": fields} | self.model.share.named
            self.channel.put(message, ask.reply_to)
