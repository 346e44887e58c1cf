"""A played service: it answers every operation of the contract and remembers each request."""

import asyncio
import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import httpx
import numpy as np

from attention_client import AsyncClient, Client
from attention_client.calls.method import CallMethod, Calls
from attention_client.client_base import GROUPS
from attention_contract.errors import SessionGone
from attention_contract.operations import OPERATIONS, Operation
from attention_contract.schemas import answers as w
from attention_contract.schemas import attention as a
from attention_contract.schemas import checkpoints as k
from attention_contract.schemas import models as l
from attention_contract.schemas import modules as m
from attention_contract.schemas import openai as i
from attention_contract.schemas import recordings as r
from attention_contract.schemas import server as s
from attention_contract.schemas import sessions as t
from attention_contract.schemas.analyses import circuits as u
from attention_contract.schemas.analyses import hopfield as h
from attention_contract.schemas.analyses import rollout as o
from attention_contract.schemas.analyses import similarity as v
from attention_contract.schemas.analyses.attribution import AttributionReply, Attributions, Completeness
from attention_contract.schemas.analyses.context import ContextReply
from attention_contract.schemas.analyses.effects import Effects, EffectsReply
from attention_contract.schemas.analyses.lenses import LensInfo, LensList
from attention_contract.schemas.analyses.model_effects import ModelEffects, ModelEffectsReply
from attention_contract.schemas.analyses.probes import ProbeInfo, ProbeList
from attention_contract.schemas.analyses.recording_statistics import RecordingStatistics, StatisticsOfAttention
from attention_contract.schemas.analyses.vectors import VectorInfo, VectorList
from attention_contract.schemas.costs import accuracy as y
from attention_contract.schemas.costs import complexity as c
from attention_contract.schemas.costs import hardware as g
from attention_contract.schemas.costs.model_complexity import ModelComplexityReply, PassCost
from attention_contract.schemas.gradients import GradientCheck, GradientsReply, PassReply
from attention_contract.schemas.openai_api.responses import ModelResponse, OutputMessage, OutputText
from attention_contract.schemas.openai_api.scoring import PairScore, PairScores, RankedResult, Ranking
from attention_contract.schemas.openai_api.tokenization import Tokenization
from attention_contract.schemas.openai_api.transcriptions import HeardDuration, Transcription
from attention_contract.schemas.prompts import ModelRan, TokenLabelsReply
from attention_contract.schemas.weights import BY_KEY, NEEDS_PAIRS, HeadStatistics, TopKeys, WeightsReply
from attention_contract.wire import JSON, PICTURES, from_body, to_body

