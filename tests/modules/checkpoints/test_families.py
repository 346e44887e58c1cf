"""Every family of checkpoints: a tiny model of Transformers, saved, imported, and compared with its eager attention."""

import copy
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.modules.checkpoints.tiny_decoders import DECODERS
from tests.modules.checkpoints.tiny_encoders import ENCODERS
from tests.modules.checkpoints.tiny_models import TINY as OTHERS
from tests.modules.checkpoints.tiny_models import ModelOfTransformers, Tiny

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import ImportModule
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.modules.checkpoints.families import FAMILIES
from attention_service.modules.checkpoints.import_plan import plan
from attention_service.runtime.device.torch_device import Device

TINY = [*OTHERS, *DECODERS, *ENCODERS]
OUTPUT, WEIGHTS, GRADIENTS = 2e-5, 2e-6, 1e-4
"""Largest differences in float32; of gradients, relative to the largest of the block."""


@dataclass
class Captured:
    """A block's own inputs and results."""

    query: torch.Tensor
    key: torch.Tensor
    output: torch.Tensor
    weights: torch.Tensor


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def engine(run, root):
    torch.set_num_threads(1)
    engine = Engine(root, Device(torch.device("cpu"), "test", 2**32, Roofline(Rates(1e10, 1e10, 1e-5))))
    run(engine.start())
    yield engine
    run(engine.stop())


def saved(model, place):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(place)
        else:
            place.mkdir(exist_ok=True)
            save_file(model.state_dict(), place / "model.safetensors")


def built(tiny: Tiny):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.build().eval()
    for value in model.parameters():
        torch.nn.init.normal_(value.requires_grad_(), std=0.2)
    return model


def captured(model, tiny: Tiny) -> Captured:
    seen = {}

    def keep(name, place=0):
        return lambda _, args, kwargs, __: seen.__setitem__(name, (*args, *kwargs.values())[place])

    def detached(module, args, kwargs):
        """Cut the block off from what lies before it, so that shared parameters count in this block alone.

        Layers of torch ask for no weights: ask for them.
        """
        if isinstance(module, torch.nn.MultiheadAttention):
            kwargs |= {"need_weights": True, "average_attn_weights": False}
        if args:
            return (args[0].detach(), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, kwargs | {first: kwargs[first].detach()}

    def weights(_, __, result):
        found = [part for part in result if isinstance(part, torch.Tensor) and part.dim() == 4]
        seen["weights"] = tiny.dense(result) if tiny.dense else found[-1]

    def output(_, __, result):
        seen["output"] = result[0] if isinstance(result, tuple) else result

    hooks = [
        model.get_submodule(tiny.weights).register_forward_pre_hook(detached, with_kwargs=True),
        model.get_submodule(tiny.weights).register_forward_hook(weights),
        model.get_submodule(tiny.q).register_forward_hook(keep("query"), with_kwargs=True),
        model.get_submodule(tiny.k or tiny.q).register_forward_hook(
            keep("key", place=1 if tiny.k == tiny.q else 0), with_kwargs=True
        ),
        model.get_submodule(tiny.o).register_forward_hook(output),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**tiny.inputs)
    for hook in hooks:
        hook.remove()
    return Captured(**seen)


def numbers(tensor):
    return tensor.detach().numpy()


def close(found, expected, tolerance):
    np.testing.assert_allclose(found, numbers(expected), atol=tolerance, rtol=0)


def own_gradients(model, tiny, block, upstream, root, place):
    """The model's own gradients, cut as its parameters are: saved as a checkpoint, and read as one."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((block.output * upstream).sum(), parameters, allow_unused=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, gradient in zip(names, gradients, strict=True):
            value = other.get_parameter(name)
            value.zero_() if gradient is None else value.copy_(gradient)
    saved(other, root / place)
    return plan(root, ImportModule(checkpoint=place, **tiny.request)).read()


def compared(tiny: Tiny, run, engine, root, place: str) -> None:
    """Import a block of a tiny model and compare all that it answers."""
    model = built(tiny)
    saved(model, root / place)
    block = captured(model, tiny)
    info = run(engine.modules.import_checkpoint(ImportModule(checkpoint=place, name=place, **tiny.request)))
    assert info.source.family == tiny.family
    query = numbers(block.query)
    inputs = tiny.ask | {"query": query} | ({} if tiny.k is None else {"key": numbers(block.key)})
    reply = run(engine.forward(place, ForwardRequest(**inputs, **{"return": ["output", "weights"]})))
    close(reply.output, block.output, OUTPUT)
    close(reply.weights, block.weights, WEIGHTS)

    upstream = torch.randn(block.output.shape, generator=torch.Generator().manual_seed(2))
    request = GradientsRequest(**inputs, upstream=upstream.numpy(), wrt=["parameters"])
    gradients = run(engine.ask("gradients", place, request)).gradients
    expected = own_gradients(model, tiny, block, upstream, root, f"{place}-gradients")
    assert set(gradients) == set(expected)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], numbers(value), atol=GRADIENTS * largest, rtol=0, err_msg=name)

    if tiny.decodes:
        config = info.config
        past = {
            "past_key": np.zeros((len(query), config.num_kv_heads, 0, config.head_dim), np.float32),
            "past_value": np.zeros((len(query), config.num_kv_heads, 0, config.value_dim), np.float32),
        }
        parts = []
        for part in (query[:, :4], query[:, 4:5], query[:, 5:]):
            step = run(engine.forward(place, ForwardRequest(query=part, **past)))
            parts.append(step.output)
            past = {"past_key": step.present_key, "past_value": step.present_value}
        close(np.concatenate(parts, 1), block.output, OUTPUT)


def name_of(tiny: Tiny) -> str:
    return f"{tiny.family}-{tiny.label}" if tiny.label else tiny.family


FIRST = {tiny.family: tiny for tiny in reversed(TINY)}
"""The block of each family that every run compares."""


@pytest.mark.sampled(tiny=24)
@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(tiny, marks=() if tiny is FIRST[tiny.family] else pytest.mark.slow, id=name_of(tiny))
        for tiny in TINY
    ],
)
def test_a_block_gives_the_numbers_of_eager_attention(tiny, run, engine, root):
    compared(tiny, run, engine, root, name_of(tiny))


DECODERS_OF_TRANSFORMERS = [tiny for tiny in TINY if tiny.decodes and tiny.model_type not in {None, "mpt"}]


@pytest.mark.parametrize(
    "tiny",
    {(tiny.family, "sliding_window" in tiny.build.options and name_of(tiny)): tiny for tiny in DECODERS_OF_TRANSFORMERS}
    .values(),
    ids=name_of,
)  # fmt: skip
@pytest.mark.slow
def test_a_decoder_that_is_not_causal_by_its_config_gives_the_numbers_of_eager_attention(tiny, run, engine, root):
    """Transformers reads ``is_causal`` in the function that makes the masks of all families."""
    build = ModelOfTransformers(tiny.build.stem, tiny.build.options | {"is_causal": False})
    compared(replace(tiny, build=build, decodes=False), run, engine, root, f"{name_of(tiny)}-bidirectional")


def test_every_family_has_a_tiny_model():
    assert {tiny.family for tiny in TINY} == set(FAMILIES)
    assert len({name_of(tiny) for tiny in TINY}) == len(TINY)


def test_every_model_type_has_a_tiny_model():
    claimed = {(family.name, kind) for family in FAMILIES.values() for kind in family.model_types}
    assert {(tiny.family, tiny.model_type) for tiny in TINY if tiny.model_type is not None} == claimed
