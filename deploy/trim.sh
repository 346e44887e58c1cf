#!/bin/sh
# Make an environment smaller that was installed without bytecode, and compile what a server imports.
#
#   deploy/trim.sh FOLDER
#
# Only what no server uses goes: pip, the C sources and tests of libraries, and, where `strip` is on PATH, the symbol
# tables of compiled code, which serve a debugger. Other modules of Python stay.
set -eu
python=$1/bin/python
"$python" -m pip uninstall --quiet --yes pip
cd "$1"/lib/python3*/site-packages

rm -rf torch/include torch/test torch/bin/*test* torch/bin/*Test* torch/bin/protoc* torch/lib/*test.so
for library in aiohttp fontTools matplotlib mpmath networkx numpy regex scipy simdjson sympy; do
    [ -d $library ] || continue
    find $library -type d -name tests -prune -exec rm -rf {} +
    find $library -type f \( -name '*.[ach]' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.pxd' -o -name '*.pyx' \) -delete
done
if command -v strip >/dev/null; then
    # The libraries in folders *.libs were moved there by a tool whose layout `strip` breaks.
    find . -type f -name '*.so*' ! -path './*.libs/*' -exec strip --strip-unneeded {} +
fi

# Python writes the bytecode of whatever these import: what a server, its model processes and its pictures load, and no
# more. A start without it takes three times as long. Other modules, as those of the other families of models, are
# compiled when they are loaded, in some 50 ms each.
PYTHONDONTWRITEBYTECODE='' MPLCONFIGDIR=$(mktemp -d) "$python" -W ignore - <<'END'
import contextlib
import importlib

for name in """
    aiohttp anyio._backends._asyncio backports.zstd dotenv fastapi fastapi.telemetry fastapi_offline httpx httpx_aiohttp
    jinja2 matplotlib.backends.backend_agg matplotlib.backends.backend_pdf matplotlib.backends.backend_svg
    matplotlib.figure mcp.server.lowlevel.server mcp.server.streamable_http_manager mimeparse ml_dtypes opentelemetry.trace
    orjson platformdirs prometheus_client psutil pydantic_settings pynvml rich.progress rich.table rich.tree
    safetensors.numpy safetensors.torch scipy.sparse.csgraph simdjson sse_starlette.sse starlette.middleware.cors
    starlette.middleware.gzip starlette.staticfiles structlog torch torch._dynamo transformers.image_processing_utils
    transformers.integrations.sdpa_attention transformers.models.auto.image_processing_auto
    transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto
    transformers.models.llama.modeling_llama transformers.tokenization_utils_tokenizers typer uvicorn.main
    uvicorn.lifespan.on uvicorn.loops.uvloop uvicorn.protocols.http.httptools_impl
    uvicorn.protocols.websockets.websockets_sansio_impl websockets.asyncio.client websockets.sync.client
""".split():
    with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
        importlib.import_module(name)
END