URL = "http://service.test"
X = np.ones((3, 8), np.float32)
CONFIG = {"d_model": 8, "num_heads": 2}
EXAMPLES = {
    "server_info": ((), {}, "/v1"),
    "list_variants": ((), {}, "/v1/variants"),
    "list_checkpoints": ((), {}, "/v1/checkpoints"),
    "fetch_checkpoint": (("org/net",), {"revision": "main"}, "/v1/checkpoints"),
    "cancel_fetch": (("org/net",), {}, "/v1/checkpoints/org%2Fnet"),
    "get_checkpoint": (("org/net",), {}, "/v1/checkpoints/org%2Fnet"),
    "list_modules": ((), {}, "/v1/modules"),
    "create_module": (("demo", CONFIG), {"seed": 0}, "/v1/modules"),
    "import_module": (("minilm",), {"layer": 1}, "/v1/modules/import"),
    "get_module": (("demo",), {}, "/v1/modules/demo"),
    "delete_module": (("demo",), {}, "/v1/modules/demo"),
    "list_models": ((), {}, "/v1/models"),
    "load_model": (("org/net",), {"name": "net"}, "/v1/models"),
    "get_model": (("net",), {}, "/v1/models/net"),
    "unload_model": (("net",), {}, "/v1/models/net"),
    "model_forward": (("net", "the cat"), {"return_": ["weights"]}, "/v1/models/net/forward"),
    "model_weights": (("net", ["the", "cat"]), {"top_k": 2}, "/v1/models/net/weights"),
    "model_gradients": (("net", "the cat"), {"wrt": ["tokens"]}, "/v1/models/net/gradients"),
    "model_context": (("net", "The cat sat. A dog ran."), {"answer": " A cat.", "heads": 2}, "/v1/models/net/context"),
    "model_lens": (("net", "the cat"), {"of": ["heads"], "targets": [3]}, "/v1/models/net/lens"),
    "model_effects": (("net", "the cat"), {"sweep": {"tap": "context", "set": 0}}, "/v1/models/net/effects"),
    "fit_lens": (("net", ["the cat"]), {"skip_first": 0}, "/v1/models/net/lenses"),
    "list_lenses": (("net",), {}, "/v1/models/net/lenses"),
    "get_lens": (("0" * 32,), {}, f"/v1/lenses/{'0' * 32}"),
    "delete_lens": (("0" * 32,), {}, f"/v1/lenses/{'0' * 32}"),
    "fit_vector": (("net", ["the cat"], ["a dog"]), {"method": "mean_difference"}, "/v1/models/net/vectors"),
    "list_vectors": (("net",), {}, "/v1/models/net/vectors"),
    "get_vector": (("0" * 32,), {}, f"/v1/vectors/{'0' * 32}"),
    "delete_vector": (("0" * 32,), {}, f"/v1/vectors/{'0' * 32}"),
    "fit_probe": (
        ("net", {"point": "hidden", "layer": 1}, ["the cat", "a dog"], [0, 1]),
        {"folds": 2},
        "/v1/models/net/probes",
    ),
    "list_probes": (("net",), {}, "/v1/models/net/probes"),
    "get_probe": (("0" * 32,), {}, f"/v1/probes/{'0' * 32}"),
    "delete_probe": (("0" * 32,), {}, f"/v1/probes/{'0' * 32}"),
    "model_similarity": (("net", [["the cat", "a dog"]]), {"pooling": "mean"}, "/v1/models/net/similarity"),
    "model_complexity": (("net", 512), {"new_tokens": 8}, "/v1/models/net/complexity"),
    "create_chat_completion": (("net", [{"role": "user", "content": "a"}]), {"max_tokens": 2}, "/v1/chat/completions"),
    "create_completion": (("net", "the cat"), {"attention": {"top_k": 2}}, "/v1/completions"),
    "create_response": (("net", "the cat"), {"instructions": "be brief"}, "/v1/responses"),
    "tokenize": (("net", "the cat"), {"return_token_strs": True}, "/v1/tokenize"),
    "create_embedding": (("net", ["the", "cat"]), {}, "/v1/embeddings"),
    "rerank": (("net", "the", ["cat", "dog"]), {"top_n": 1}, "/v1/rerank"),
    "score": (("net", "the", ["cat", "dog"]), {}, "/v1/score"),
    "create_transcription": (("net", b"RIFF"), {"language": "en"}, "/v1/audio/transcriptions"),
    "list_parameters": (("demo",), {}, "/v1/modules/demo/parameters"),
    "replace_parameters": (("demo", {"q_proj.weight": X}), {}, "/v1/modules/demo/parameters"),
    "get_parameter": (("demo", "q_proj.weight"), {"head": 1}, "/v1/modules/demo/parameters/q_proj.weight?head=1"),
    "forward": (("demo", X), {"return_": ["output", "weights"]}, "/v1/modules/demo/forward"),
    "weights": (("demo", X), {"top_k": 2}, "/v1/modules/demo/weights"),
    "attribution": (("demo", X), {"methods": ["norm"]}, "/v1/modules/demo/attribution"),
    "gradients": (("demo", X), {"wrt": ["query", "q_proj.weight"]}, "/v1/modules/demo/gradients"),
    "effects": (("demo", X), {"sweep": {"tap": "context", "set": 0}}, "/v1/modules/demo/effects"),
    "complexity": (("demo", 512), {}, "/v1/modules/demo/complexity"),
    "raw_forward": ((X, X, X), {}, "/v1/attention/forward"),
    "raw_weights": ((X, X), {}, "/v1/attention/weights"),
    "raw_attribution": ((X, X), {"methods": ["integrated"], "steps": 4}, "/v1/attention/attribution"),
    "raw_gradients": ((X, X, X), {}, "/v1/attention/gradients"),
    "raw_effects": ((X, X), {"sweep": {"tap": "weights", "over": ["keys"], "scale": 2}}, "/v1/attention/effects"),
    "create_pass": (("demo", X), {"wrt": ["query", "parameters"]}, "/v1/modules/demo/passes"),
    "create_raw_pass": ((X, X, X), {"wrt": ["value"]}, "/v1/attention/passes"),
    "backward": (("5e",), {"upstream": X}, "/v1/passes/5e/backward"),
    "raw_complexity": ((512,), {"num_heads": 8, "head_dim": 64}, "/v1/attention/complexity"),
    "accuracy": ((), {}, "/v1/complexity/accuracy"),
    "list_hardware": ((), {}, "/v1/complexity/hardware"),
    "similarity": ((X[None],), {"measure": "cka"}, "/v1/attention/similarity"),
    "circuits": (("demo",), {"with_": "later"}, "/v1/modules/demo/circuits"),
    "hopfield_retrieve": ((X, X), {"eps": 0.1}, "/v1/hopfield/retrieve"),
    "list_recordings": ((), {}, "/v1/recordings"),
    "create_recording": ((r.EXAMPLE_RECORDING,), {}, "/v1/recordings"),
    "get_recording": (("0" * 32,), {}, f"/v1/recordings/{'0' * 32}"),
    "rollout": ((np.ones((2, 3, 3)),), {"residual": 0.25}, "/v1/attention/rollout"),
    "recording_rollout": (("0" * 32,), {"method": "flow", "queries": [1]}, f"/v1/recordings/{'0' * 32}/rollout"),
    "recording_statistics": (("0" * 32,), {"sinks": 2}, f"/v1/recordings/{'0' * 32}/statistics"),
    "recording_similarity": (("0" * 32,), {"tensor": "context"}, f"/v1/recordings/{'0' * 32}/similarity"),
    "delete_recording": (("0" * 32,), {}, f"/v1/recordings/{'0' * 32}"),
    "list_sessions": ((), {}, "/v1/sessions"),
    "open_session": (("demo",), {"capacity": 128}, "/v1/modules/demo/sessions"),
    "get_session": (("7-1",), {}, "/v1/sessions/7-1"),
    "delete_session": (("7-1",), {}, "/v1/sessions/7-1"),
    "step_session": (("7-1", X), {"at": 0, "step": "a"}, "/v1/sessions/7-1/step"),
    "step_sessions": (([{"session": "7-1", "query": X}],), {}, "/v1/sessions/step"),
    "fork_session": (("7-1",), {"length": 2}, "/v1/sessions/7-1/fork"),
    "truncate_session": (("7-1", 2), {}, "/v1/sessions/7-1/truncate"),
    "reorder_session": (("7-1", [0]), {}, "/v1/sessions/7-1/reorder"),
    "session_weights": (("7-1", X), {"top_k": 2}, "/v1/sessions/7-1/weights"),
    "session_effects": (("7-1", X), {"sweep": {"tap": "q", "scale": 2}}, "/v1/sessions/7-1/effects"),
    "session_attribution": (("7-1", X), {"methods": ["relevance"]}, "/v1/sessions/7-1/attribution"),
    "session_gradients": (("7-1", X), {"wrt": ["query", "past_key"]}, "/v1/sessions/7-1/gradients"),
    "get_session_cache": (("7-1",), {}, "/v1/sessions/7-1/cache"),
    "put_session_cache": (("7-1", X[None], X[None]), {}, "/v1/sessions/7-1/cache"),
    "health_live": ((), {}, "/health/live"),
    "health_ready": ((), {}, "/health/ready"),
}
"""For each operation: the arguments of its call, and the path that they lead to."""
EXAMPLES |= {
    operation.name: (("net",), operation.example, operation.path.format(model="net"))
    for operation in OPERATIONS
    if operation.name not in EXAMPLES and "{model}" in operation.path and operation.example is not None
}
CALLS = {
    f"{group}.{name}".lstrip("."): getattr(kind, name)
    for group, kind in {"": Client, **{name: type(getattr(Client(URL), name)) for name in GROUPS}}.items()
    if issubclass(kind, Calls)
    for name in dir(kind)
    if isinstance(inspect.getattr_static(kind, name), CallMethod) and name != "open"
}
"""The methods of the blocking client that make a call, by their dotted names."""
COMPOSED = {
    "models.lens_matrices", "modules.import_all", "recordings.read", "recordings.download", "models.stream",
    "models.stream_chat", "models.stream_response", "models.stream_transcription", "models.survey", "models.passages",
    "models.export_headvis",
}  # fmt: skip
"""Methods that make several calls, or ask for a part of a reply or for its pieces."""
METHODS = {
    re.search(r"operations\.(\w+)", inspect.getsource(method))[1]: name
    for name, method in CALLS.items()
    if name not in COMPOSED
}
"""The dotted name of the method of each operation; of several methods, the one that asks for its whole reply."""
RAN = a.Ran(
    kernel="fused", device="cpu", dtype="float32", version="abc", flops=2_000, predicted_ms=1.0, predicted_low_ms=0.5,
    predicted_high_ms=2.0, compute_ms=1.5, cpu_ms=1.4,
    queue_ms=0.1, batch=1, peak_bytes=4096,
)  # fmt: skip
INFO = m.ModuleInfo(
    name="demo", config=m.ModuleConfig(d_model=8, num_heads=2), version="abc", device="cpu",
    parameter_count=288, bytes=1152,
)  # fmt: skip
FOUND = k.CheckpointReply(
    path="org/net", family="gpt2", model_type="gpt2", bytes=1152, layers=1, heads=2, d_model=8,
    attentions=[k.CheckpointAttention(name="net.0", layer=0, part="self", config=INFO.config, bytes=1152)],
)  # fmt: skip
_STAGES = c.StageFlops(
    projections=1, position=0, scores=1, normalizer=1, values=1, output_projection=1, matmul=4, total=5
)
_PASS = c.PassFlops(dense=_STAGES, masked=_STAGES)
_EXECUTED = w.PassCounts(flops=5, transcendentals=1, bytes_read=4, bytes_written=3, operations=2)
TOOK = w.Milliseconds(median_ms=0.5, low_ms=0.25, high_ms=1.0)
LARGEST = w.Largest(size=4321, kernel="blocked", peak_bytes=8_000_000)
FITS = w.Fits(longest=LARGEST, largest_batch=w.Largest(size=0))
LIMITS = w.CostLimits(free_bytes=9_000_000, forward=FITS, gradients=None)
GROWTH = c.Growth(
    dimension="length", flops_exponent=2, time_exponent=1.75, peak_bytes_exponent=1, time_order="O(n²·d)",
    memory_order="O(n·d)", between=(1, 2), letters={"n": "keys", "d": "width"},
)  # fmt: skip
HEADS = np.arange(2, dtype=np.float32)
LENS = LensInfo(model="net", created="2026-01-01T00:00:00Z", id="0" * 32, texts=7, layers=[0, 1])
PROBE = ProbeInfo(
    model="net", created="2026-01-01T00:00:00Z", id="0" * 32, of={"point": "hidden", "layer": 1}, method="ridge",
    texts=7, samples=21, positives=9, width=4, layer=1, weights={"1": np.arange(4.0)},
    layers=[{"layer": 1, "bias": 0.5, "auc": 0.875, "auc_low": 0.75, "auc_high": 0.9375, "threshold": 0.25}],
)  # fmt: skip
VECTOR = VectorInfo(
    model="net", checkpoint="net", checkpoint_created=1, created="2026-01-01T00:00:00Z", id="0" * 32, source="texts",
    method="pca", position="last", positive=7, negative=7, width=4, layers=[{"layer": 1, "norm": 3.0}],
    directions={"1": np.arange(4, dtype=np.float32)},
)  # fmt: skip
SESSION = t.SessionInfo(
    session="7-1", module="demo", version="abc", sequences=1, length=3, held=3, policy=t.FullPolicy(), pinned=False,
    bytes=4096, shared_bytes=1024, own_bytes=3072, expires_at="2026-01-01T00:00:00+00:00",
)  # fmt: skip

