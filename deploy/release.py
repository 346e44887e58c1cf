"""Make what a release publishes, and try the wheel as a user would. It publishes nothing.

python deploy/release.py            build version VERSION of pyproject.toml into dist/
python deploy/release.py 0.2.0      name the version first: in pyproject.toml, CITATION.cff and CHANGELOG.md

dist/ then holds the sdist, the wheel built of it, and sbom.cdx.json, the list of all packages that run beside it
(CycloneDX). The wheel answers a text in a clean environment, outside the repository. Images and the chart are made
where Docker and Helm are; without them, the script says so. Needs Python 3.11.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ("build==1.6.1", "twine==7.0.0", "cyclonedx-bom==7.5.0")
EXTRAS = "server,plot,hub,transformers"
IMAGES = ("cpu", "cuda")
CHART = ROOT / "deploy" / "kubernetes" / "chart"
START_SECONDS = 120


def main() -> None:
    """Name the version if one is given, and make its files."""
    if len(sys.argv) > 1:
        name_version(ROOT, sys.argv[1], datetime.now(UTC).date().isoformat())
    version = check_version(ROOT)
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(folder) / "tools", *TOOLS)
        run(tools / "python", "-m", "build", "--outdir", DIST, ROOT)
        run(tools / "python", "-m", "twine", "check", "--strict", *DIST.iterdir())
        clean = clean_environment(Path(folder) / "clean", next(DIST.glob("*.whl")))
        run(tools / "cyclonedx-py", "environment", clean / "python", "--of", "JSON", "-o", DIST / "sbom.cdx.json")
        try_outside(clean, Path(folder))
    make_images(version)
    make_chart()
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")
    print(f"Next: commit, git tag v{version}, push the tag; its workflow publishes what it builds of it.")


def name_version(root: Path, version: str, date: str) -> None:
    """Write a version where it is stated, and put what is unreleased under it in the changelog.

    Raises SystemExit for a version that is not three numbers, and one that the changelog has.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"expected a version such as 0.2.0, got {version}")
    changes = root / "CHANGELOG.md"
    text = changes.read_text("utf-8")
    if f"\n## [{version}]" in text:
        sys.exit(f"CHANGELOG.md has version {version} already")
    changes.write_text(text.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [{version}] - {date}\n", 1), "utf-8")
    for name, pattern, line in (
        ("pyproject.toml", r'^version = ".*"$', f'version = "{version}"'),
        ("CITATION.cff", r"^version: .*\n(date-released: .*\n)?", f"version: {version}\ndate-released: {date}\n"),
        ("deploy/kubernetes/chart/Chart.yaml", r"^version: .*$", f"version: {version}"),
        ("deploy/kubernetes/chart/Chart.yaml", r"^appVersion: .*$", f"appVersion: {version}"),
    ):
        path = root / name
        path.write_text(re.sub(pattern, line, path.read_text("utf-8"), count=1, flags=re.MULTILINE), "utf-8")


def check_version(root: Path) -> str:
    """The version of pyproject.toml. Raises SystemExit if the changelog, the citation or the chart tells another."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"])
    newest = re.findall(r"^## \[(\d.*)\]", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    cited = re.findall(r"^version: (.*)$", (root / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    chart = (root / "deploy" / "kubernetes" / "chart" / "Chart.yaml").read_text("utf-8")
    packed = re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE)
    if newest[:1] != [version] or cited != [version] or packed != [version, version]:
        sys.exit(
            f"pyproject.toml has version {version}, CHANGELOG.md {newest[:1]}, CITATION.cff {cited} and the chart "
            f"{packed}; name it in all of them: make release VERSION=X.Y.Z"
        )
    return version


def environment(folder: Path, *packages: str) -> Path:
    """A new environment with packages. Returns the folder of its commands."""
    run(sys.executable, "-m", "venv", folder)
    if packages:
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    return folder / "bin"


def clean_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel, its extras and the CPU build of torch."""
    commands = environment(folder)
    run(ROOT / "deploy" / "install_torch.sh", commands / "python", "cpu")
    run(commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]")
    return commands


def try_outside(commands: Path, folder: Path) -> None:
    """Start the wheel's server in a folder that is not the repository, open its page, and ask about a text."""
    with serving(commands, folder) as url:
        with urlopen(f"{url}/", timeout=30) as page:  # noqa: S310
            if b"<title>" not in page.read():
                sys.exit("the wheel's server has no page")
        body = json.dumps({"text": "the cat sat on the mat", "layers": [0]}).encode()
        ask = Request(f"{url}/v1/models/tiny/weights", body, {"Content-Type": "application/json"})  # noqa: S310
        with urlopen(ask, timeout=START_SECONDS) as reply:  # noqa: S310
            tokens = json.load(reply)["labels"]["tokens"]
        if tokens[1:] != ["the", " cat", " sat", " on", " the", " mat"]:
            sys.exit(f"the wheel's server reads a text as {tokens}")
    print("The wheel's server opens its page and answers a text, outside the repository.")


@contextmanager
def serving(commands: Path, folder: Path) -> Iterator[str]:
    """The address of the wheel's server, which is ended with the context."""
    settings = {"ATTENTION_PORT": "0", "ATTENTION_MODELS_DIR": str(folder / "models"), "HOME": str(folder)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ATTENTION_", "PYTHON"))}
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(  # noqa: S603
            [commands / "attention", "serve"], cwd=folder, env=clean | settings, stdout=out, stderr=out
        )
    try:
        yield address_in(log, server)
    finally:
        server.terminate()
        server.wait(60)


def address_in(log: Path, server: subprocess.Popen[bytes]) -> str:
    """The address that a server logs when it is ready. Raises SystemExit with its log if it never is."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        text = log.read_text("utf-8")
        if " ready " in text and (found := re.search(r"http://[\w.]+:\d+", text)):
            return found[0]
        time.sleep(0.1)
    sys.exit(f"the wheel's server did not start:\n{log.read_text('utf-8')}")


def make_images(version: str) -> None:
    """Build both images, named by the version."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:  # noqa: S603
        print("No images: no Docker engine answers here.")
        return
    for target in IMAGES:
        run(docker, "build", "--target", target, "--tag", f"attention-service:v{version}-{target}", ROOT)


def make_chart() -> None:
    """Package the chart, which starts the images of its version."""
    helm = shutil.which("helm")
    if helm is None or not CHART.exists():
        print("No chart: helm is not on PATH.")
        return
    run(helm, "package", CHART, "--destination", DIST)


def run(*command: object) -> None:
    """Run a command that must succeed."""
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)  # noqa: S603


if __name__ == "__main__":
    main()
