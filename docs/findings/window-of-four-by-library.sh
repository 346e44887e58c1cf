#!/bin/sh
# A causal window of 4 is 4 keys in ONNX Runtime, 5 in JAX, and 5 to 8 by position in local-attention.
#
# Versions: onnxruntime 1.32.0, onnx 1.23.2, jax 0.10.2, local-attention 1.11.2, torch 2.13.0, numpy 2.4.6; Python
#   3.11 on x86-64.
# Guess, written first: A query of a causal window of 4 sees 4 keys, itself among them, as in the configurations of
#   models with a sliding window.
# Behaviour: GroupQueryAttention of ONNX Runtime (local_window_size) does. dot_product_attention of JAX
#   (local_window_size) counts the 4 before the query, and itself. LocalAttention (window_size, with its look_backward
#   of 1) cuts the text in blocks of 4 and shows a query its own block and the one before, which is 5 to 8 keys; with
#   exact_windowsize it is 5.
# Output:
#   JAX                             [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
#   ONNX Runtime                    [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
#   local-attention, exact: False   [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
#   local-attention, exact: True    [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 jax==0.10.2 local-attention==1.11.2 torch==2.13.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
import jax
import numpy as np
import onnxruntime
import torch
from local_attention import LocalAttention
from onnx import TensorProto, helper

TOKENS, WINDOW = 12, 4
values = np.zeros((1, TOKENS, 1, 16), np.float32)
values[0, range(TOKENS), 0, range(TOKENS)] = 1  # the output is a row of the weights


def show(*found):
    """Print what was found on one line."""
    print(*found)


def seen(name, output):
    """Show how many keys each query looked at. ``output``: [..., tokens, 16]."""
    show(f"{name:31}", (np.asarray(output).reshape(TOKENS, 16) > 0).sum(-1).tolist())


scores = np.zeros_like(values)
seen("JAX", jax.nn.dot_product_attention(scores, scores, values, is_causal=True, local_window_size=WINDOW))

heads = {"num_heads": 1, "kv_num_heads": 1, "local_window_size": WINDOW}
names, ends = ["query", "key", "value", "past_key", "past_value", "last", "total"], ["output", "keys", "seen"]
node = helper.make_node("GroupQueryAttention", names, ends, domain="com.microsoft", **heads)
past = np.zeros((1, 1, 0, 16), np.float32)
flat = [each.reshape(1, TOKENS, 16) for each in (scores, scores, values)]
inputs = dict(zip(names, [*flat, past, past, np.array([TOKENS - 1], np.int32), np.array([TOKENS], np.int32)]))
graph = helper.make_graph(
    [node], "window",
    [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) for name, each in inputs.items()],
    [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ends],
)
opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
seen("ONNX Runtime", onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, inputs)[0])

tensors = [torch.from_numpy(each.reshape(1, TOKENS, 16)) for each in (scores, scores, values)]
for exact in (False, True):
    local = LocalAttention(window_size=WINDOW, causal=True, exact_windowsize=exact, use_rotary_pos_emb=False)
    seen(f"local-attention, exact: {exact}", local(*tensors))
CODE
cat > expected.txt <<'OUTPUT'
JAX                             [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
ONNX Runtime                    [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
local-attention, exact: False   [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
local-attention, exact: True    [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