CIRCUIT = {
    "singular_values": np.array([[4.0, 3.0], [1.0, 0.0]]), "norm": np.array([5.0, 1.0]),
    "effective_rank": np.array([1.98, 1.0]), "stable_rank": np.array([1.5625, 1.0]),
}  # fmt: skip


RECORDING = r.RecordingInfo.model_validate(
    {name: value for name, value in r.EXAMPLE_RECORDING.items() if name != "layers"}
    | {"id": "0" * 32, "bytes": 344, "tensors": [{"name": "layers.0.weights", "dtype": "float32", "shape": [1, 2, 2]}]}
)


def cost(queries: int) -> c.Cost:
    return c.Cost(
        shape=c.Shape(queries=queries, keys=queries), pairs=queries**2, allowed_pairs=queries**2, forward=_PASS,
        backward=_PASS, backward_fused=_PASS, kernel="fused", executed_flops=1, executed_backward_flops=1,
        executed=w.Executed(forward=_EXECUTED, backward=_EXECUTED),
        intensity=0.5, parameter_bytes=1, input_bytes=1, output_bytes=1,
        kv_cache_bytes=2_000_000, kv_cache_bytes_per_token=1, predicted_ms=0.5,
        peak_bytes=c.PeakBytes(fused=1, blocked=1, materialized=2, request=3),
        predicted=w.Predicted(basis="rates", forward=TOOK, gradients=TOOK, decode=None, transfer=TOOK, encoding={}),
        per_token=w.PerToken(flops=5, moved_bytes=7, predicted_ms=0.125, kv_cache_bytes=1),
    )  # fmt: skip


