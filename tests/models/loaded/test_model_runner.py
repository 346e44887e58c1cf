"""Each point of a model, read, kept, replaced, added to and edited by its runner, and by plain hooks of PyTorch."""

import copy
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device, near
from tools.models_walk.model_types import built, processor_of

from attention_contract.schemas.attention import Edit
from attention_service.models.inputs.input_stacks import Tokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import ON_HOST, WHOLE, Predictions, Reading, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask, OwnTexts
from attention_service.models.passes.points import EMBEDDINGS
from attention_service.models.passes.shared_layers import Resumed

KINDS = (
    "gpt2", "llama", "gpt_oss", "mixtral", "bert", "albert", "fsmt", "xlnet", "t5", "bart", "mamba", "lfm2", "bloom",
    "opt", "vit",
)  # fmt: skip
"""Among them states that are time first, or of all texts one behind the other, layers that share a module, two stacks,
experts, running states, images."""
ALTERED = ("input_ids", "decoder_input_ids", "pixel_values")
NAMES = ("before", "hidden", "mlp", "output", "embeddings")
MLPS = {
    "gpt2": "mlp", "llama": "mlp", "gpt_oss": "mlp", "mixtral": "mlp", "bert": "output.dense",
    "albert": "albert_layers.0.ffn_output", "fsmt": "fc2", "xlnet": "ff.layer_2", "bart": "fc2",
    "t5": "layer.2.DenseReluDense layer.1.DenseReluDense", "lfm2": "feed_forward", "bloom": "mlp.dense_4h_to_h",
    "opt": "fc2", "vit": "mlp",
}  # fmt: skip
"""The modules whose output a layer adds last, by the code of transformers; mamba has none."""
TEXTS = 2


@cache
def loaded(kind):
    model = copy.deepcopy(built(kind)).requires_grad_(False)
    return LoadedModel(kind, model, tokenizer(), device(), processor_of(model))


def inputs(kind):
    """Two unlike texts of one length, or two images."""
    given = loaded(kind).reader.short_runs()[0]
    return {name: torch.cat([x, x.flip(-1) if name in ALTERED else x]) for name, x in given.items()}


def points(kind):
    """The points of every layer, each with its place."""
    for place in loaded(kind).all_places:
        for name in NAMES:
            if loaded(kind).runner.refuses((place.key, name), "read") is None:
                yield (place.key, name), place


def mlp_of(kind, place):
    """The module whose output a layer adds last."""
    modules = dict(place.layer.named_modules())
    return next(modules[path] for path in MLPS[kind].split() if path in modules)


def result(output):
    return next(x for x in output.values() if isinstance(x, torch.Tensor))


def first(output):
    return output[0] if isinstance(output, tuple | list) else output


@contextmanager
def plain_hook(kind, place, name, change):
    """Call ``change`` with the state ``[B, L, width]`` at a point by a hook of PyTorch; it may return another."""
    module = {"output": place.module, "embeddings": place.first_layer}.get(name, place.layer)
    module = mlp_of(kind, place) if name == "mlp" else module
    wanted, calls = 0 if name == "embeddings" else place.turn, []

    def changed(state):
        calls.append(None)
        if len(calls) - 1 != wanted:
            return None
        if state.ndim == 2:
            new = change(state.view(TEXTS, -1, state.shape[-1]))
            return None if new is None else new.view(state.shape)
        turned = state.shape[0] != TEXTS
        new = change(state.transpose(0, 1) if turned else state)
        return new if new is None or not turned else new.transpose(0, 1)

    def given(_, args, options):
        if args:
            new = changed(args[0])
            return None if new is None else ((new, *args[1:]), options)
        new = changed(options["hidden_states"])
        return None if new is None else (args, options | {"hidden_states": new})

    def made(_, __, output):
        new = changed(first(output))
        if new is None:
            return None
        return type(output)([new, *output[1:]]) if isinstance(output, tuple | list) else new

    if name in {"before", "embeddings"}:
        handle = module.register_forward_pre_hook(given, with_kwargs=True)
    else:
        handle = module.register_forward_hook(made)
    try:
        yield
    finally:
        handle.remove()


def plainly(kind, hooks):
    """The result of a run with plain hooks."""
    with ExitStack() as stack:
        for place, name, change in hooks:
            stack.enter_context(plain_hook(kind, place, name, change))
        return result(loaded(kind).run(inputs(kind), AttentionPass({})))


