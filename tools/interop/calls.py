"""The calls of tritonclient and of KServe's client, each with the status that it must have.

``python calls.py URL SPECS DOCUMENT`` runs in the environment of the clients, which has nothing of this project.
``SPECS``: a JSON file with a spec a name. ``DOCUMENT``: the page whose block that names tritonclient is run.
"""

import asyncio
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import tritonclient.http as blocking
import tritonclient.http.aio as awaited
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from tritonclient.utils import InferenceServerException

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 8)
CONFIG = json.dumps({"config": {"d_model": 8, "num_heads": 2}, "seed": 4})
BITS = {"float32": np.float32, "float64": np.float64, "int64": np.int64, "bool": np.bool_}


def sent(binary=True, name="query", x=X, datatype="FP32"):
    return [blocking.InferInput(name, [*x.shape], datatype).set_data_from_numpy(x, binary_data=binary)]


def requested_outputs(*names, binary=True):
    return [blocking.InferRequestedOutput(name, binary_data=binary) for name in names]


def half():
    x = X.astype(ml_dtypes.bfloat16)
    return sent(x=x, datatype="BF16")


def shared():
    made = blocking.InferInput("query", [1, 3, 8], "FP32")
    made.set_shared_memory("region", 96)
    return [made]


def region():
    made = blocking.InferRequestedOutput("output")
    made.set_shared_memory("region", 96)
    return [made]


def calls():
    """Each call: its name, arguments, named arguments, and what it must give: a status, or a flag."""
    infer = "infer"
    yield "is_server_live", (), {}, True
    yield "is_server_ready", (), {}, True
    yield "get_server_metadata", (), {}, 200
    for name in ("demo", "demo:weights", "demo:gradients", "_attention", "_attention:weights", "_attention:gradients"):
        yield "is_model_ready", (name,), {}, True
        yield "get_model_metadata", (name,), {}, 200
        yield "get_model_config", (name,), {}, 200
        yield "get_inference_statistics", (name,), {}, 200
        yield infer, (name, sent()), {}, 200
        yield infer, (name, sent(binary=False)), {}, 200
    for version, ready in (("", True), ("1", True), ("2", False), ("nothing", False)):
        yield "is_model_ready", ("demo", version), {}, ready
    for name in ("nobody", "demo:nothing", "a b"):
        yield "is_model_ready", (name,), {}, False
        for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
            yield method, (name,), {}, 404
        yield infer, (name, sent()), {}, 404
    yield "get_model_metadata", ("demo", "1"), {}, 200
    yield "get_model_metadata", ("demo", "2"), {}, 404
    yield "get_model_config", ("demo", "1"), {}, 200
    yield "get_inference_statistics", (), {}, 200
    yield "get_inference_statistics", ("demo", "1"), {}, 200
    yield "get_model_repository_index", (), {}, 200
    yield "load_model", ("fresh",), {"config": CONFIG}, 200
    yield "is_model_ready", ("fresh",), {}, True
    yield "load_model", ("fresh",), {}, 200
    yield infer, ("fresh", sent()), {}, 200
    yield "unload_model", ("fresh",), {"unload_dependents": True}, 200
    yield "is_model_ready", ("fresh",), {}, False
    yield "unload_model", ("fresh",), {}, 404
    yield "unload_model", ("demo",), {}, 409
    yield "load_model", ("nobody",), {}, 404
    yield "load_model", ("fresh",), {"config": "{"}, 400
    yield "load_model", ("fresh",), {"config": CONFIG, "files": {"file:1/model.onnx": b"x"}}, 400
    yield infer, ("demo", sent()), {"model_version": "1"}, 200
    yield infer, ("demo", sent()), {"model_version": "2"}, 404
    yield infer, ("demo", sent()), {"request_id": "a", "priority": 2, "timeout": 60_000_000}, 200
    yield infer, ("demo", sent()), {"timeout": -1}, 400
    yield infer, ("demo", sent()), {"sequence_id": 3, "sequence_start": True}, 501
    yield (
        infer,
        ("demo", sent()),
        {"parameters": {"average_heads": True}, "outputs": requested_outputs("weights", "output")},
        200,
    )
    yield infer, ("demo", sent()), {"parameters": {"edits": '[{"tap": "weights", "set": 0}]'}}, 200
    yield infer, ("demo", sent()), {"parameters": {"colour": 1}}, 400
    yield infer, ("demo", sent()), {"outputs": requested_outputs("output", binary=False)}, 200
    yield infer, ("demo", sent()), {"outputs": requested_outputs("nothing")}, 400
    yield infer, ("demo", sent()), {"outputs": [blocking.InferRequestedOutput("output", class_count=2)]}, 400
    yield infer, ("demo", sent()), {"outputs": region()}, 501
    yield infer, ("demo", shared()), {}, 501
    yield infer, ("demo", sent(name="quary")), {}, 400
    yield infer, ("demo", []), {}, 400
    yield infer, ("demo", half()), {}, 200
    yield infer, ("demo:gradients", sent()), {"outputs": requested_outputs("gradients.query", "weights")}, 200
    yield (
        infer,
        ("demo:weights", sent()),
        {"outputs": requested_outputs("statistics.entropy", "top.keys"), "parameters": {"top_k": 2}},
        200,
    )
    for coding in ("gzip", "deflate"):
        compressed = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        yield infer, ("demo", sent()), compressed, 200
    yield "get_trace_settings", (), {}, 501
    yield "get_trace_settings", ("demo",), {}, 501
    yield "update_trace_settings", (), {"settings": {"trace_level": ["OFF"]}}, 501
    yield "get_log_settings", (), {}, 501
    yield "update_log_settings", ({"log_info": True},), {}, 501
    yield "get_system_shared_memory_status", (), {}, 501
    yield "register_system_shared_memory", ("a", "/a", 96), {}, 501
    yield "unregister_system_shared_memory", (), {}, 501
    yield "get_cuda_shared_memory_status", (), {}, 501
    yield "register_cuda_shared_memory", ("a", "eA==", 0, 96), {}, 501
    yield "unregister_cuda_shared_memory", ("a",), {}, 501


