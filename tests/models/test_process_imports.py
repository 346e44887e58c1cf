"""The process of a model leaves out modules that it does not need, and imports them if they are used after all."""

import subprocess
import sys

import pytest

BEGUN = """
import sys
from attention_service.models.process import __main__
import torch
from attention_service.models.process.unused_modules import _FINDER
"""
LOADED = """
from attention_service.models.process.served_model import warm
warm()
heavy = ["sympy.core", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "scipy.linalg"]
assert not sys.modules.keys() & heavy, sorted(sys.modules.keys() & heavy)
assert _FINDER.left_out[0] == "torch._dynamo", _FINDER.left_out
"""
COMPILER = """
import torch._dynamo.config
from torch._dynamo import disable
from torch._dynamo.exc import Unsupported
marked = disable(reason="none")(len)
assert marked is len and disable(len) is len
assert not isinstance(ValueError(), Unsupported)

class Own(Unsupported):
    pass

assert "torch._inductor" in sys.modules and "sympy.core" in sys.modules and _FINDER.left_out == []
assert isinstance(Own("x"), Unsupported) and issubclass(Own, torch._dynamo.exc.Unsupported)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""
SYMBOLS = """
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false, statically_known_true, sym_and, sym_eq
assert statically_known_true(True) is True and guard_or_false(sym_and(sym_eq((1, 2), (1, 2)), 3 == 4)) is False
assert ShapeEnv().create_unbacked_symint().node.expr.is_integer
assert "sympy.core" in sys.modules
"""
OPTIMUM = """
from scipy.optimize import linear_sum_assignment
from transformers.loss import loss_for_object_detection
assert _FINDER.left_out[0] == "torch._dynamo" and "scipy.linalg" not in sys.modules
assert loss_for_object_detection.linear_sum_assignment([[1, 0], [0, 1]])[1].tolist() == [1, 0]
assert "sympy.core" not in sys.modules
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [LOADED, *(pytest.param(code, marks=pytest.mark.slow) for code in (COMPILER, SYMBOLS, OPTIMUM))],
)
def test_a_module_is_left_out_until_it_is_used(code):
    ran = subprocess.run([sys.executable, "-c", BEGUN + code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
