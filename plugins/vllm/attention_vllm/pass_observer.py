"""The work beside each pass: find the rows that ask, compute their weights, edit them, send reports.

A worker calls ``begin`` and ``end`` around a pass, and each attention layer in it calls ``observe`` after vLLM's own
kernel. vLLM's output is left as it is but for the heads that a request edits, in its own rows. A fault in here refuses
the ask, and never ends a request.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor

from attention_contract.errors import AttentionError, InternalError, InvalidRequest
from attention_vllm.asked_requests import AskedRequest, KernelCall
from attention_vllm.asks import ask_id, read_ask
from attention_vllm.attention_outputs import AttentionOutputs, edit_output
from attention_vllm.bound_asks import OUTPUT, KnownModel, bind_ask
from attention_vllm.edited_rows import edited_contexts
from attention_vllm.kernel_trial import KernelTrial, departure
from attention_vllm.last_queries import LastQueries, LastQuery
from attention_vllm.pass_rows import PassRow, rows_of, tokens_of
from attention_vllm.result_channel import ResultChannel
from attention_vllm.text_taps import read_taps
from attention_vllm.token_reports import TokenWeights, ToldText, token_reports

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
        self._scheduled: Mapping[str, int] = {}
        """The tokens of each request in the pass."""
        self._runner: Any = None
        self._rows: dict[int, dict[str, PassRow]] = {}
        """The rows of requests, by the metadata of layers."""
        self._rows_by_layer: dict[int, dict[str, PassRow]] = {}
        self._queries: dict[Hashable, list[LastQuery]] = {}
        """The last queries of requests that only tell, by the metadata of layers."""
        self._seen: set[int] = set()
        """The layers of the pass that were seen."""
        self._waiting: dict[Hashable, LastQueries] = {}
        """The rows whose weights are still to be computed."""
        self._hooks: AbstractContextManager[object] | None = None
        """The hooks of outputs in the pass."""
        self._told: list[TokenWeights] = []

    def begin(self, scheduled: Any, runner: Any) -> None:
        """Begin a pass, as a ``SchedulerOutput`` says."""
        for name in scheduled.finished_req_ids:
            self._asked.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id not in self._asked:  # V2 begins a preempted request anew
                self._take(new)
        self._forget_pass()  # one that did not end
        if self.idle and not self._asked:
            return
        self._runner, self._scheduled = runner, scheduled.num_scheduled_tokens
        self._active = [asked for name, asked in self._asked.items() if name in self._scheduled]
        outputs = set[int]()
        for asked in self._active:
            asked.outputs_seen, asked.tapped = set(), {}
            outputs |= asked.outputs
        if outputs:
            self._hooks = self.outputs.hooked(sorted(outputs), self._see_output)

    @property
    def idle(self) -> bool:
        """True if no layer of the pass is told of."""
        return not self._active and self.trial is None

    def observe(self, call: KernelCall) -> None:
        """Tell of a layer, and edit it. Never raises."""
        if self.trial is not None:
            self._try(call, self.trial)
        active = tuple(asked for asked in self._active if call.layer in asked.layers)
        if not active:
            return
        if call.refused is not None:
            for asked in active:
                self._refuse(asked, InvalidRequest.at("attention", f"layer {call.layer}: {call.refused}"))
            return
        try:
            self._seen.add(call.layer)
            rows = self._rows_by_layer[call.layer] = self._rows_of(call, [asked.name for asked in self._active])
            key = id(call.metadata), active
            if (queries := self._queries.get(key)) is None:
                queries = [query for asked in active if (query := self._one(call, asked, rows[asked.name])) is not None]
                if all(asked.only_tells for asked in active):
                    self._queries[key] = queries
            self._wait(call, [query for query in queries if query.asked.checked])
            self._wait(call, [query for query in queries if not query.asked.checked])
        except Exception as fault:
            _log.exception("attention of layer %d", call.layer)
            for asked in active:
                self._refuse(asked, InternalError(f"layer {call.layer}: {type(fault).__name__}: {str(fault)[:300]}"))

    def end(self) -> None:
        """Send what the pass has computed."""
        if self._active:
            try:
                for waiting in self._waiting.values():
                    self._weigh(waiting)
                self._send()
            except Exception as fault:
                _log.exception("attention of a pass")
                for asked in [*self._active]:
                    self._refuse(asked, InternalError(f"{type(fault).__name__}: {str(fault)[:300]}"))
        self._forget_pass()

    def _forget_pass(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None
        self._active, self._told, self._rows, self._rows_by_layer = [], [], {}, {}
        self._seen, self._waiting, self._queries = set(), {}, {}

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
        ask = asked.bound.ask
        self.channel.put({"id": ask.id, "refused": fault.to_problem()}, ask.reply_to)

    def _rows_of(self, call: KernelCall, names: Sequence[str]) -> dict[str, PassRow]:
        """The rows of requests, found once for all layers of one metadata."""
        key = id(call.metadata)
        if key not in self._rows:
            self._rows[key] = {row.name: row for row in rows_of(names, self._runner, call.metadata)}
        return self._rows[key]

    def _one(self, call: KernelCall, asked: AskedRequest, row: PassRow) -> LastQuery | None:
        """Edit a row, read its taps, and return its last query if the weights of that are still to be computed."""
        told = call.layer in asked.bound.layers and asked.chooses(row)
        edited = call.layer in asked.bound.edits
        if edited:
            told = self._edit(call, asked, row, told=told)
        if asked.bound.taps and asked in self._active:
            read_taps(call, self.model.facts[call.layer], asked, row)
        return LastQuery(asked, row, told) if told or not (asked.checked or edited) else None

    def _edit(self, call: KernelCall, asked: AskedRequest, row: PassRow, *, told: bool) -> bool:
        """Write the context of the edited heads over the kernel's, which is compared before in the first pass.

        ``told``: the weights of the last query are told of. Returns True if they still are to be.
        """
        facts, edits = self.model.facts[call.layer], asked.bound.edits[call.layer]
        keys, values = call.keys_and_values(row)
        q, output = call.query[row.start : row.stop].transpose(0, 1), call.output[row.start : row.stop]
        if not asked.checked:
            fault = departure(facts, q[:, -1:], keys, values, output[-1:], row.length - 1)
            if fault is not None:
                self._refuse(asked, InvalidRequest.at("attention", f"layer {call.layer}: {fault}"))
                return False
        heads = list(asked.bound.edited_heads[call.layer])
        for part, context, weights in edited_contexts(facts, q, keys, values, edits, row.first, asked.begin):
            output[part, heads] = context[heads].transpose(0, 1).to(output.dtype)
            if told and part.stop == q.shape[1]:
                text = ToldText(asked.bound, asked.name, row.length)
                self._told.append(TokenWeights([call.layer], [text], weights[None, None, :, -1], facts.able))
                told = False
        return told

    def _wait(self, call: KernelCall, queries: Sequence[LastQuery]) -> None:
        """Have the last queries of a layer computed later, with those of layers alike.

        The kernel's outputs of those that were not checked are compared.
        """
        if not queries:
            return
        facts = self.model.facts[call.layer]
        kind = queries[0].asked.checked, LastQueries.kind(call, facts, queries)
        if (waiting := self._waiting.get(kind)) is None:
            waiting = self._waiting[kind] = LastQueries(call, facts, queries, len(self.model.facts))
        waiting.add(call)
        if waiting.full:
            self._weigh(self._waiting.pop(kind))

    def _weigh(self, waiting: LastQueries) -> None:
        """Compute weights. Raises what the core raises."""
        by_layer, departed = waiting.weights()
        rows = [(layer, query.asked) for layer in waiting.layers for query in waiting.queries]
        for (layer, asked), fault in zip(rows, departed, strict=False):
            if fault is not None:
                self._refuse(asked, InvalidRequest.at("attention", f"layer {layer}: {fault}"))
        told = [at for at, query in enumerate(waiting.queries) if query.told]
        if not told:
            return
        own = [waiting.queries[at] for at in told]
        texts = [ToldText(query.asked.bound, query.asked.name, query.row.length) for query in own]
        weights = by_layer if len(told) == len(waiting.queries) else by_layer[:, told]
        self._told.append(TokenWeights(waiting.layers, texts, weights, waiting.facts.able))

    def _see_output(self, layer: int, output: Tensor) -> None:
        """Edit and read the output of a layer in the rows of the requests that ask for it. Never raises."""
        rows = self._rows_by_layer.get(layer, {})
        for asked in [asked for asked in self._active if layer in asked.outputs and asked.name in rows]:
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
            for row in rows_of(sorted(trial.names & self._scheduled.keys()), self._runner, call.metadata):
                keys, values = call.keys_and_values(row)
                part = slice(row.start, row.stop)
                facts, q = self.model.facts[call.layer], call.query[part].transpose(0, 1)
                trial.compare(call.layer, facts, q, keys, values, call.output[part], row.first)
        except Exception as fault:
            _log.exception("self-test of layer %d", call.layer)
            trial.fault = trial.fault or f"layer {call.layer}: {type(fault).__name__}: {fault}"

    def _send(self) -> None:
        for asked in [*self._active]:
            if missing := sorted(asked.layers - self._seen):
                reason = f"layers {missing} are computed by an attention that is not read here"
                self._refuse(asked, InvalidRequest.at("attention", reason))
            elif missing := sorted(asked.outputs - asked.outputs_seen):
                reason = f"the outputs of layers {missing} were not seen in a pass"
                self._refuse(asked, InvalidRequest.at("attention.edits", reason))
            asked.checked = True
        for asked in [asked for asked in self._active if asked.tapped]:
            place = next(iter(self._rows_by_layer.values()))[asked.name]
            fields = [asked.bound.placed(layer) | asked.tapped[layer] for layer in asked.bound.heads]
            message = {"id": asked.bound.ask.id, "first": place.first, "stop": place.length, "layers": fields}
            self.channel.put(message | self.model.share.named, asked.bound.ask.reply_to)
        if not self._told:
            return
        texts = {text.name: text for told in self._told for text in told.texts}
        tokens: dict[str, list[int] | None] = {}
        for name, text in texts.items():
            if text.bound.reads_tokens and name in self._asked:  # not refused meanwhile
                tokens[name] = tokens_of(name, self._runner)
                own = (tokens[name] or [])[: text.length]
                if len(own) < text.length or min(own) < 0:  # a negative one stands for a token that is not known yet
                    reason = "the tokens of the text are not known, as in model runner V2 and async scheduling"
                    self._refuse(self._asked[name], InvalidRequest.at("attention.statistics", reason))
        for name, layers in token_reports(self._told, tokens).items():
            length = texts[name].length
            if name not in self._asked:  # refused meanwhile
                continue
            asked = self._asked[name]
            asked.sent = length
            ask = asked.bound.ask
            fields = [asked.bound.placed(layer) | layers[layer] for layer in asked.bound.layers]
            message = {"id": ask.id, "position": length, "layers": fields} | self.model.share.named
            self.channel.put(message, ask.reply_to)
