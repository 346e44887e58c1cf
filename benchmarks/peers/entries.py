"""The peers: how each is installed, started and asked, with the settings that served it best."""

import shutil
import sys
from collections.abc import Callable, Sequence

from benchmarks import forms
from benchmarks.contestants import Entry, Server, Setup
from benchmarks.forms import Form
from benchmarks.peers.environments import Environment

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin") or sys.executable
"""The wheel of Triton brings stubs that are linked to the library of the system's Python."""
TRITON = Environment("triton", ("nvidia-pytriton==0.7.0",), SYSTEM_PYTHON)
_V2 = (forms.v2_binary("attention"), forms.v2_json("attention"))
_ROUTES = (forms.raw("/raw"), forms.json_lists("/json"))
PEERS: tuple[tuple[str, Environment, str, str, tuple[Form, ...]], ...] = (
    ("Triton", TRITON, "triton", "/v2/health/ready", _V2),
    ("PyTriton", TRITON, "pytriton", "/v2/models/attention/ready", _V2),
    ("LitServe", Environment("litserve", ("litserve==0.2.19",)), "litserve", "/health", _ROUTES),
    ("MLServer", Environment("mlserver", ("mlserver==1.7.1",)), "mlserver", "/v2/health/ready", _V2[1:]),
    (
        "BentoML",
        Environment("bentoml", ("bentoml==1.4.39",)),
        "bentoml",
        "/livez",
        (forms.base64("/raw"), forms.json_lists("/json")),
    ),
    ("Ray Serve", Environment("ray", ("ray[serve]==2.60.0", "orjson")), "ray", "/-/healthz", _ROUTES),
    ("KServe", Environment("kserve", ("kserve==0.21.0",)), "kserve", "/v2/health/ready", _V2),
)
"""Name, environment, program of this folder, path that answers once it is ready, and the forms that it takes."""


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """The peers of these names, or all, in every form that they take."""
    return [
        Entry(name, Server(name, _command(environment, program), ready, peer=True), form)
        for name, environment, program, ready, forms_taken in PEERS
        if not names or name in names
        for form in forms_taken
    ]


def versions() -> str:
    """Return the installed versions."""
    return ", ".join(sorted({environment.packages[0] for _, environment, *_ in PEERS}))


def _command(environment: Environment, program: str) -> Callable[[Setup], list[str]]:
    def command(setup: Setup) -> list[str]:
        environment.install()
        module = f"benchmarks.peers.{program}"
        return [environment.python, "-m", module, str(setup.weights), str(setup.port), str(setup.threads)]

    return command
