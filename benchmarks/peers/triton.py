"""Triton from the wheel ``nvidia-pytriton``: its C++ server and its Python backend, without the wheel's wrapper.

``python -m benchmarks.peers.triton WEIGHTS PORT THREADS`` lays out a model repository beside the weights and becomes
the server.
"""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytriton

MODEL = "attention"
CONFIG = """
name: "{model}"
backend: "python"
max_batch_size: 64
input [ {{ name: "query", data_type: TYPE_FP32, dims: [{length}, {width}] }} ]
output [ {{ name: "output", data_type: TYPE_FP32, dims: [{length}, {width}] }} ]
instance_group [ {{ kind: KIND_CPU, count: 1 }} ]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
parameters {{ key: "weights", value: {{ string_value: "{weights}" }} }}
parameters {{ key: "threads", value: {{ string_value: "{threads}" }} }}
"""
"""To wait for a fuller batch costs each request that time wherever fewer come at once."""


def main(weights: str, port: str, threads: str) -> None:
    """Become the server."""
    home = Path(pytriton.__file__).parent / "tritonserver"
    folder = Path(weights).parent / "triton"
    shutil.rmtree(folder, ignore_errors=True)
    models, backends = folder / "models", folder / "backends"
    version, backend = models / MODEL / "1", backends / "python"
    version.mkdir(parents=True)
    backend.mkdir(parents=True)
    with np.load(weights) as file:
        _, length, width = file["shape"]
    config = CONFIG.format(model=MODEL, length=length, width=width, weights=weights, threads=threads)
    (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").symlink_to(Path(__file__).with_name("triton_model.py"))
    stub = home / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in [*(home / "backends" / "python").glob("*.*"), stub / "triton_python_backend_stub"]:
        (backend / file.name).symlink_to(file)
    os.environ["LD_LIBRARY_PATH"] = str(home.parent.parent / "nvidia_pytriton.libs")
    # The backend's interpreter knows no PYTHONPATH; it takes the environment of the first python on PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {
        "model-repository": models, "backend-directory": backends, "http-port": port, "http-address": "127.0.0.1",
        "allow-grpc": "false", "allow-metrics": "false",
    }  # fmt: skip
    os.execv(home / "bin" / "tritonserver", ["tritonserver", *(f"--{name}={value}" for name, value in options.items())])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
