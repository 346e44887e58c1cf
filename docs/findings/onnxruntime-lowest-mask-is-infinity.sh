#!/bin/sh
# Attention of ONNX Runtime reads the lowest finite number of a float mask as minus infinity: a row full of it is 0,
#   and a row full of the next number the mean.
#
# Versions: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: With the lowest number of float16, -65504, in attn_mask for hidden keys, ONNX Runtime and the
#   reference evaluator of the onnx package agree within rounding.
# Behaviour: They agree up to the number before the lowest: it is added, and a row full of it is the mean of the
#   values. For the lowest itself (numpy.finfo(...).min, with which exported models hide) ONNX Runtime gives 0, in
#   float32 too, and also where minus infinity stands beside it. The reference adds it like any other. So a row that
#   is all padding differs between the two. Below, the first number is ONNX Runtime's and the second the reference's.
# Output:
#   float32 every key -1e4: 1.5 1.5
#   float32 every key next to the lowest: 1.5 1.5
#   float32 every key the lowest: 0.0 1.5
#   float32 lowest, one minus infinity: 0.0 1.0
#   float32 every key minus infinity: 0.0 0.0
#   float16 every key -1e4: 1.5 1.5
#   float16 every key next to the lowest: 1.5 1.5
#   float16 every key the lowest: 0.0 1.5
#   float16 lowest, one minus infinity: 0.0 1.0
#   float16 every key minus infinity: 0.0 0.0
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
from onnx import helper
from onnx.reference import ReferenceEvaluator


def both(mask):
    """Return the output for one query, four keys and the values 0, 1, 2, 3: of ONNX Runtime and of the reference."""
    kind = helper.np_dtype_to_tensor_dtype(mask.dtype)
    inputs = {name: np.zeros((1, 1, length, 8), mask.dtype) for name, length in (("q", 1), ("k", 4), ("v", 4))}
    inputs["v"] += np.arange(4, dtype=mask.dtype)[:, None]
    inputs["mask"] = mask[None]
    types = [helper.make_tensor_value_info(name, kind, array.shape) for name, array in inputs.items()]
    node = helper.make_node("Attention", list(inputs), ["y"])
    graph = helper.make_graph([node], "one", types, [helper.make_tensor_value_info("y", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [round(float(run(None, inputs)[0][0, 0, 0, 0]), 3) for run in (session.run, ReferenceEvaluator(model).run)]


for kind in (np.float32, np.float16):
    lowest = np.finfo(kind).min
    for name, mask in (
        ("every key -1e4", [-1e4] * 4),
        ("every key next to the lowest", [np.nextafter(lowest, kind(0))] * 4),
        ("every key the lowest", [lowest] * 4),
        ("lowest, one minus infinity", [lowest] * 3 + [-np.inf]),
        ("every key minus infinity", [-np.inf] * 4),
    ):
        show(np.dtype(kind).name, f"{name}:", *both(np.array(mask, kind)))
CODE
cat > expected.txt <<'OUTPUT'
float32 every key -1e4: 1.5 1.5
float32 every key next to the lowest: 1.5 1.5
float32 every key the lowest: 0.0 1.5
float32 lowest, one minus infinity: 0.0 1.0
float32 every key minus infinity: 0.0 0.0
float16 every key -1e4: 1.5 1.5
float16 every key next to the lowest: 1.5 1.5
float16 every key the lowest: 0.0 1.5
float16 lowest, one minus infinity: 0.0 1.0
float16 every key minus infinity: 0.0 0.0
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