def retrieved(request: h.HopfieldRequest) -> h.HopfieldReply:
    """Return every state as it came; the first settled at one pattern, the others on their way."""
    states = np.asarray(request.states)
    first = np.arange(len(states)) == 0
    numbers = np.where(first, 0.96875, 0.5).astype(np.float32)
    reached = dict.fromkeys(("weight", "similarity", "distance", "mixed"), numbers)
    return h.HopfieldReply(
        states=states,
        energy=np.stack([numbers + 2, numbers], -1),
        steps=np.arange(len(states)),
        change=numbers,
        converged=None if request.eps is None else first,
        reached=h.Reached(pattern=np.arange(len(states)), single=first, **reached),
        association=np.eye(len(states), dtype=np.float32) if request.return_association else None,
        ran=RAN,
    )


def session_cost(shape: c.SessionShape) -> c.SessionCost:
    """Return the price of a session."""
    time = w.Milliseconds(median_ms=0.5, low_ms=0.25, high_ms=1)
    steps = [c.SessionStepCost(past=past, held=past, bytes=4096, predicted=time) for past in shape.pasts]
    return c.SessionCost(token_bytes=64, page_tokens=64, free_bytes=2**20, longest=16_384, steps=steps)


def model_reply(kind: Any) -> Any:
    """Return a reply of a whole model."""
    info = l.ModelInfo(id="net", created=1, checkpoint="org/net", state="idle")
    ran = ModelRan(
        model="net", architecture="GPT2LMHeadModel", device="cpu", dtype="float32", kernels=["fused"], compute_ms=1,
        queue_ms=1, peak_bytes=1,
    )  # fmt: skip
    cost = PassCost(flops=1, bytes=1, peak_bytes=1, predicted_ms=1, predicted_low_ms=1, predicted_high_ms=1)
    numbers = (
        {}
        if kind is None
        else {
            name: cost if about.annotation is PassCost else 1
            for name, about in kind.model_fields.items()
            if about.is_required()
        }
    )
    made = {
        None: lambda: None,
        l.ModelInfo: lambda: info,
        l.ModelList: lambda: l.ModelList(data=[info]),
        ModelComplexityReply: lambda: ModelComplexityReply(**numbers | {"model": "net"}),
        ContextReply: lambda: ContextReply(
            labels=[], ran=ran, prompt="The cat sat.", answer_text=" A cat.", generated=False, sources=[], answer=[]
        ),
        LensInfo: lambda: LENS,
        LensList: lambda: LensList(lenses=[LENS], bytes=0, limit_bytes=1),
        ProbeInfo: lambda: PROBE,
        ProbeList: lambda: ProbeList(probes=[PROBE], bytes=0, limit_bytes=1),
        VectorInfo: lambda: VECTOR,
        VectorList: lambda: VectorList(vectors=[VECTOR], bytes=0, limit_bytes=1),
        ModelEffectsReply: lambda: ModelEffectsReply(
            swept={"layers": [0], "heads": [0, 1]},
            baseline=np.ones(()),
            labels=[],
            ran=ran,
            token_names=[" mat"],
            effects=ModelEffects(value=np.ones((1, 2)), divergence=np.full((1, 2), 0.25)),
        ),
    }
    return made[kind]() if kind in made else kind(**least_fields(kind) | {"ran": ran})


