#!/bin/sh
# A number too large for FP8 E4M3 is 448 to ONNX Runtime, infinity too, and NaN to ml_dtypes and JAX.
#
# Versions: onnxruntime 1.32.0, onnx 1.23.2, jax 0.10.2, ml_dtypes 0.6.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: Libraries agree on a cast of float32 to float8_e4m3fn, and infinity, which the type lacks,
#   becomes NaN everywhere.
# Behaviour: ONNX Runtime's Cast saturates by default: 470, 1e6 and infinity are 448. ml_dtypes and JAX give NaN for
#   all three. A model that is quantized by one and checked by the other differs at its outliers.
# Output:
#   onnxruntime [448.0, 448.0, 448.0, 448.0, 448.0]
#   ml_dtypes [448.0, 448.0, nan, nan, nan]
#   jax [448.0, 448.0, nan, nan, nan]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 jax==0.10.2 ml_dtypes==0.6.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

NUMBERS = np.array([448, 460, 470, 1e6, np.inf], np.float32)
cast = [
    helper.make_node("Cast", ["x"], ["small"], to=TensorProto.FLOAT8E4M3FN),
    helper.make_node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "xy"]
graph = helper.make_graph(cast, "cast", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
show("onnxruntime", session.run(None, {"x": NUMBERS})[0].tolist())
show("ml_dtypes", NUMBERS.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist())
show("jax", np.asarray(jnp.array(NUMBERS).astype(jnp.float8_e4m3fn).astype(jnp.float32)).tolist())
CODE
cat > expected.txt <<'OUTPUT'
onnxruntime [448.0, 448.0, 448.0, 448.0, 448.0]
ml_dtypes [448.0, 448.0, nan, nan, nan]
jax [448.0, 448.0, nan, nan, nan]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
