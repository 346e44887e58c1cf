#!/bin/sh
# NumPy's sum of a thousand ones is 256 in bfloat16 and 16 in FP8, and 4 of twenty ones in int4; their product as
#   matrices is right.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: np.sum and np.mean add up in a wider type, or by pairs, as they do for float16 and int8:
#   1000, mean 1.
# Behaviour: They add one by one in the type itself. From 256 on, 1 is less than half a step of bfloat16, so the sum
#   stays; the mean is 0.256. int4 wraps around. The matrix product of the same ones is 1000, so a check by sums
#   disagrees with the numbers in use.
# Output:
#   float16 1000.0 1.0 matmul: 1000.0
#   bfloat16 256.0 0.256 matmul: 1000.0
#   float8_e4m3fn 16.0 0.016 matmul: 1000.0
#   int8 20 1.0
#   int4 4 0.0
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import ml_dtypes
import numpy as np

for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(1000, kind)
    show(np.dtype(kind).name, float(ones.sum()), round(float(ones.mean()), 3), "matmul:", float((ones[None] @ ones[:, None])[0, 0]))
for kind in (np.int8, ml_dtypes.int4):
    ones = np.ones(20, kind)
    show(np.dtype(kind).name, int(ones.sum()), float(ones.mean()))
CODE
cat > expected.txt <<'OUTPUT'
float16 1000.0 1.0 matmul: 1000.0
bfloat16 256.0 0.256 matmul: 1000.0
float8_e4m3fn 16.0 0.016 matmul: 1000.0
int8 20 1.0
int4 4 0.0
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