def least_fields(kind: Any) -> dict[str, Any]:
    """Return the fields that a reply must have, each as small as it may be: no items, one number."""
    least: dict[Any, Any] = {list: [], dict: {}, str: "a", int: 1, float: 1.0, bool: True}
    fields = {}
    for name in (name for name, about in kind.model_fields.items() if about.is_required()):
        stated = kind.model_fields[name].annotation
        members = get_args(stated) if get_origin(stated) is UnionType else [stated]
        kinds = [get_origin(member) or member for member in members]
        known = next((each for each in kinds if each in least), None)
        choices = [get_args(member)[0] for member in members if get_origin(member) is Literal]
        fields[name] = choices[0] if choices else np.ones(()) if known is None else least[known]
    return fields


GENERATED = {
    "id": "x",
    "created": 1,
    "model": "net",
    "usage": i.Usage(prompt_tokens=2, completion_tokens=1, total_tokens=3),
}


def reply_to(operation: Operation[Any], request: Any) -> Any:
    """Return a reply of the right kind, with the request's own query as output."""
    name = operation.name.removeprefix("raw_").removeprefix("session_")
    if name == "forward":
        return a.ForwardReply(output=np.asarray(request.query), ran=RAN)
    if name == "weights":
        keys = np.tile(np.arange(request.top_k), (2, 3, 1))
        return WeightsReply(
            statistics=HeadStatistics(
                **dict.fromkeys(HeadStatistics.model_fields.keys() - BY_KEY - NEEDS_PAIRS, HEADS)
                | {"classes": {"first": HEADS}}
            ),
            queries=np.array(3),
            top=TopKeys(keys=keys, weights=keys.astype(np.float32)) if request.top_k else None,
            weights=np.ones((2, 3, 3), np.float32) if request.return_weights else None,
            ran=RAN,
        )
    if name.endswith("rollout"):
        values = np.eye(3)
        if name == "rollout":
            return o.RolloutReply(values=values, ran=RAN)
        tokens = ["the", "cat", "sat"]
        return o.RecordingRollout(id="0" * 32, layers=["layers.0"], tokens=tokens, values=values, ran=RAN)
    if name == "effects":
        measured = Effects(norm=HEADS, relative=HEADS, max=HEADS, projection=HEADS)
        return EffectsReply(swept={"heads": [0, 1]}, effects=measured, differences=np.ones((2, 3, 8)), ran=RAN)
    if name == "attribution":
        gap = Completeness(attributed=HEADS, expected=HEADS, gap=HEADS * 0.25)
        found = dict.fromkeys(request.methods, np.stack([HEADS, -HEADS]))
        return AttributionReply(
            **found,
            completeness=gap if "integrated" in found else None,
            differences=Attributions(**found) if request.compare else None,
            ran=RAN,
        )
    if name == "gradients":
        check = GradientCheck(max_absolute_error=1e-9, max_relative_error=1e-8, elements=4, passed=True)
        wrt = dict.fromkeys(request.wrt, HEADS)
        products = dict.fromkeys(wrt, HEADS) if request.directions else None
        checks = dict.fromkeys(wrt, check) if request.check else None
        return GradientsReply(gradients=wrt, hessian_products=products, check=checks, ran=RAN)
    if name in {"create_pass", "create_raw_pass"}:
        return PassReply(id="5e", output=np.asarray(request.query), ran=RAN)
    if name == "backward":
        return GradientsReply(gradients={"query": X}, ran=RAN)
    if name == "complexity":
        values = request.sweep.values if request.sweep else [request.shape.queries]
        facts = {"device_name": "a cpu", "parameter_count": 288, "growth": GROWTH, "limits": LIMITS}
        facts["costs"] = [cost(value) for value in values]
        labels = ["request", *(one.label or "other" for one in request.compare)]
        crossover = w.Crossover(
            of="time", between=("request", labels[-1]), dimension="length", searched=(1, 2**20), cheaper=labels[-1],
            at=777, low=333, measured=700 if request.measure else None,
        )  # fmt: skip
        return c.ComplexityReply(
            **facts,
            projections_crossover=1024,
            session=None if request.session is None else session_cost(request.session),
            compared=[c.Compared(label=label, **facts) for label in labels] if request.compare else [],
            crossovers=[crossover] if request.compare else [],
        )
    if name == "hopfield_retrieve":
        return retrieved(request)
    if any(noun in name for noun in ("model", "lens", "probe", "vector")):
        return model_reply(operation.reply)
    return {
        "server_info": s.ServerInfo(
            name="attention-service", version="0", torch="2", device="cpu", device_name="a cpu", dtypes=["float32"],
            media_types=[JSON], modules=1,
            limits=s.Limits(**(dict.fromkeys(s.Limits.model_fields, 1) | {"caller": s.CallerLimits()})),
            memory=s.Memory(**dict.fromkeys(s.Memory.model_fields, 1)),
        ),
        "list_variants": s.VariantList(variants=[
            s.Variant(
                kind="score", name="dot", summary="q·k", formula="q·k", gradient="k", cost="O(n²)", source="Luong",
                options={},
            ),
        ]),
        "circuits": u.CircuitsReply(
            heads=np.arange(2),
            qk=u.Circuit(**CIRCUIT),
            ov=u.OutputCircuit(**CIRCUIT, copying=np.array([1.0, -0.5])),
            spectra=[u.Spectrum(name="score.weight", shape=[2, 2, 2], **CIRCUIT)],
            composition=u.Composition(
                module="later", version="def", baseline=0.125, **dict.fromkeys("qkv", np.array([[0.75], [0.25]]))
            ),
            left_out=["position rope"],
            ran=RAN,
        ),
        "create_chat_completion": i.ChatCompletion(
            **GENERATED, choices=[i.ChatChoice(index=0, message=i.AssistantMessage(content="Hi"), finish_reason="stop")]
        ),
        "create_completion": i.Completion(
            **GENERATED, choices=[i.CompletionChoice(index=0, text="sat", finish_reason="stop")]
        ),
        "create_embedding": i.Embeddings(
            data=[i.Embedding(index=0, embedding=[1.0, 0.0])], model="net", usage=GENERATED["usage"]
        ),
        "rerank": Ranking(
            id="rerank-1", model="net", usage=GENERATED["usage"], results=[RankedResult(index=0, relevance_score=0.5)]
        ),
        "score": PairScores(
            id="score-1", created=0, model="net", usage=GENERATED["usage"], data=[PairScore(index=0, score=0.5)]
        ),
        "create_response": ModelResponse(
            id="resp_1", created_at=0, completed_at=1, status="completed", incomplete_details=None, model="net",
            output=[OutputMessage(id="msg_1", status="completed", content=[OutputText(text=" sat")])], usage=None,
            instructions="be brief", temperature=1.0, top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0,
            top_logprobs=0, max_output_tokens=None, metadata={}, user=None, safety_identifier=None,
            prompt_cache_key=None,
        ),
        "tokenize": Tokenization(
            count=1, max_model_len=None, tokens=[4], text="the",
            labels=TokenLabelsReply(tokens=["the"], ids=[4], spans=[(0, 3)]),
        ),
        "create_transcription": Transcription(text="the cat", usage=HeardDuration(seconds=2.5)),
        "list_hardware": g.HardwareList(
            hardware=[
                g.HardwareInfo(
                    name="G1", memory_bytes=80 * 10**9, bandwidth_gb_s=3350, link="a wire", link_gb_s=64,
                    tflops={"float16": 989.5}, sources=[g.HardwareSource(title="a sheet", url="https://maker.test")],
                )
            ],
            efficiency={"typical": {"flops": 0.5}},
        ),
        "list_checkpoints": k.CheckpointList(checkpoints=[k.CheckpointInfo(path="org/net", bytes=1152)]),
        "fetch_checkpoint": FOUND,
        "get_checkpoint": FOUND,
        "cancel_fetch": None,
        "list_modules": m.ModuleList(modules=[INFO], bytes=1152),
        "list_parameters": m.ParameterList(name="demo", version="abc", parameters=[
            m.ParameterInfo(
                name="q_proj.weight", shape=[8, 8], dtype="float32", bytes=256, mean=0, std=1, min=-1, max=1, norm=8,
                non_finite=3,
            ),
        ]),
        "get_parameter": m.Parameter(name="q_proj.weight", version="abc", value=np.ones((2, 2), np.float32)),
        "accuracy": y.AccuracyReply(
            device="a cpu", basis="calibrated", recalibrations=1, predictions=[
                y.PredictionErrors(
                    kernel="fused", purpose="gradients", count=20, median_error=-0.0625, mean_error=0.125,
                    median_absolute_error=0.07, p95_absolute_error=0.25, coverage=0.9,
                    histogram=y.RatioHistogram(edges=[1.0], counts=[12, 8]),
                ),
            ],
        ),
        "health_live": s.Health(status="live", modules=1),
        "health_ready": s.Health(status="ready", modules=1),
        "delete_module": None,
        "list_recordings": r.RecordingList(
            recordings=[
                r.RecordingSummary(
                    id="0" * 32, model="by hand", text="the cat", created=RECORDING.created, tokens={"layers": 2},
                    layers=1, heads=1, taps=["weights"], bytes=344,
                )
            ],
            bytes=344, limit_bytes=1000, damaged=["1" * 32],
        ),
        "create_recording": RECORDING,
        "get_recording": RECORDING,
        "recording_statistics": RecordingStatistics(id="0" * 32, attentions=[
            StatisticsOfAttention(
                name="layers.0", heads=["L0H0", "L0H1"], queries=3, statistics=HeadStatistics(entropy=HEADS)
            ),
        ]),
        "recording_similarity": v.RecordingSimilarity(
            id="0" * 32,
            with_="1" * 32,
            measure="cka",
            values=np.array([[0.5, 0.875]]),
            rows=[v.ComparedPart(layer="layers.0", head="L0H0")],
            columns=[v.ComparedPart(layer="layers.0"), v.ComparedPart(layer="layers.1")],
            tokens=7,
            ran=RAN,
        ),
        "similarity": v.SimilarityReply(measure="cka", values=np.eye(2), ran=RAN),
        "delete_recording": None,
        "list_sessions": t.SessionList(
            sessions=[SESSION, SESSION.model_copy(update={"session": "7-2", "parent": "7-1"})],
            page_tokens=64, pages=2, shared_pages=1, bytes=8192,
        ),
        "delete_session": None,
        "step_session": t.StepReply(session="7-1", length=3, output=X, ran=RAN),
        "step_sessions": t.StepsReply(
            steps=[
                t.StepReply(session="7-1", length=3, output=X, ran=RAN),
                t.StepProblem(session="7-2", reason="evicted", **SessionGone("it is gone").to_problem()),
            ]
        ),
        "get_session_cache": t.SessionCache(
            session="7-1", version="abc", length=3, past_key=X[None], past_value=X[None]
        ),
        **dict.fromkeys(
            ("open_session", "get_session", "fork_session", "truncate_session", "reorder_session", "put_session_cache"),
            SESSION,
        ),
    }.get(operation.name, INFO)  # fmt: skip


