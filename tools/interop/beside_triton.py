"""Raw requests of the protocol to this server and to Triton: ``python -m tools.interop.beside_triton``.

Triton is the program inside of the package nvidia-pytriton 0.7, which is installed into ``.cache/triton``. Exits with 1
if an answer differs in more than the document says: its status, its error, or the outputs' form.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.api.processes import process

from tools.interop.environment import ROOT
from tools.interop.raw_requests import RawRequest, raw_requests

ENVIRONMENT = ROOT / ".cache" / "triton"
CONFIG = """
name: "demo"
backend: "python"
input [ {name: "query" data_type: TYPE_FP32 dims: [-1, 8]} ]
input [ {name: "key" data_type: TYPE_FP32 dims: [-1, 8] optional: true} ]
output [ {name: "output" data_type: TYPE_FP32 dims: [-1, 8]} ]
instance_group [ {kind: KIND_CPU} ]
"""
MODEL = """
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [utils.get_input_tensor_by_name(each, "query").to_dlpack() for each in requests]
        return [utils.InferenceResponse([utils.Tensor.from_dlpack("output", each)]) for each in inputs]
"""


def main() -> int:
    """Ask both, and print what differs, beside the document."""
    listed = documented()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        models, triton = Path(folder) / "modules", Triton(Path(folder))
        stack.callback(triton.stop)
        models.mkdir()
        _, ours = stack.enter_context(process(models, "--oip", "true", "--log-level", "error"))
        made = {"name": "demo", "config": {"d_model": 8, "num_heads": 2}}
        assert httpx.post(f"{ours}/v1/modules", json=made).status_code == 201
        found = {each.name: (answer(ours, each), triton.answer(each)) for each in raw_requests()}
    differ = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    for name, (our, their) in differ.items():
        print(f"{name}: here {our}, Triton {their}{'' if name in listed else '   NOT IN THE DOCUMENT'}")
    print(f"{len(found)} requests, {len(differ)} differ, {len(listed - differ.keys())} of the document do not")
    return int(set(differ) != listed)


def documented() -> set[str]:
    """The requests whose answers differ, by the table of the document."""
    section = (ROOT / "docs" / "agents.md").read_text("utf-8").partition("## Beside Triton")[2]
    return {name for cell in re.findall(r"^\| (.+?) \| ", section, re.MULTILINE)[1:] for name in cell.split("; ")}


def answer(url: str, request: RawRequest) -> tuple[Any, ...]:
    """The status of an answer, and the form of its outputs if it has some; of a refusal, whether it has an error."""
    came = httpx.request(request.method, url + request.path, content=request.body, headers=request.headers, timeout=30)
    length = int(came.headers.get("inference-header-content-length", len(came.content)))
    try:
        reply = json.loads(came.content[:length])
    except ValueError:
        reply = None
    if came.status_code != 200:
        return came.status_code, "error" if isinstance(reply, dict) and isinstance(
            reply.get("error"), str
        ) else "no error"
    if isinstance(reply, dict) and "outputs" in reply and "model_name" in reply:
        forms = [
            (each["name"], each["datatype"], each["shape"], sorted({"data", "parameters"} & each.keys()))
            for each in reply["outputs"]
        ]
        return 200, reply["model_name"], reply["model_version"], reply.get("id"), str(forms)
    return (200,)


class Triton:
    """Triton with the model ``demo``. It is started again when a request has ended it."""

    def __init__(self, folder: Path) -> None:
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        packages = ENVIRONMENT / "lib" / f"python{python}" / "site-packages"
        if not packages.exists():
            subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
            pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "nvidia-pytriton==0.7.*"], check=True)
        server, stub = packages / "pytriton" / "tritonserver", "triton_python_backend_stub"
        backend, model = folder / "backends" / "python", folder / "models" / "demo"
        shutil.copytree(server / "backends" / "python", backend)
        shutil.copy(server / "python_backend_stubs" / python / stub, backend / stub)
        (backend / stub).chmod(0o755)
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG)
        (model / "1" / "model.py").write_text(MODEL)
        libraries = f"{packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
        self._environment = os.environ | {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(packages)}
        self._command = [
            server / "bin" / "tritonserver", "--model-repository", folder / "models", "--backend-directory",
            folder / "backends", "--http-address", "127.0.0.1", "--allow-grpc", "false", "--allow-metrics", "false",
            "--model-control-mode", "explicit", "--load-model", "demo", "--exit-timeout-secs", "3",
        ]  # fmt: skip
        self._log = folder / "log"
        self._start()

    def answer(self, request: RawRequest) -> tuple[Any, ...]:
        """Its answer to a request."""
        try:
            return answer(self._url, request)
        except httpx.TransportError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            return ("no answer",)
        self._start()
        return ("no answer, and it ended",)

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with self._log.open("wb") as log:
            command = [*self._command, "--http-port", str(port)]
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self._url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self._url}/v2/models/demo/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise RuntimeError(self._log.read_text("utf-8", "replace")[-2000:])

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
