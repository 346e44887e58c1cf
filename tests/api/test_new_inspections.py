"""A new statistic touches two product files, and a new inspection operation nine: a copy of the product gets both.

The operation, ``received``, is the weight that each key gets from all queries. It is bound, planned, batched by tiles,
asked over HTTP of a module and of raw attention, by the client and by the command.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CONTRACT, CLIENT, SERVICE = "client/attention_contract", "client/attention_client", "service/attention_service"

STATISTIC = {
    f"{CONTRACT}/schemas/weights.py": [
        ('"received", "pairs",\n', '"last_key", '),
        (
            "    classes: IfRequested[dict[str, FloatArray]] = ABSENT\n",
            '    last_key: IfRequested[FloatArray] = ABSENT\n    """The share of the last key."""\n',
        ),
    ],
    f"{SERVICE}/core/inspection/statistics.py": [
        (
            "@_register\ndef sink_share(",
            '@_register\ndef last_key(tile: WeightTile) -> Tensor:\n    """Share the last key gets."""\n'
            "    keys = tile.weights.shape[-1]\n"
            "    return tile.share_of(torch.arange(keys, device=tile.weights.device) == keys - 1)\n\n\n",
        ),
    ],
}
"""By file, pieces of text and the places before which they go."""

OPERATION = {
    f"{CONTRACT}/schemas/received.py": '''
"""Attention received by each key. Notation as in ``attention``."""

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.schemas.attention import AttentionInputs, Edit, Ran, RawInputs
from attention_contract.tensors import FloatArray


class ReceivedRequest(AttentionInputs):
    """Ask for the weight that each key receives."""

    edits: Listed[Edit] = Field(default_factory=list, max_length=256)
    """The weights are those after these edits."""


class RawReceivedRequest(RawInputs, ReceivedRequest):
    """Ask for the weight that each key of raw attention receives."""


class ReceivedReply(WireModel):
    """The weight that each key receives."""

    received: FloatArray
    """``[B, H, Lk]``: the sum of its weights over the queries."""
    ran: Ran
''',
    f"{CONTRACT}/schemas/costs/accuracy.py": [('    "forward", "weights", "attribution",', '    "received",\n')],
    f"{CONTRACT}/operations.py": [
        (
            "ReplyT = TypeVar(",
            "from attention_contract.schemas.received import RawReceivedRequest, ReceivedReply, ReceivedRequest\n",
        ),
        (
            "OPERATIONS: Final[",
            """received = Operation(
    "received", "POST", "/v1/modules/{name}/received", ReceivedRequest, ReceivedReply,
    "The weight that each key receives from all queries",
    (*READS_BODY, *OF_MODULE, errors.KernelUnsuitable), tensors=True, example=_QUERY, scopes=ASK,
)
raw_received = Operation(
    "raw_received", "POST", "/v1/attention/received", RawReceivedRequest, ReceivedReply,
    "The weight that each key of raw attention receives from all queries",
    (*READS_BODY, errors.KernelUnsuitable), tensors=True, example=EXAMPLE_INPUTS, scopes=ASK,
)

""",
        ),
    ],
    f"{SERVICE}/core/inspection/received.py": '''
"""Weight received by each key."""

from collections.abc import Sequence

from torch import Tensor

from attention_service.core.blocks import some_of, placed_tiles
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.weights import weights_of
from attention_service.core.problem import Problem, Selection


def received(problem: Problem, edits: Sequence[BoundEdit] = ()) -> Tensor:
    """Sum the weights of each key over the queries: ``[B, H, K]``, tile by tile."""
    batch, heads, _, _ = problem.q.shape
    found = problem.q.new_zeros(batch, heads, problem.k.shape[2])
    for tile, of_heads, _ in some_of(problem.q, placed_tiles(problem, Selection())):
        found[:, of_heads] += weights_of(problem, tile, edits).sum(2)
    return found
''',
    f"{SERVICE}/runtime/operations/received.py": '''
"""Weight received by each key of one attention."""

from dataclasses import dataclass

import torch

from attention_contract.schemas.received import ReceivedRequest
from attention_service.core.inspection.received import received
from attention_service.core.kernels import Kernel, Needs
from attention_service.core.slices import phase
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.binding.selection import check_edits, check_tap
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import compute
from attention_service.runtime.planning.planner import PlanKey, Rehearsed, edit_sizes, plan_request
from attention_service.runtime.scheduling.jobs import Job, Prepared, job_of_request
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded


def prepare(module: Module | None, request: ReceivedRequest, device: Device, room: int) -> Job:
    """Bind and plan one request. Raises an InvalidRequest that names the field at fault."""
    return job_of_request(_planned, bind(module, request), request, device, room)


def _planned(bound: BoundRequest, request: ReceivedRequest, device: Device, room: int) -> Prepared:
    check_tap("weights", bound.spec, "spec.method")
    check_edits(request.edits, bound)
    question = PlanKey(
        "received", kernel=request.kernel, needs=Needs(edits=bool(request.edits)), asks=(edit_sizes(request.edits),)
    )

    def operation(bound: BoundRequest, kernel: str | Kernel = "") -> Receiving:
        return Receiving(bound, request)

    plan = plan_request(bound, question, device, room, Rehearsed(operation))
    return Prepared("received", plan, bound.dtype, device.torch, operation)


@dataclass(eq=False, slots=True)
class Receiving(DeviceOperation):
    """The weight that each key of one request receives."""

    bound: BoundRequest
    request: ReceivedRequest

    def upload(self, device: torch.device) -> Uploaded:
        """Copy the inputs to the device."""
        return compute.upload(self.bound, device, self.request.edits)

    def launch(self, uploaded: Uploaded) -> Results:
        """Sum the weights tile by tile."""
        phase("project", "roles")
        problem = compute.problem(self.bound, uploaded.tensors, uploaded.parameters)
        uploaded.tensors.clear()
        phase("sums", "weights")
        return {"received": compute.in_reply(received(problem, uploaded.edits), self.bound, "weights")}
''',
    f"{SERVICE}/runtime/operations/questions.py": [
        ('    "attribution": (attribution.prepare', '    "received": (received.prepare, ReceivedReply),\n'),
        (
            "\nQUESTIONS: Final",
            "from attention_contract.schemas.received import ReceivedReply\n"
            "from attention_service.runtime.operations import received\n",
        ),
    ],
    f"{CLIENT}/calls/question_calls.py": [
        (
            "    @method\n    def attribution(",
            '''    @method
    def received(self, name: str, query: TensorLike, **options: Unpack[CallOptions]) -> Call[ReceivedReply]:
        """Return the weight that each key receives ``[B, H, Lk]``."""
        return call(operations.received, locals())

''',
        ),
        (
            "from attention_contract.schemas.weights import WeightsReply\n",
            "from attention_contract.schemas.received import ReceivedReply\n",
        ),
    ],
    f"{CLIENT}/cli/commands/command_table.py": [
        (
            '    "complexity": RequestCommand(',
            '    "received": RequestCommand(\n        "received", operations.received, operations.raw_received, '
            'chief="received"\n    ),\n',
        ),
    ],
    f"{CLIENT}/cli/command_index.py": [
        (
            '        "effects": CommandEntry(',
            '        "received": CommandEntry(REQUEST, "The weight that each key receives."),\n',
        ),
    ],
}
"""By file, its text if it is a new one, otherwise as above."""

ASK = """
import json, sys
from pathlib import Path

