#!/bin/sh
# MLX reads a BF16 tensor of a GGUF file as float16: 100,000 becomes infinity, and 1e-8 becomes 0.
#
# Versions: mlx[cpu] 0.32.4, gguf 0.19.0; Python 3.11 on x86-64.
# Guess, written first: mx.load gives an array of bfloat16, as it does for BF16 in a safetensors file.
# Behaviour: It gives float16, which ends at 65,504. Numbers beyond it are infinite and small ones are 0, without a
#   warning. The same bits in a safetensors file stay bfloat16.
# Output:
#   gguf mlx.core.float16 [inf, 0.0, 3.0, 1.0]
#   safetensors mlx.core.bfloat16 [99840.0, 1.0011717677116394e-08, 3.0, 1.0]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet 'mlx[cpu]==0.32.4' gguf==0.19.0 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

numbers = np.array([[100_000.0, 1e-8, 3.0, 1.0] * 8], np.float32)
writer = GGUFWriter("model.gguf", "llama")
writer.add_tensor("x", quants.quantize(numbers, GGMLQuantizationType.BF16), raw_dtype=GGMLQuantizationType.BF16)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
of_gguf = mx.load("model.gguf")["x"]
mx.save_safetensors("model.safetensors", {"x": mx.array(numbers).astype(mx.bfloat16)})
of_safetensors = mx.load("model.safetensors")["x"]
show("gguf", of_gguf.dtype, of_gguf[0, :4].tolist())
show("safetensors", of_safetensors.dtype, of_safetensors[0, :4].tolist())
CODE
cat > expected.txt <<'OUTPUT'
gguf mlx.core.float16 [inf, 0.0, 3.0, 1.0]
safetensors mlx.core.bfloat16 [99840.0, 1.0011717677116394e-08, 3.0, 1.0]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
