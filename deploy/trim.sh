#!/bin/sh
# Remove files that only a compiler or torch's tests use from an environment: a sixth of the CPU image.
set -eu
cd "$1"/lib/python3*/site-packages
rm -rf torch/include torch/test torch/bin/*test* torch/bin/*Test* torch/bin/protoc*
