#!/bin/sh
# Make an environment smaller that was installed without bytecode: a quarter of the CPU image.
# What only a compiler or a library's own tests use goes. Bytecode is made for what a server imports: of transformers'
# models it needs a few, and compiles those when they are loaded, in some 50 ms each. A file that does not compile is a
# library's template, as for pip.
set -eu
python=$1/bin/python
cd "$1"/lib/python3*/site-packages
rm -rf torch/include torch/test torch/bin/*test* torch/bin/*Test* torch/bin/protoc*
for library in matplotlib networkx numpy scipy sympy; do
    find $library -type d -name tests -prune -exec rm -rf {} +
done
"$python" -m compileall -q -x '^\./(networkx|scipy|setuptools|sympy|torchgen)/|/(_inductor/|models/(?!auto/|llama/|__init__))' . || true
