#!/bin/sh
# The mean of 4,096 numbers of 100 in float16 is infinite to the reference of the onnx package, and 100 to ONNX
#   Runtime and to NumPy.
#
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: The reference evaluator is NumPy, whose mean of float16 adds up in float32: 100 from both.
# Behaviour: The reference of ReduceMean adds up in float16, and the sum, 409,600, is beyond 65,504. A runtime that
#   is right fails a comparison with the reference. ReduceSum overflows in both, as it must.
# Output:
#   ReduceMean 100.0 inf
#   ReduceSum inf inf
#   numpy 100.0
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import warnings

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")
HUNDREDS = np.full((1, 4096), 100, np.float16)
for operator in ("ReduceMean", "ReduceSum"):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in (("x", [1, 4096]), ("y", None))]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], keepdims=0)], "one", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    show(operator, *(float(run(None, {"x": HUNDREDS})[0].item()) for run in (session.run, ReferenceEvaluator(model).run)))
show("numpy", float(HUNDREDS.mean()))
CODE
cat > expected.txt <<'OUTPUT'
ReduceMean 100.0 inf
ReduceSum inf inf
numpy 100.0
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
