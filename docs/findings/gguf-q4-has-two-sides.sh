#!/bin/sh
# Q4_0 of GGUF keeps one of −1 and 1 exactly and makes 0.875 of the other; Q4_1 has no zero.
#
# Versions: gguf 0.19.0, numpy 2.4.6; Python 3.11 on x86-64.
# Guess, written first: Four bits are rounded to the nearest of 16 even steps: the error is half a step at most, the
#   negated numbers are the negated result, and 0 stays 0.
# Behaviour: Q4_0 has the steps -8 to 7, and its scale makes the number of largest magnitude (the first of equals)
#   the step -8. A number of the other sign and the same size is cut at 7, a whole step off. Q4_1 divides from the
#   smallest to the largest number of a block into 15 steps, and 0 is none of them in general: padding and pruned
#   weights become small numbers.
# Output:
#   Q4_0 of 1, -1, 0, 0: [1.0, -0.875, 0.0, 0.0]
#   Q4_0 of -1, 1, 0, 0: [-1.0, 0.875, 0.0, 0.0]
#   Q4_1 of 1, -0.4, 0, 0: [1.0, -0.4000000059604645, -0.027000000700354576, -0.027000000700354576]
#   Q8_0 of 1, -0.4, 0, 0: [1.0, -0.4020000100135803, 0.0, 0.0]
# Exits 0 if it is so, 1 if it has changed, 2 if the packages cannot be installed.
set -u
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install --quiet gguf==0.19.0 numpy==2.4.6 || exit 2
cd "$folder" && cat > found.py <<'CODE'
def show(*told):
    """Print what was found on one line."""
    print(*told)

import numpy as np
from gguf import GGMLQuantizationType, quants

block = np.zeros((1, 32), np.float32)
block[0, :2] = 1, -1
zeros = np.zeros((1, 32), np.float32)
zeros[0, :2] = 1, -0.4


def kept(numbers, kind):
    """Return the first four numbers of a block after quantization."""
    kind = GGMLQuantizationType[kind]
    return (quants.dequantize(quants.quantize(numbers, kind), kind)[0, :4] + 0.0).round(3).tolist()


show("Q4_0 of 1, -1, 0, 0:", kept(block, "Q4_0"))
show("Q4_0 of -1, 1, 0, 0:", kept(-block, "Q4_0"))
show("Q4_1 of 1, -0.4, 0, 0:", kept(zeros, "Q4_1"))
show("Q8_0 of 1, -0.4, 0, 0:", kept(zeros, "Q8_0"))
CODE
cat > expected.txt <<'OUTPUT'
Q4_0 of 1, -1, 0, 0: [1.0, -0.875, 0.0, 0.0]
Q4_0 of -1, 1, 0, 0: [-1.0, 0.875, 0.0, 0.0]
Q4_1 of 1, -0.4, 0, 0: [1.0, -0.4000000059604645, -0.027000000700354576, -0.027000000700354576]
Q8_0 of 1, -0.4, 0, 0: [1.0, -0.4020000100135803, 0.0, 0.0]
OUTPUT
venv/bin/python found.py > found.txt && diff expected.txt found.txt || exit 1
