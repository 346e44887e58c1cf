"""Copies, pickles, threads, other processes and compiled models."""

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from torch import nn

from attention_client import Client
from attention_client.torch import RemoteMultiheadAttention, remote_attention
from attention_client.torch.connection import Connection


@pytest.fixture
def module(client):
    return RemoteMultiheadAttention(8, 2, batch_first=True, client=client)


def output(module):
    tokens = torch.ones(1, 3, 8).cumsum(1)
    return module(tokens, tokens, tokens)[0]


def test_a_deep_copy_has_parameters_of_its_own_and_the_same_connection(module):
    copied = copy.deepcopy(module)
    assert copied.connection is module.connection
    assert torch.equal(output(copied), output(module))
    nn.init.zeros_(copied.out_proj.weight)
    assert output(copied).abs().max() == 0
    assert output(module).abs().max() > 0


def test_a_pickle_holds_the_settings_and_connects_anew(module, server):
    with Client(server, timeout=7, headers={"x-own": "1"}, retries=1) as client:
        module.connection = Connection(client)
        layers = pickle.loads(pickle.dumps(nn.ModuleList([module, copy.deepcopy(module)])))  # noqa: S301
    first, second = (layer.connection for layer in layers)
    assert first is second
    made = first.client()
    assert made.settings == client.settings
    assert made.settings["headers"] == {"x-own": "1"}
    assert torch.equal(output(layers[0]), output(layers[1]))
    made.close()


def test_a_client_of_its_own_transport_stays_in_its_process(server):
    with Client(server, transport=httpx.HTTPTransport()) as client:
        module = RemoteMultiheadAttention(8, 2, client=client)
        output(module)
        with pytest.raises(TypeError, match="with http or transport"):
            pickle.dumps(module)


def test_a_url_or_the_environment_names_the_server(server, monkeypatch):
    query = torch.ones(1, 2, 3, 4)
    connection = Connection(server)
    expected = remote_attention(query, client=connection)
    connection.client().close()
    monkeypatch.setenv("ATTENTION_URL", server)
    connection = Connection()
    assert torch.equal(remote_attention(query, client=connection), expected)
    connection.client().close()


def test_threads_share_a_module(module):
    tokens = [torch.randn(1, 5, 8, requires_grad=True) for _ in range(8)]

    def gradient(x):
        found, *_ = torch.autograd.grad(module(x, x, x)[0].square().sum(), x)
        return found

    alone = [gradient(x) for x in tokens]
    with ThreadPoolExecutor(4) as threads:
        for expected, found in zip(alone, threads.map(gradient, tokens), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_connect_for_themselves(server, start):
    # A process of its own: this one may have threads of other libraries, which a fork would not survive.
    command = [sys.executable, "-m", "tests.client.torch.loading", server, start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
def test_a_compiled_model_breaks_its_graph_at_the_service(module):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.attention = nn.Linear(8, 8), module

        def forward(self, x):
            x = self.inner(x)
            return self.attention(x, x, x, need_weights=False)[0].relu()

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model, x = Model(), torch.randn(2, 3, 8)
    compiled = torch.compile(model, backend=backend)
    expected, found = model(x), compiled(x)
    torch.testing.assert_close(found, expected)
    assert len(graphs) > 1
    expected.sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    found.sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with pytest.raises(Exception, match="computed by a server"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
