"""The CPU image: small, and everything that the server answers works in it. Needs Docker and a built image.

``docker compose build`` makes the image. With ``EXTRAS=server,plot,transformers,mcp`` it has the tools for agents too.
"""

import json
import shutil
import subprocess
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from attention_client import Client
from tests.conftest import eventually

DOCKER = shutil.which("docker")
IMAGE = "attention-service:cpu"
LARGEST = 1.0e9
LOAD = """
import ctypes, os, pathlib, sysconfig, torch
libraries = [path for path in pathlib.Path(sysconfig.get_path("purelib")).rglob("*.so*") if path.is_file()]
print(len(libraries))
for path in libraries:
    try: ctypes.PyDLL(str(path))
    except OSError as fault: print(fault)
os.sys.stdout.flush()
os._exit(0)  # some do not expect to be loaded without their package
"""
SOURCES = """
import importlib.metadata
files = [file for file in importlib.metadata.files("transformers") if file.suffix == ".py"]
print(len(files), [str(file) for file in files if not file.locate().exists()])
"""
BYTECODE = """
import os, sys, sysconfig
import attention_service.__main__, attention_service.api.app, matplotlib.figure
import transformers.models.llama.modeling_llama
specs = [module.__spec__ for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
cached = [spec.cached for spec in specs if spec.cached and spec.cached.startswith(sysconfig.get_path("purelib"))]
print(len(cached), sum(not os.path.exists(path) for path in cached))
"""
TEXT = "Kate met Tamiro in the park. Then Tam"


def docker(*words):
    """Run a command of Docker and return what it prints. Raises AssertionError."""
    done = subprocess.run([DOCKER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_built():
    """Return True if there are an engine and the image."""
    command = ["docker", "image", "inspect", IMAGE]
    return (
        shutil.which("docker") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_built(), reason=f"needs Docker and the image {IMAGE}")]


@contextmanager
def container(*options):
    """The image as compose starts it: nothing but /data and /tmp can be written. Yields its name and its address."""
    hardened = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]  # noqa: S108
    name = docker("run", "--detach", "--publish", "127.0.0.1:0:8000", *hardened, *options, IMAGE)
    try:
        url = f"http://{docker('port', name, '8000/tcp').splitlines()[0]}"
        eventually(lambda: ready(url), seconds=120)
        yield name, url
    finally:
        docker("rm", "--force", "--volumes", name)


def ready(url):
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A container with a checkpoint, and the layer that the checkpoint was made from."""
    torch.manual_seed(0)
    original = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    root = tmp_path_factory.mktemp("data")
    (root / "mha").mkdir()
    save_file(original.state_dict(), root / "mha" / "model.safetensors")
    root.chmod(0o777)
    (root / "mha" / "model.safetensors").chmod(0o644)
    settings = {"REQUIRE_KEYS": "false", "ALLOWED_HOSTS": "*", "OIP": "true", "PRELOAD": "tiny"}
    if has("mcp"):
        settings["MCP"] = "true"
    environment = [word for name, value in settings.items() for word in ("--env", f"ATTENTION_{name}={value}")]
    with container("--volume", f"{root}:/data", *environment) as (_, url):
        yield url, original


@pytest.fixture
def client(served):
    with Client(served[0], timeout=120) as client:
        yield client


def python(code):
    """Run a program in the image and return what it prints."""
    return docker("run", "--rm", "--entrypoint", "python", IMAGE, "-c", code)


def has(package):
    """Return True if the image has a package."""
    return python(f"import importlib.util as u; print(u.find_spec({package!r}) is not None)") == "True"


def test_it_is_small():
    assert int(docker("image", "inspect", "--format", "{{.Size}}", IMAGE)) <= LARGEST


def test_every_library_can_be_loaded():
    """Symbol tables are stripped, which breaks libraries of some layouts."""
    found = python(LOAD).splitlines()
    assert found[1:] == []
    assert int(found[0]) > 100


def test_every_model_type_is_there_with_its_source():
    """A fault shows the lines of Python where it happened."""
    count, missing = python(SOURCES).split(maxsplit=1)
    assert int(count) > 2000
    assert missing == "[]"


def test_a_start_compiles_almost_nothing():
    count, compiled = map(int, python(BYTECODE).split())
    assert compiled < 0.02 * count
    assert count > 1000


def test_a_text_goes_through_the_model_that_it_brings(client):
    reply = client.models.forward("tiny", TEXT, return_=["weights"], top_k=1)
    assert reply.predictions[0].top[0].token == "ir"


@pytest.mark.parametrize(("kind", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_it_draws(client, kind, begins):
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 8))
    assert client.plot(kind).of(client.attention.weights, x, x).data.startswith(begins)


def test_it_finds_the_flow_over_two_layers(client):
    low, high = np.random.default_rng(0).dirichlet(np.ones(5), (2, 5))
    found = client.attention.rollout(np.stack([low, high])[:, None], method="flow", residual=0)
    by_way = np.minimum(high[:, :, None], low[None])  # a flow in two steps, through each token between
    np.testing.assert_allclose(found.values, by_way.sum(1), atol=1e-6)


def test_it_imports_a_layer_and_differentiates_it(served, client):
    _, original = served
    client.modules.import_("mha", num_heads=4, spec={"masks": [], "add_zero_attn": False})
    x = torch.randn(2, 5, 16, generator=torch.manual_seed(1), requires_grad=True)
    output, weights = original(x, x, x, average_attn_weights=False)
    output.sum().backward()
    reply = client.forward("mha.0", x.detach().numpy(), return_=["output", "weights"])
    np.testing.assert_allclose(reply.output, output.detach(), atol=1e-6)
    np.testing.assert_allclose(reply.weights, weights.detach(), atol=1e-6)
    found = client.gradients("mha.0", x.detach().numpy(), upstream=np.ones((2, 5, 16)))
    np.testing.assert_allclose(found.gradients["query"], x.grad, atol=1e-5)


def test_the_open_inference_protocol_gives_the_same_numbers(served, client):
    client.modules.create("tour", {"d_model": 4, "num_heads": 2}, seed=0)
    query = np.eye(4, dtype=np.float32)[:2]
    tensor = {"name": "query", "shape": [2, 4], "datatype": "FP32", "data": query.ravel().tolist()}
    reply = httpx.post(f"{served[0]}/v2/models/tour/infer", json={"inputs": [tensor]}).raise_for_status().json()
    native = client.forward("tour", query).output
    assert np.array(reply["outputs"][0]["data"], np.float32).tolist() == native.ravel().tolist()


async def test_agents_find_its_tools(served):
    if not has("mcp"):
        pytest.skip("the image has not the extra mcp")
    import mcp

    async with mcp.Client(f"{served[0]}/mcp") as client:
        opened = await client.call_tool("open_input", {"text": TEXT, "model": "tiny"})
        tools, summary = len((await client.list_tools()).tools), opened.structured_content["summary"]
    assert tools == 8
    assert "predicts 'ir'" in summary


def test_sigterm_ends_it_in_order():
    with container("--env", "ATTENTION_REQUIRE_KEYS=false") as (name, _):
        docker("stop", "--time", "30", name)
        assert json.loads(docker("inspect", "--format", "{{json .State}}", name))["ExitCode"] == 0