def operation_of(request: httpx.Request) -> Operation[Any]:
    """Return the operation that a request is for; of two paths that fit, the one with fewer names in it."""
    parts = request.url.raw_path.decode().partition("?")[0].split("/")
    fitting = [
        operation
        for operation in OPERATIONS
        if operation.method == request.method
        and len(names := operation.path.split("/")) == len(parts)
        and all(name == part or name.startswith("{") for name, part in zip(names, parts, strict=True))
    ]
    return min(fitting, key=lambda operation: operation.path.count("{"))


class Played:
    """A service that first gives the answers of ``first`` (an exception is raised), and then what was asked for."""

    def __init__(self, *first: httpx.Response | Exception) -> None:
        self.first = list(first)
        self.requests: list[httpx.Request] = []
        self.payload: Any = None
        self.transport = httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.first:
            answer = self.first.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)  # one to use up
        operation = operation_of(request)
        if operation.request is not None and operation.method != "GET":
            self.payload = from_body(operation.request, request.content, request.headers["content-type"], "request")
        reply = reply_to(operation, self.payload)
        if reply is None:
            return httpx.Response(operation.status)
        media_type = request.headers["accept"]
        if media_type in PICTURES:
            return httpx.Response(200, content=f"drawn as {media_type}", headers={"content-type": media_type})
        body = b"".join(to_body(reply, media_type, "reply", getattr(self.payload, "encoding", "list")))
        return httpx.Response(operation.status, content=body, headers={"content-type": media_type})