def run(kind, **spec):
    """A run that makes the logits of every token."""
    reader, given = loaded(kind).reader, inputs(kind)
    if "logits_to_keep" in reader.names:
        ids = given["input_ids"]
        stack = reader.batch([Tokens(row, [None] * len(row)) for row in ids.tolist()])
        spec |= {"logits": Predictions([[*range(ids.shape[1])]] * TEXTS, stack)}
    return loaded(kind).runner.run(given, RunSpec(**spec))


@pytest.mark.sampled(kind=7)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_are_read_as_hooks_see_them(kind):
    seen, found = {}, dict(points(kind))
    plainly(kind, [
        (place, point[1], lambda state, point=point: seen.update({point: state.clone()}))
        for point, place in found.items()
    ])  # fmt: skip
    at = run(kind, read=dict.fromkeys(found, WHOLE)).at
    assert at.keys() == seen.keys() == found.keys()
    for point, state in at.items():
        near(state, seen[point])
        assert state.shape[0] == TEXTS
    point = next(iter(at))
    chosen = run(kind, read={point: Reading([[1, 0], [0, 2]])}).at[point]
    if seen[point].ndim == 3:
        near(chosen, torch.stack([seen[point][0, [1, 0]], seen[point][1, [0, 2]]]))
    near(run(kind, read={point: ON_HOST}).at[point], seen[point].cpu())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_has_an_mlp_or_the_reason(kind):
    has = {point[0] for point, _ in points(kind) if point[1] == "mlp"}
    assert has == ({place.key for place in loaded(kind).all_places} if kind in MLPS else set())


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_kept_in_the_graph_of_the_output(kind):
    found, nodes = dict(points(kind)), {}
    names = [point for point in found if point[1] in {"hidden", "mlp", "output"}]

    def node(point):
        def keep(state):
            nodes[point] = state if state.requires_grad else state.detach().requires_grad_()
            return nodes[point].clone()

        return keep

    with torch.enable_grad():
        kept = run(kind, keep=[EMBEDDINGS, *names])
        weights = torch.linspace(-1, 1, result(kept.output).numel()).view(result(kept.output).shape)
        own = torch.autograd.grad((result(kept.output) * weights).sum(), [kept.at[point] for point in names])
        output = plainly(kind, [(found[point], point[1], node(point)) for point in names])
        expected = torch.autograd.grad((output * weights).sum(), [nodes[point] for point in names])
    for one, other in zip(own, expected, strict=True):
        near(one, other, 1e-4)


@pytest.mark.sampled(kind=7)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_are_replaced_and_added_to(kind):
    ends = (loaded(kind).all_places[0], loaded(kind).all_places[-1])
    found = {point: place for point, place in points(kind) if place in ends}
    at = run(kind, read=dict.fromkeys(found, WHOLE)).at
    plain = result(run(kind).output)
    for point, place in found.items():
        change = torch.randn(at[point].shape, generator=torch.Generator().manual_seed(1))
        replaced = result(run(kind, put={point: change}).output)
        near(replaced, plainly(kind, [(place, point[1], lambda _, change=change: change)]))
        assert not torch.allclose(replaced, plain)
        added = result(run(kind, add={point: change}).output)
        near(added, plainly(kind, [(place, point[1], lambda state, change=change: state + change)]))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_outputs_are_edited_before_they_are_read(kind):
    outputs = {point: place for point, place in points(kind) if point[1] == "output"}
    (layer, _), place = [*outputs.items()][-1]
    edit = Edit(tap="output", queries=[1], scale=-3.0)

    def change(state):
        state = state.clone()
        state[:, 1] *= -3.0
        return state

    def attention_pass():
        return AttentionPass({layer: LayerTask(edits=[edit])})

    edited = run(kind, attention_pass=attention_pass(), read={(layer, "output"): WHOLE})
    before = run(kind, read={(layer, "output"): WHOLE}).at[layer, "output"]
    near(result(edited.output), plainly(kind, [(place, "output", change)]))
    near(edited.at[layer, "output"], change(before))
    near(
        run(kind, attention_pass=attention_pass(), keep=[(layer, "output")]).at[layer, "output"].detach(),
        change(before),
    )