def case_name(name, arguments, options):
    return f"{name}{arguments[:1] if arguments else '()'} {sorted(options)}"


def check(came, expected, case):
    assert came == expected, f"{case}: {came}, expected {expected}"


def by_blocking(address):
    with blocking.InferenceServerClient(address) as client:
        for name, arguments, options, expected in calls():
            try:
                came = getattr(client, name)(*arguments, **options)
                came = came if isinstance(expected, bool) else 200
            except InferenceServerException as fault:
                came = int(fault.status())
            check(came, expected, case_name(name, arguments, options))
        waiting = [client.async_infer("demo", sent()) for _ in range(4)]
        outputs = [each.get_result().as_numpy("output").tobytes() for each in waiting]
        assert len(set(outputs)) == 1
    return len([*calls()])


async def by_awaited(address):
    async with awaited.InferenceServerClient(address) as client:
        for name, arguments, options, expected in calls():
            try:
                came = await getattr(client, name)(*arguments, **options)
                came = came if isinstance(expected, bool) else 200
            except InferenceServerException as fault:
                came = int(fault.status())
            check(came, expected, case_name(name, arguments, options))
    return len([*calls()])


async def by_kserve(url):
    """KServe's client: health, readiness, and inference with JSON, binary and half-precision tensors."""
    count = 0
    client = InferenceRESTClient(RESTConfig(protocol="v2"))

    async def infer(model, x, datatype, binary, outputs=None, parameters=None):
        made = InferInput("query", [*x.shape], datatype)
        made.set_data_from_numpy(x, binary_data=binary)
        request = InferRequest(model, [made], parameters=parameters, request_outputs=outputs)
        return await client.infer(url, request, model_name=model)

    assert await client.is_server_live(url) is True
    assert await client.is_server_ready(url) is True
    for model, ready in (("demo", True), ("demo:weights", True), ("nobody", False)):
        assert await client.is_model_ready(url, model) is ready
    expected = None
    for binary in (False, True):
        for wanted in (None, [RequestedOutput("output", {"binary_data": True})], [RequestedOutput("output")]):
            reply = await infer("demo", X, "FP32", binary, wanted)
            output = reply.get_output_by_name("output").as_numpy()
            expected = output if expected is None else expected
            assert output.tobytes() == expected.tobytes()
            count += 1
    whole = [RequestedOutput("output", {"binary_data": True})]
    reply = await infer("demo", X.astype(np.float16), "FP16", True, whole)
    assert reply.get_output_by_name("output").as_numpy().dtype == np.float16
    await infer("demo:gradients", X, "FP32", True, None, {"wrt": '["query", "q_proj.weight"]'})
    for model, parameters, status in (
        ("nobody", None, 404),
        ("demo", {"colour": 1}, 400),
        ("demo", {"timeout": "5"}, 400),
    ):
        try:
            await infer(model, X, "FP32", True, None, parameters)
        except httpx.HTTPStatusError as fault:
            check(fault.response.status_code, status, (model, parameters))
            check(fault.response.json()["error"] in str(fault), True, str(fault))
        else:
            raise AssertionError((model, parameters))
    await client.close()
    return count + 10


