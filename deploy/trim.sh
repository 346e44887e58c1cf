#!/bin/sh
# Take from an environment what only a compiler or torch's own tests use: a sixth of the CPU image.
set -eu
cd "$1"/lib/python3*/site-packages
rm -rf torch/include torch/test torch/bin/*test* torch/bin/*Test* torch/bin/protoc*
