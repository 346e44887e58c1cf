#!/bin/sh
# np.save and h5py store an array of bfloat16 without an error and give raw bytes back, also with ml_dtypes
#   imported.
#
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, h5py 3.16.0; Python 3.11 on x86-64.
# Guess, written first: The file keeps the type, or the writer refuses it; np.load in a process with ml_dtypes
#   returns bfloat16. pickle does.
# Behaviour: Both write the type as two bytes without a meaning: np.load returns |V2, with which no arithmetic
#   works, and which of bfloat16, float16 and int16 it was is lost. FP8 becomes |V1. A view with the right type
#   brings the numbers back.
# Output:
#   bfloat16 |V2 |V2 bfloat16 [1.0, 1.0]
#   float8_e4m3fn |V1 |V1 float8_e4m3fn [1.0, 1.0]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6 h5py==3.16.0 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import pickle

import h5py
import ml_dtypes
import numpy as np

for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(2, kind)
    np.save("ones.npy", ones)
    with h5py.File("ones.h5", "w") as file:
        file["ones"] = ones
    with h5py.File("ones.h5") as file:
        of_h5py = file["ones"][:]
    loaded = np.load("ones.npy")
    show(ones.dtype, loaded.dtype, of_h5py.dtype, pickle.loads(pickle.dumps(ones)).dtype, loaded.view(kind).tolist())
CODE
cat > expected.txt <<'OUTPUT'
bfloat16 |V2 |V2 bfloat16 [1.0, 1.0]
float8_e4m3fn |V1 |V1 float8_e4m3fn [1.0, 1.0]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
