"""The CUDA image and its service in the compose file: a GPU is asked for by name, and other builds of torch fit."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.fixture(scope="module")
def stage():
    """The CUDA image's own part of the Dockerfile, its continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return re.search(r"^FROM runtime AS cuda\n(.*?)(?=^FROM )", text, re.MULTILINE | re.DOTALL)[1]


def test_the_image_asks_for_a_gpu_by_name(stage):
    (variables,) = re.findall(r"^ENV (.*)$", stage, re.MULTILINE)
    assert dict(each.split("=", 1) for each in variables.split()) == {
        "ATTENTION_DEVICE": "cuda",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_REQUIRE_CUDA": "${NVIDIA_REQUIRE_CUDA}",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert re.findall(r"^ARG (.*)$", stage, re.MULTILINE) == ["NVIDIA_REQUIRE_CUDA=cuda>=13.0"]


def test_the_service_does_so_too_and_has_all_other_settings(services):
    """A variable that compose sets to nothing would hide that of the image."""
    plain, cuda = (services[name]["environment"] for name in ("attention", "attention-cuda"))
    assert plain["ATTENTION_DEVICE"] == "${ATTENTION_DEVICE:-}"
    assert cuda == plain | {"ATTENTION_DEVICE": "${ATTENTION_DEVICE:-cuda}"}
    (device,) = services["attention-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_a_torch_for_another_driver_comes_by_its_index(services):
    arguments = services["attention-cuda"]["build"]["args"]
    assert arguments["TORCH_INDEX_URL"] == "${TORCH_INDEX_URL:-}"
    assert arguments["NVIDIA_REQUIRE_CUDA"] == "${NVIDIA_REQUIRE_CUDA:-cuda>=13.0}"
    assert "nvml" in arguments["EXTRAS"]
    packages = (ROOT / "Dockerfile").read_text().partition("AS packages-cuda\n")[2].partition("FROM ")[0]
    assert "ARG TORCH_INDEX_URL=" in packages
    assert "install_torch.sh" in packages