@pytest.mark.parametrize("name", ["mlp", "hidden"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_are_edited_before_they_are_read(kind, name):
    states = {point: place for point, place in points(kind) if point[1] == name}
    if not states:
        assert kind == "mamba"
        return
    (layer, _), place = next(iter(states.items()))
    assert loaded(kind).runner.refuses((layer, name), "edit") is None
    value = torch.linspace(-1, 1, loaded(kind).points.width(layer))
    edits = [Edit(tap=name, queries=[1], scale=-3.0), Edit(tap=name, queries=[2], value=value.numpy())]

    def change(state):
        state = state.clone()
        state[:, 1] *= -3.0
        state[:, 2] = value
        return state

    def attention_pass():
        return AttentionPass({layer: LayerTask(edits=edits)})

    edited = run(kind, attention_pass=attention_pass(), read={(layer, name): WHOLE})
    before = run(kind, read={(layer, name): WHOLE}).at[layer, name]
    output = plainly(kind, [(place, name, change)])
    near(result(edited.output), output, 1e-6 * max(1.0, float(output.abs().max())))
    near(edited.at[layer, name], change(before))
    assert not torch.allclose(result(edited.output), result(run(kind).output))
    if loaded(kind).attention.way == "computed":
        own = OwnTexts(slice(1, 2), slice(None), attention_pass())
        one = result(run(kind, attention_pass=AttentionPass({}, [own])).output)
        near(one[0], result(run(kind).output)[0])
        near(one[1], output[1])


@pytest.mark.parametrize("kind", ["llama", "bloom", "xlnet", "mamba"])
@torch.no_grad()
def test_tasks_of_some_texts_are_honoured_or_refused(kind):
    """By a model whose attention is computed they change these texts alone; by another they are an error."""
    place = loaded(kind).all_places[-1]
    tap = "context" if place.taps is None or "context" in place.taps else "weights"
    edit = LayerTask(edits=[Edit(tap=tap, scale=0.5)])
    second = OwnTexts(slice(1, 2), slice(None), AttentionPass({place.key: edit}))
    attention_pass = AttentionPass({}, [second])
    if loaded(kind).attention.way == "observed" or place.mixes != "attention":
        with pytest.raises(TypeError, match="by themselves"):
            run(kind, attention_pass=attention_pass)
        return
    plain, both = result(run(kind).output), result(run(kind, attention_pass=AttentionPass({place.key: edit})).output)
    found = result(run(kind, attention_pass=attention_pass).output)
    near(found[0], plain[0])
    near(found[1], both[1])
    assert not torch.allclose(found[1], plain[1])


@torch.no_grad()
def test_a_run_begins_at_a_layer_with_states_that_were_kept():
    kept = run("llama", keeps_layers=True)
    found = run("llama", resumed=Resumed(kept.layers, 1))
    near(result(found.output), result(kept.output))
    given = kept.layers.before[1] * 2
    doubled = run("llama", resumed=Resumed(kept.layers, 1, states=given))
    point = loaded("llama").all_places[1].key, "before"
    near(result(doubled.output), result(run("llama", put={point: given}).output))


def test_a_point_that_there_is_not_is_an_error():
    with pytest.raises(KeyError):
        run("llama", read={(7, "hidden"): WHOLE})
    with pytest.raises(KeyError, match="adds nothing beside its attention"):
        run("mamba", read={(0, "mlp"): WHOLE})


@pytest.mark.parametrize(
    ("kind", "point", "use", "reason"),
    [
        ("llama", (0, "scores"), "read", None),
        ("llama", (0, "before"), "put", None),
        ("llama", (0, "gate"), "edit", "no gate that is seen"),
        ("llama", EMBEDDINGS, "keep", None),
        ("bloom", (0, "scores"), "read", "the model computes this attention itself"),
        ("mamba", (0, "q"), "keep", "a running state, which has no q"),
        ("mamba", (0, "context"), "edit", None),
        ("mamba", (0, "mlp"), "edit", "adds nothing beside its attention, so it has no mlp"),
        ("llama", (0, "mlp"), "generate", None),
        ("bert", (0, "hidden"), "edit", None),
        ("swin", ("attention.0", "hidden"), "edit", "no single state of each token"),
        ("mamba", (0, "mlp"), "read", "adds nothing beside its attention, so it has no mlp"),
        ("mamba", (0, "context"), "generate", "not edited while tokens are generated"),
        ("mamba", (0, "weights"), "report", "not made token by token"),
        ("llama", (0, "weights"), "report", None),
    ],
)
def test_a_use_of_a_point_is_refused_with_the_reason(kind, point, use, reason):
    found = loaded(kind).runner.refuses(point, use)
    assert found is None if reason is None else reason in found
