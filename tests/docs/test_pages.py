"""Settings, commands, targets, services, paths and links of the documents exist."""

import importlib
import importlib.util
import re
import tomllib

import pytest
from tools.docs import variants_page
from tools.docs.snippets import DOCUMENTS, ROOT, blocks

from attention_contract.errors import error_classes
from attention_contract.operations import OPERATIONS
from attention_service.core.registry import variants
from attention_service.settings import Settings

PAGES = [
    *DOCUMENTS,
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES = set(
    re.findall(r"^  ([\w-]+):", COMPOSE.partition("\nservices:")[2].partition("\nvolumes:")[0], re.MULTILINE)
) | {"proxy"}
"""Those of docker-compose.yml, and the one of deploy/scale/compose.yml."""
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
OF_CLIENT = {"ATTENTION_URL", "ATTENTION_API_KEY", "ATTENTION_AUTOSTART"}
VARIABLES = {f"ATTENTION_{name.upper()}" for name in Settings.model_fields} | OF_CLIENT
FLAGS = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {"--help"}
COMPOSE_COMMANDS = {"up", "down", "logs", "ps", "build"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def console_lines():
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                yield from (line.partition("#")[0].strip() for line in block.code.splitlines())


@pytest.mark.parametrize(
    "generator",
    [
        "settings_page",
        "variants_page",
        "hardware_page",
        "names_page",
        "checkpoints_page",
        "metrics_page",
        "scopes_page",
        "engines_page",
    ],
)
def test_a_generated_page_is_current(generator):
    module = importlib.import_module(f"tools.docs.{generator}")
    assert module.PAGE.read_text("utf-8") == module.render(), f"run python -m tools.docs.{generator}"


def test_programs_that_are_named_exist_and_are_not_among_the_tests():
    texts = [MAKEFILE, *(page.read_text("utf-8") for page in (*PAGES, ROOT / "tools" / "proof" / "README.md"))]
    named = {name for text in texts for name in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)*)", text)}
    assert {"tools.models_walk", "tools.docs.settings_page", "tools.fuzz", "benchmarks"} <= named
    own = {name for name in named if name.partition(".")[0] in {"tools", "benchmarks", "attention_service"}}
    assert [name for name in own if importlib.util.find_spec(name) is None] == []
    assert [name for name in named if name.startswith("tests")] == []


def test_every_variant_that_runs_on_a_cpu_was_measured():
    measured = variants_page.growth()
    assert {f"{entry.kind} {entry.name}" for entry in variants()} <= set(measured)
    for name in ("mask sliding_window", "mask any", "method linear", "method linear, causal"):
        assert max(float(part) for part in measured[name].split(" · ")) <= 1.15, name


def test_console_blocks_name_targets_services_and_flags_that_exist():
    for line in console_lines():
        for target in re.findall(r"(?:^|&& )make ([a-z-]+)", line):
            assert target in TARGETS, line
        if words := re.findall(r"docker compose ([^|]*)", line):
            command, *rest = words[0].split()
            assert command in COMPOSE_COMMANDS, line
            assert {word for word in rest if not word.startswith("-")} <= SERVICES, line
        for stage in re.findall(r"docker build.* --target (\S+)", line):
            assert stage in STAGES, line
        if line.startswith("attention serve"):
            assert set(re.findall(r"--[a-z-]+", line)) <= FLAGS, line


@every_page
def test_every_block_has_a_known_language(page):
    kinds = {block.language for block in blocks(page)}
    assert kinds <= ({"python", "sh", "console", "text"} if page in DOCUMENTS else {"console", "text"})


@every_page
def test_variables_and_targets_named_in_prose_exist(page):
    text = page.read_text("utf-8")
    assert set(re.findall(r"\bATTENTION_[A-Z_]*[A-Z]\b", text)) <= VARIABLES
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= TARGETS


@every_page
def test_modules_named_in_commands_exist(page):
    for module in re.findall(r"python -m ([a-z_.]+[a-z_])", page.read_text("utf-8")):
        assert importlib.util.find_spec(module) is not None, module


def test_files_named_among_the_mechanisms_exist():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("\n## Mechanisms\n")[2]
    named = re.findall(r"`(?:pytest )?([a-z_0-9]+/[a-z_0-9/]*(?:\.py)?)`", page)
    roots = ROOT, ROOT / "client", ROOT / "service" / "attention_service"
    assert len(named) > 40
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


@every_page
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


def test_the_tour_shows_every_path_and_error():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    for operation in OPERATIONS:
        assert f"{operation.method} {operation.path}" in text, operation.name
    # What this server never raises, or what is only the root of others.
    abstract = {
        "error",
        "conflict",
        "too_large",
        "unavailable",
        "unauthorized",
        "forbidden",
        "cancelled",
        "internal_error",
    }
    missing = [code for code in error_classes() if code not in abstract and f"`{code}`" not in text]
    assert [code for code in missing if not error_classes()[code].__module__.startswith("attention_client")] == []


def test_the_overview_names_every_variant():
    text = (ROOT / "docs" / "overview.md").read_text("utf-8").lower()
    words = {"any": "unions", "all": "intersections", "none": "", "exact": "exact", "materialized": "", "fused": ""}
    for variant in variants():
        assert words.get(variant.name, variant.name.replace("_", " ")) in text.replace("_", " "), variant.name


def test_the_overview_links_every_document():
    text = (ROOT / "docs" / "overview.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"overview.md"}
    assert sorted(name for name in pages if not re.search(rf"\]\({re.escape(name)}[)#]", text)) == []


def test_the_readme_lists_every_extra_of_users():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text("utf-8").partition("## Install parts of it")[2]
    extras = project["optional-dependencies"].keys() - {"test-base", "test", "dev", "docs"}
    assert sorted(name for name in extras if f"`{name}`" not in text) == []


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[a-z0-9-]+", name, re.IGNORECASE)[0] for name in listed} - {"attention-service"}
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert [name for name in sorted(names) if f"`{name}`" not in text and f"`{name}[" not in text] == []


def test_every_setting_can_be_set_by_env_file_and_compose():
    settings = VARIABLES - OF_CLIENT
    example = (ROOT / ".env.example").read_text()
    assert set(re.findall(r"^#(ATTENTION_\w+)=", example, re.MULTILINE)) == settings
    assert set(re.findall(r"^    (ATTENTION_\w+):", COMPOSE, re.MULTILINE)) == settings


ROWS = {
    "forward": ("/v1/modules/{name}/forward", ""),
    "forward, raw": ("/v1/attention/forward", "forward"),
    "gradients": ("/v1/modules/{name}/gradients", "forward"),
    "kept pass": ("/v1/modules/{name}/passes", "forward"),
    "weights": ("/v1/modules/{name}/weights", "forward"),
    "Hopfield retrieval": ("/v1/hopfield/retrieve", ""),
}
"""Rows of the table of tensors, with the path of their operation and the row that they extend."""


def tensors_of(model):
    """The names of the fields of a model that are tensors."""
    fields = model.model_fields.items()
    return {field.alias or name for name, field in fields if "ndarray" in str(field.annotation)}


@pytest.mark.parametrize("row", ROWS)
def test_the_table_of_tensors_has_the_fields_of_the_models(row):
    text = (ROOT / "docs" / "from-others.md").read_text("utf-8")
    text = text.partition("## Tensors of a safetensors body")[2]
    table = {line.split("|")[1].strip(): line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")}
    path, extends = ROWS[row]
    (operation,) = (one for one in OPERATIONS if one.path == path)
    for column, model in enumerate((operation.request, operation.reply)):
        cells = table[row][column] + (table[extends][column] if extends else "")
        named = {name.partition(".")[0] for name in re.findall(r"`([a-z_.0-9]+)`", cells)}
        known = {field.alias or name for name, field in model.model_fields.items()}
        assert tensors_of(model) - named == set(), "missing in the table"
        assert {name.partition(".")[0] for name in re.findall(r"`([a-z_.0-9]+)`", table[row][column])} <= known
