#!/bin/sh
# CTranslate2 takes an array in the other byte order and reads its bytes as they lie: 1.5 becomes 6.9e-41.
#
# Versions: ctranslate2 4.8.5, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: StorageView.from_array converts an array of '>f4', or refuses it as it refuses float64, bool
#   and arrays that are not contiguous.
# Behaviour: It takes the bytes without a look at their order. Integers too: 1 becomes 16,777,216. Files of big-
#   endian formats (FITS, IDX, network protocols) come to NumPy in this order.
# Output:
#   >f4 ['6.9e-41', '2.69e-43'] native: [1.5, -2.0]
#   >i4 ['1.68e+07', '3.36e+07'] native: [1, 2]
#   ValueError
#   ValueError
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import ctranslate2
import numpy as np

for numbers in (np.array([1.5, -2.0], ">f4"), np.array([1, 2], ">i4")):
    found = np.array(ctranslate2.StorageView.from_array(numbers))
    native = np.array(ctranslate2.StorageView.from_array(numbers.astype(numbers.dtype.newbyteorder("="))))
    show(numbers.dtype.str, [f"{x:.3g}" for x in found.tolist()], "native:", native.tolist())
for refused in (np.ones(2), np.ones((2, 3), np.float32).T):
    try:
        ctranslate2.StorageView.from_array(refused)
        show("taken")
    except ValueError as error:
        show(type(error).__name__)
CODE
cat > expected.txt <<'OUTPUT'
>f4 ['6.9e-41', '2.69e-43'] native: [1.5, -2.0]
>i4 ['1.68e+07', '3.36e+07'] native: [1, 2]
ValueError
ValueError
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