def native(url, path, body):
    """The tensors of a native reply by dotted name, from base64."""
    answer = httpx.post(url + path, json=body | {"encoding": "base64"}, timeout=120)
    assert answer.status_code == 200, answer.text
    found = {}

    def walk(value, name):
        if isinstance(value, dict) and "base64" in value:
            raw = np.frombuffer(base64.b64decode(value["base64"]), BITS[value["dtype"]])
            found[name] = raw.reshape(value["shape"])
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else key)

    walk(answer.json(), "")
    return found


def equal_results(address, url, specs):
    """The outputs of every spec by tritonclient, beside those of the native request, bit by bit."""
    x = np.random.default_rng(0).standard_normal((2, 6, 16))
    query = {"dtype": "float64", "shape": [*x.shape], "base64": base64.b64encode(x.tobytes()).decode()}
    count = 0
    with blocking.InferenceServerClient(address) as client:
        for name, spec in specs.items():
            config = {
                "d_model": 16,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 4,
                "value_dim": 3,
                "dtype": "float64",
            }
            made = {"name": f"spec.{name}", "config": config | {"spec": spec}, "seed": 5}
            assert httpx.post(f"{url}/v1/modules", json=made, timeout=120).status_code == 201, name
            for question in ("forward", "weights", "gradients"):
                if question == "weights" and spec.get("method", {"name": "exact"})["name"] != "exact":
                    continue  # which has no weights, by either protocol
                model = made["name"] if question == "forward" else f"{made['name']}:{question}"
                reply = client.infer(model, sent(x=x, datatype="FP64"))
                beside = native(url, f"/v1/modules/{made['name']}/{question}", {"query": query})
                names = [each["name"] for each in reply.get_response()["outputs"]]
                assert set(names) == set(beside), (model, names)
                for each in names:
                    array = reply.as_numpy(each)
                    assert (array.dtype, array.shape) == (beside[each].dtype, beside[each].shape), (model, each)
                    assert array.tobytes() == beside[each].tobytes(), (model, each)
                    count += 1
    return count


def example(document, url):
    """The document's block that names tritonclient: it prints what its comments say."""
    (code,) = [
        each
        for each in re.findall(r"```text\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
        if "tritonclient" in each
    ]
    made = {"name": "tour", "config": {"d_model": 4, "num_heads": 2}, "seed": 0}
    assert httpx.post(f"{url}/v1/modules", json=made, timeout=60).status_code == 201
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("127.0.0.1:8000", url.removeprefix("http://")), {})  # noqa: S102
    expected = [line.partition("# ")[2] for line in code.splitlines() if line.startswith("print")]
    assert printed.getvalue().split("\n")[:-1] == expected, printed.getvalue()
    return len(expected)


def main(url, specs, document):
    address = url.removeprefix("http://")
    made = {"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 3}
    assert httpx.post(f"{url}/v1/modules", json=made, timeout=60).status_code == 201
    print(f"tritonclient.http: {by_blocking(address)} calls")
    print(f"tritonclient.http.aio: {asyncio.run(by_awaited(address))} calls")
    print(f"kserve.InferenceRESTClient: {asyncio.run(by_kserve(url))} calls")
    print(f"equal to native: {equal_results(address, url, json.loads(Path(specs).read_text()))} tensors")
    print(f"docs/agents.md: {example(Path(document), url)} lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