def both(kind: str, url: str, ask: Callable[[Any], Any], **options: Any) -> Any:
    """Return what ``ask``, a function of a client, gives with one of the two clients.

    A coroutine function takes the calls of both by ``reply_of``.
    """

    async def awaited() -> Any:
        async with AsyncClient(url, **options) as client:
            return await ask(client)

    if kind == "async":
        return asyncio.run(awaited())
    with Client(url, **options) as client:
        found = ask(client)
        return asyncio.run(found) if inspect.iscoroutine(found) else found


async def reply_of(made: Any) -> Any:
    """Return the reply to a call of either client."""
    return await made if inspect.isawaitable(made) else made


def ask(kind: str, played: Played, operation: str, *args: Any, **kwargs: Any) -> Any:
    """Return the reply of the played service that one of the two clients gives."""
    options = {name: kwargs.pop(name) for name in ("timeout", "retries", "media_type", "headers") if name in kwargs}
    return both(
        kind,
        URL,
        lambda client: attrgetter(METHODS[operation])(client)(*args, **kwargs),
        transport=played.transport,
        **options,
    )


def call_of(operation, *args, **kwargs):
    """Return the call that the method of an operation makes, without sending it."""

    class Unsent(Client):
        def send(self, call):
            return call

    with Unsent(URL) as client:
        return attrgetter(METHODS[operation])(client)(*args, **kwargs)
