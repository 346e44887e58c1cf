#!/bin/sh
# ReduceMax and ArgMax of ONNX Runtime lose a NaN unless it comes first; its Max and TopK do not.
#
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: The largest of 1, NaN and 3 is NaN, as in NumPy and in the reference evaluator, so that NaN
#   in the scores shows in what is reduced from them.
# Behaviour: ReduceMax says 3 and ArgMax says index 2; of NaN, 1 and 3 they say NaN and 0. Max (elementwise) and
#   TopK of the same runtime keep every NaN. So a check of a model by its largest number depends on the place of the
#   NaN.
# Output:
#   [[1.0, nan, 3.0]]
#   ReduceMax [3.0] [nan]
#   ArgMax [2] [1]
#   [[nan, 1.0, 3.0]]
#   ReduceMax [nan] [nan]
#   ArgMax [0] [0]
#   Max [3.0, nan, 3.0] [3.0, nan, 3.0]
#   TopK [1] [1]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

NUMBERS = np.array([[1, np.nan, 3]], np.float32)


def both(operator, kind, inputs, outputs=("y",), **attributes):
    """Return the last output of ONNX Runtime and of the reference evaluator."""
    types = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()]
    results = [helper.make_tensor_value_info(outputs[-1], kind, None)]
    node = helper.make_node(operator, list(inputs), list(outputs), **attributes)
    graph = helper.make_graph([node], "one", types, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(run(None, inputs)[0]).ravel().tolist() for run in (session.run, ReferenceEvaluator(model).run)]


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
for numbers in (NUMBERS, NUMBERS[:, [1, 0, 2]]):
    show(numbers.tolist())
    show("ReduceMax", *both("ReduceMax", FLOAT, {"x": numbers}, keepdims=0))
    show("ArgMax", *both("ArgMax", INT64, {"x": numbers}, axis=1))
show("Max", *both("Max", FLOAT, {"x": NUMBERS, "z": NUMBERS[:, ::-1].copy()}))
show("TopK", *both("TopK", INT64, {"x": NUMBERS, "k": np.array([1])}, ("values", "indices")))
CODE
cat > expected.txt <<'OUTPUT'
[[1.0, nan, 3.0]]
ReduceMax [3.0] [nan]
ArgMax [2] [1]
[[nan, 1.0, 3.0]]
ReduceMax [nan] [nan]
ArgMax [0] [0]
Max [3.0, nan, 3.0] [3.0, nan, 3.0]
TopK [1] [1]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
