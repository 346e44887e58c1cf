"""A float64 model computes in float64 throughout: it has the logits of plain float64 code, and nothing reads less."""

import copy
import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.models.passes import plain_models
from tests.models.passes.narrow_reads import narrow_reads
from tools.models_walk.model_types import built
from tools.models_walk.table_page import rows

from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.stream_search import find_stream
from attention_service.models.passes.float64_runs import Float64, compute_in_float64

IDS = [5, 3, 7, 8, 6, 4, 9, 10, 11]
PLAIN = {
    "llama": plain_models.llama, "qwen3": plain_models.llama, "gemma2": plain_models.gemma2, "gpt2": plain_models.gpt2,
    "bert": plain_models.bert, "mamba": plain_models.mamba, "xlstm": plain_models.xlstm,
}  # fmt: skip


@cache
def saved(kind, root):
    """Return a model that was loaded in float64 from a folder, its config, and the tensors of the folder."""
    folder = root / kind
    model = built(kind).double()
    model.save_pretrained(folder)
    loaded = LoadedModel.load(folder, dtype="float64", device=torch.device("cpu"), progress=lambda _: None)
    named = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    return loaded, model.config.to_dict(), plain_models.Tensors(named)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("float64")


def share(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("kind", PLAIN)
def test_logits_are_those_of_plain_float64_code(kind, root):
    loaded, config, tensors = saved(kind, root)
    reply = forward_reply(loaded, ModelForwardRequest(tokens=IDS, positions=[*range(len(IDS))], return_=["logits"]))
    assert share(reply.logits, PLAIN[kind](tensors, config, IDS)) <= 1e-12


def test_states_of_an_encoder_are_those_of_plain_float64_code(root):
    loaded, config, tensors = saved("t5", root)
    with torch.no_grad():
        states = loaded.model.get_encoder()(torch.tensor([IDS])).last_hidden_state[0]
    assert share(states, plain_models.t5_encoder(tensors, config, IDS)) <= 1e-12


def test_a_lens_computes_in_float64(root):
    loaded, config, tensors = saved("llama", root)
    plain, last = plain_models.llama(tensors, config, IDS), config["num_hidden_layers"] - 1
    request = ModelLensRequest(tokens=IDS, of=["hidden", "output", "heads"], positions=[-1], targets=[3, 4, 5])
    found = LensRun(loaded, plan_lens(loaded, request, find_stream(loaded), None)).reply()
    assert share(found.layers[last].hidden.targets[0], plain[-1, [3, 4, 5]]) <= 1e-12
    parts = sum(np.asarray(each.output.targets)[0] for each in found.layers)
    parts = parts + np.asarray(found.rest.embeddings)[0] + np.asarray(found.rest.mlps).reshape(-1, 3).sum(0)
    assert share(parts + np.asarray(found.rest.others)[0] + found.rest.unembedding, plain[-1, [3, 4, 5]]) <= 1e-12


@pytest.mark.sampled(kind=8)
@pytest.mark.parametrize("kind", [*PLAIN, "bloom", "mpt", "qwen3_next", "t5", "longformer", "vit", "clip", "whisper"])
def test_nothing_of_a_float64_model_reads_less(kind):
    assert narrow_reads(kind) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", rows("are whole**"))
def test_no_type_reads_less_in_float64(kind):
    assert narrow_reads(kind) == {}


def test_other_threads_and_models_keep_their_dtypes(root):
    loaded, _, _ = saved("llama", root)
    other, seen = torch.nn.Linear(2, 2), []
    with ThreadPoolExecutor(1) as pool:
        hook = loaded.model.lm_head.register_forward_hook(
            lambda *_: seen.append(pool.submit(lambda: other(torch.zeros(1, 2).float()).dtype).result())
        )
        forward_reply(loaded, ModelForwardRequest(tokens=IDS))
        hook.remove()
    assert seen == [torch.float32]
    assert torch.zeros(1).double().float().dtype == torch.float32


def test_a_model_keeps_its_signature_and_can_be_copied():
    model = built("gpt2").double()
    names = inspect.signature(model.forward)
    compute_in_float64(model)
    assert inspect.signature(model.forward) == names
    other, ids = copy.deepcopy(model), torch.tensor([IDS])
    with torch.no_grad():
        expected = model(ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(other(ids).logits, expected)
        assert not model(ids).logits.any()


THIRD = torch.tensor(1 / 3, dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1 / 3),
        lambda: torch.full((), 1 / 3, dtype=torch.float32),
        lambda: torch.ones(()) / 3,
        lambda: torch.tensor(1) / 3,
        lambda: torch.ones((), dtype=torch.float16) / 3,
        lambda: torch.where(torch.tensor(True), 1 / 3, 0.0),
        lambda: torch.ones((), dtype=torch.float64).float() / 3,
        lambda: torch.ones((), dtype=torch.float64).to(torch.bfloat16) / 3,
        lambda: torch.linspace(1 / 3, 1, 4)[0],
        lambda: torch.tensor(True) * (1 / 3),
    ],
)  # fmt: skip
def test_numbers_are_made_in_float64(make):
    with Float64():
        found = make()
    assert found.dtype == torch.float64
    assert abs(float(found - THIRD)) <= 1e-16


def test_what_says_what_bits_mean_is_left():
    bits = torch.tensor([1.5]).view(torch.int32)
    with Float64():
        assert bits.view(torch.float32).tolist() == [1.5]
        assert partial(torch.frombuffer, dtype=torch.float32)(bytearray(b"\0\0\xc0?")).tolist() == [1.5]
