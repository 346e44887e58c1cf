#!/bin/sh
# Install the pinned torch into an environment, in the build that fits the machine.
#
#   deploy/install_torch.sh PYTHON [BUILD [OPTION...]]
#
#   BUILD  auto            the build for this machine's NVIDIA driver, or the CPU build without one (default)
#          cpu cu130 ...   that build
#          index           the package index's build: on Linux, it installs several GB of CUDA packages
#   OPTION more options of pip, such as --no-compile; uv never compiles ahead
#
# For auto and cpu, a local wheel from pip's find-links (configuration or PIP_FIND_LINKS) has priority.
# TORCH_INDEX_URL, the address of an index with the build, overrides BUILD. Other builds come from PyTorch's own
# indexes, which uv knows. Without uv on PATH, the script installs uv temporarily.
set -eu
python=$1
build=${2:-auto}
if [ $# -gt 2 ]; then shift 2; else set --; fi
options=$*
pin=$(grep '^torch==' "$(dirname "$0")/../constraints.txt")
[ "$build" = auto ] && [ "$(uname)" != Linux ] && build=index

if command -v uv >/dev/null; then
    install="uv pip install --quiet --python $python --no-deps"
    links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
    UV_FIND_LINKS=${UV_FIND_LINKS:-$(echo $links | tr ' ' ',')}
    export UV_FIND_LINKS
else
    install="$python -m pip install --quiet --disable-pip-version-check --no-deps $options"
fi

if [ -n "${TORCH_INDEX_URL:-}" ]; then
    exec $install --index-url "$TORCH_INDEX_URL" "$pin"
fi
case $build in
    index) exec $install "$pin" ;;
    auto | cpu) if $install --no-index "$pin" 2>/dev/null; then exit; fi ;;
esac

borrowed=
if ! command -v uv >/dev/null; then
    borrowed=$(mktemp -d)
    trap 'rm -rf "$borrowed"' EXIT
    "$python" -m pip install --quiet --target "$borrowed" uv
    PATH=$borrowed/bin:$PATH
fi
uv pip install --quiet --python "$python" --no-deps --torch-backend "$build" "$pin" || {
    echo "The $build build of $pin is not available. Set TORCH_INDEX_URL to the address of an index with it," >&2
    echo "or use the package index's build with TORCH=index (on Linux: several GB of CUDA packages)." >&2
    exit 1
}