import httpx
import numpy as np

import attention_client, attention_service
from attention_client import Client
from attention_client.cli import app
from tests.conftest import live_server
from typer.testing import CliRunner

folder = Path(sys.argv[1])
assert all(Path(each.__file__).is_relative_to(folder) for each in (attention_client, attention_service))
query = np.load(folder / "query.npy")
with live_server(folder / "models") as url, Client(url, timeout=120) as client:
    client.modules.create("m", {"d_model": 8, "num_heads": 2}, seed=0)
    weights = client.weights("m", query, statistics=["last_key", "entropy"])
    found = {
        "weights": weights.weights, "last_key": weights.statistics.last_key,
        "received": client.received("m", query).received,
        "edited": client.received("m", query, edits=[{"tap": "weights", "heads": [1], "set": 0}]).received,
    }
    raw = {name: query[:, None].tolist() for name in ("query", "key", "value")}
    ask = httpx.Client(base_url=url + "/v1", timeout=120)
    found["raw"] = ask.post("/attention/received", json=raw).raise_for_status().json()["received"]
    found["raw_weights"] = ask.post("/attention/weights", json=raw).raise_for_status().json()["weights"]
    shown = CliRunner().invoke(app, ["--url", url, "received", "m", str(folder / "query.npy"), "--json"])
    assert shown.exit_code == 0, shown.output
    found["shown"] = json.loads(shown.stdout)["received"]
    wrong = {"query": query.tolist(), "edits": [{"tap": "q", "heads": [7], "set": 0}]}
    found["refused"] = ask.post("/modules/m/received", json=wrong).json()["param"]
plain = {name: np.asarray(x).tolist() if name != "refused" else x for name, x in found.items()}
(folder / "found.json").write_text(json.dumps(plain))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The answers of a server, a client and a command of a copy of the product with both additions."""
    folder = tmp_path_factory.mktemp("product")
    for part in ("client", "service"):
        shutil.copytree(ROOT / part, folder / part)  # with the bytecode of the files that stay as they are
    for file, change in [*STATISTIC.items(), *OPERATION.items()]:
        path = folder / file
        assert path.exists() == isinstance(change, list), file
        if isinstance(change, str):
            path.write_text(change)
            continue
        for place, piece in change:
            text = path.read_text()
            assert text.count(place) == 1, (file, place)
            path.write_text(text.replace(place, piece + place))
    np.save(folder / "query.npy", np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32))
    places = os.pathsep.join([str(folder / "client"), str(folder / "service"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", ASK, str(folder)], cwd=folder, env=os.environ | {"PYTHONPATH": places},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_a_statistic_is_its_field_and_its_formula(found):
    assert len(STATISTIC) <= 2
    np.testing.assert_allclose(found["last_key"], np.array(found["weights"])[..., -1].mean(-1), atol=1e-6)


@pytest.mark.slow
def test_an_inspection_operation_touches_nine_files(found):
    assert len(OPERATION) <= 9
    received = np.array(found["weights"]).sum(2)
    np.testing.assert_allclose(found["received"], received, atol=1e-5)
    np.testing.assert_allclose(found["shown"], received, atol=1e-5)
    np.testing.assert_allclose(found["edited"], received * np.array([1, 0])[:, None], atol=1e-5)
    np.testing.assert_allclose(found["raw"], np.array(found["raw_weights"]).sum(2), atol=1e-5)
    assert found["refused"] == "edits.0.heads"
