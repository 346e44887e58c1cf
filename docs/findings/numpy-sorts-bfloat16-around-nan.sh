#!/bin/sh
# NumPy does not sort an array of bfloat16 that has a NaN: what it returns is in no order.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: np.sort puts NaN last and the other numbers in order, as for float16 and float32; np.unique
#   and np.median follow.
# Behaviour: Comparisons with NaN are false, and the sort of these types has no rule of its own for it: the numbers
#   before and after the NaN stay out of order. So are np.argsort, np.partition and np.unique, which keeps 1 twice.
#   The same array in JAX is sorted.
# Output:
#   float16 [1.0, 2.0, 3.0, nan] unique: [1.0, nan]
#   bfloat16 [3.0, nan, 1.0, 2.0] unique: [1.0, nan, 1.0]
#   float8_e5m2 [3.0, nan, 1.0, 2.0] unique: [1.0, nan, 1.0]
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

numbers = [3, np.nan, 2, 1]
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
    array = np.array(numbers, kind)
    show(array.dtype.name, np.sort(array).tolist(), "unique:", np.unique(np.array([1, np.nan, 1], kind)).tolist())
CODE
cat > expected.txt <<'OUTPUT'
float16 [1.0, 2.0, 3.0, nan] unique: [1.0, nan]
bfloat16 [3.0, nan, 1.0, 2.0] unique: [1.0, nan, 1.0]
float8_e5m2 [3.0, nan, 1.0, 2.0] unique: [1.0, nan, 1.0]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
