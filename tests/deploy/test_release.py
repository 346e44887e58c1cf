"""What is shipped: the version is stated once and everywhere alike, and what is published is tried before."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from deploy.release import check_version, name_version
from tools.proof.servers import serving

ROOT = Path(__file__).parents[2]
STATED = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "deploy/kubernetes/chart/Chart.yaml")


@pytest.fixture
def project(tmp_path):
    for name in STATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_version_is_the_same_wherever_it_is_stated():
    assert check_version(ROOT) == importlib.metadata.version("attention-service")


def test_a_new_version_takes_what_was_unreleased(project):
    before = (project / "CHANGELOG.md").read_text().partition("## [Unreleased]\n")[2]
    name_version(project, "7.8.9", "2030-01-02")
    assert check_version(project) == "7.8.9"
    assert "version: 7.8.9\ndate-released: 2030-01-02\n" in (project / "CITATION.cff").read_text()
    assert (project / "CHANGELOG.md").read_text().endswith(f"## [Unreleased]\n\n## [7.8.9] - 2030-01-02\n{before}")
    name_version(project, "7.8.10", "2030-01-03")
    assert (project / "CITATION.cff").read_text().count("date-released") == 1


@pytest.mark.parametrize(("version", "detail"), [("1.2", "such as 0.2.0"), ("0.1.0", "0.1.0 already")])
def test_a_version_that_is_none_or_was_published_is_refused(project, version, detail):
    with pytest.raises(SystemExit, match=detail):
        name_version(project, version, "2030-01-02")


@pytest.mark.parametrize("name", STATED)
def test_a_version_that_one_file_lacks_is_found(project, name):
    path = project / name
    path.write_text(path.read_text().replace(check_version(project), "0.0.9"))
    with pytest.raises(SystemExit, match="make release VERSION"):
        check_version(project)


def test_the_job_that_may_publish_runs_nothing_of_the_repository():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    steps = jobs["publish"]["steps"]
    assert [step.get("uses", "").split("@")[0] for step in steps] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert not any("run" in step for step in steps)


def test_the_development_container_runs_targets_that_exist():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    for command in (container["postCreateCommand"], container["postAttachCommand"]):
        assert re.search(rf"^{re.escape(command.removeprefix('make '))}:", makefile, re.MULTILINE), command


@pytest.mark.slow
def test_the_space_shows_the_page_and_a_sentence_to_everybody(tmp_path):
    """Under the settings of its Dockerfile, but for its folder and its port."""
    text = (ROOT / "deploy/space/Dockerfile").read_text().replace("\\\n", " ")
    settings = dict(each.split("=", 1) for each in re.search(r"^ENV (.*)$", text, re.MULTILINE)[1].split())
    front = yaml.safe_load((ROOT / "deploy/space/README.md").read_text().split("---")[1])
    assert front["sdk"] == "docker"
    assert str(front["app_port"]) == settings["ATTENTION_PORT"]
    kept = {
        name.removeprefix("ATTENTION_").lower(): value
        for name, value in settings.items()
        if name not in {"ATTENTION_PORT", "ATTENTION_MODELS_DIR", "ATTENTION_HOST"}
    }
    host = {"Host": "somebody-attention.hf.space"}
    with serving(tmp_path, **kept) as server:
        page = httpx.get(server.url, headers=host)
        assert "https://huggingface.co" in page.headers["Content-Security-Policy"]
        body = {"text": "the cat sat", "layers": [0]}
        reply = httpx.post(f"{server.url}/v1/models/tiny/weights", json=body, headers=host, timeout=120)
    assert reply.json()["labels"]["tokens"][1:] == ["the", " cat", " sat"]


@pytest.mark.slow  # five minutes: an environment is made twice
def test_the_files_of_a_release_are_made_and_tried():
    made = subprocess.run(
        [sys.executable, ROOT / "deploy/release.py"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    assert "outside the repository" in made
    dist = ROOT / "dist"
    names = {part["name"] for part in json.loads((dist / "sbom.cdx.json").read_text())["components"]}
    assert {"attention-service", "torch", "transformers", "fastapi"} <= names
    assert sorted(path.suffix for path in dist.iterdir() if path.name != "sbom.cdx.json")[-2:] == [".gz", ".whl"]
