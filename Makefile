# Needs Python 3.11 or newer; uses uv where it is on PATH and pip where it is not. `make` lists what it can do.
# Every ATTENTION_* setting passes through, from the environment or the command line: make serve ATTENTION_PORT=9000

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough, looked for only when the environment is made.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
# Which build of torch: auto, cpu, cu130, …, index (see deploy/install_torch.sh).
TORCH ?= auto
UV := $(shell command -v uv)
# Nothing is compiled ahead, by pip as by uv: what runs imports a tenth of it.
ifdef UV
INSTALL = $(UV) pip install --quiet --python $(BIN)/python
else
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
endif
# More arguments for what the target runs.
ARGS ?=
# One worker more than cores: tests wait for servers and processes a fifth of their time.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
# Bytecode is written even where the environment forbids it: a hundred processes would compile the same files again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help serve web test test-long test-more test-base test-base-here test-all test-web check demo site docs bench gpu-hour bench-peers bench-model-peers check-clients release test-interop test-vllm schemathesis fuzz soak chaos findings constraints clean

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | awk '{printf "make %-12s", $$1; $$1 = ""; print}'

serve: export ATTENTION_PRELOAD ?= tiny
serve: $(VENV)/.server ## Start the server on 127.0.0.1:8000 (ATTENTION_* settings and ARGS pass through)
	@echo 'In another shell: . $(BIN)/activate && attention --help' >&2
	@exec $(BIN)/attention serve $(ARGS)

web: web/node_modules/.package-lock.json ## Check the page's sources, test them, and build the page (needs npm)
	cd web && npm run --silent check && npm run --silent bundle

test: $(VENV)/.test ## Run the tests but for those that take long and the browser's (ARGS go to pytest)
	$(PYTEST) -m "not slow and not long and not browser" --ignore tests/web $(ARGS)

test-long: $(VENV)/.test ## Run the tests that take seconds each and often find faults: killed processes, many callers, several devices
	$(PYTEST) -m "long and not slow" --ignore tests/web $(ARGS)

test-more: $(VENV)/.dev ## Run the files of tests that ask for a library of the extra dev, which `make test` skips without it
	$(PYTEST) -m "not slow and not browser" $$($(BIN)/python -m tools.extras) $(ARGS)

# The newer Pythons that are here, on PATH or made by pyenv.
NEWER = $(foreach version,3.12 3.13,$(shell for p in python$(version) $$HOME/.pyenv/versions/$(version).*/bin/python; do \
	$$p -c '' 2>/dev/null && echo $(version)=$$p && break; done))

test-base: ## Test the client and the command without torch, in an environment for each of Python 3.12 and 3.13 that is here
	@test -n "$(NEWER)" || echo 'Neither Python 3.12 nor 3.13 is here' >&2
	@set -e; for each in $(NEWER); do \
		$(MAKE) --no-print-directory VENV=.cache/base/$${each%%=*} PYTHON=$${each#*=} test-base-here; done

# The same by the Python of VENV.
test-base-here: $(VENV)/.base
	$(PYTEST) -m "not slow and not browser" tests/client tests/contract tests/pictures $(ARGS)

test-web: $(VENV)/.dev ## Test the page in a browser (Debian's chromium; skipped without it)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser -n 2 --dist worksteal tests/web $(ARGS)

test-all: $(VENV)/.dev ## Run every test, the long walks too
	$(PYTEST) -m "not browser" --durations=15 $(ARGS)
	$(MAKE) --no-print-directory test-web

check: $(VENV)/.dev ## Check format, lint, types, import layers, Dockerfile, compose file, workflows and citation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p attention_contract -p attention_pictures -p attention_transformers -p attention_client -p attention_service -p attention_vllm
	$(BIN)/python -m tools.docs.typed_snippets
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m tools.built_page
	$(BIN)/hadolint Dockerfile deploy/space/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

demo: $(VENV)/.server ## Show the attention of a sentence (SENTENCE="…", CHECKPOINT=folder, ATTENTION_URL=…)
	$(BIN)/python examples/demo.py $(ARGS)

site: $(VENV)/.dev ## Export the page with recorded replies into build/page, as files that need no server (needs chromium)
	OMP_NUM_THREADS=1 $(BIN)/python web/export_site.py $(ARGS)

docs: $(VENV)/.docs ## Build the documents as a site in site/, with the API reference, and serve it on 127.0.0.1:8080
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo 'Serving the documents on http://127.0.0.1:8080' >&2
	@exec $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8080

bench: $(VENV)/.dev ## Measure quickly, each thing beside its baseline (ARGS=--full: at length, into benchmarks/results)
	$(BIN)/python -m benchmarks $(ARGS)

gpu-hour: $(VENV)/.dev ## Test and measure a GPU: tests, claims, benchmarks, vendor's tools (ARGS=--print shows the steps)
	$(BIN)/python -m benchmarks.gpu_hour $(ARGS)

bench-peers: $(VENV)/.dev ## Install other servers, each apart, and measure them beside this one, into benchmarks/results
	$(BIN)/python -m benchmarks.serving --peers --output benchmarks/results/peers.md $(ARGS)

bench-model-peers: $(VENV)/.dev ## Install other servers of whole models, each apart, and measure them beside this one (ten minutes)
	$(BIN)/python -m benchmarks.model_peers --output benchmarks/results/model_peers.md $(ARGS)

check-clients: $(VENV)/.dev ## Generate clients of the OpenAPI document in Python, TypeScript and Go, and ask a server by each
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.clients

release: | $(BIN)/python ## Build sdist, wheel, SBOM, images and chart, and try the wheel (VERSION=X.Y.Z names the version first)
	$(BIN)/python deploy/release.py $(VERSION)

test-interop: $(VENV)/.test ## Ask a server by tritonclient, KServe's client, and the suites of MCP and Open Responses, each apart
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.interop

# Tests beside vLLM, in an environment that shares nothing with the others: vLLM pins transformers below what the server needs.
VLLM_ENV := .cache/vllm
test-vllm: $(VLLM_ENV)/.plugin $(VENV)/.test ## Install vLLM for CPUs into .cache (3.5 GB, minutes) and test the plugin of it there (ARGS go to pytest)
	cd plugins/vllm && OMP_NUM_THREADS=1 ../../$(VLLM_ENV)/bin/python -m pytest $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.interop.beside_vllm

$(VLLM_ENV)/.plugin: pyproject.toml plugins/vllm/pyproject.toml plugins/vllm/install.sh
	@plugins/vllm/install.sh $(or $(PYTHON),python3) $(VLLM_ENV)
	@touch $@

findings: ## Run every finding about other libraries (needs a network; not part of CI)
	@failed=0; for each in docs/findings/*.sh; do echo "$$each"; sh "$$each" || { echo "  exit status $$?"; failed=1; }; done; exit $$failed

schemathesis: $(VENV)/.dev ## Check a server against its OpenAPI document, all phases (ARGS="--seconds 60" bounds it)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.proof.openapi_walk $(ARGS)

fuzz: $(VENV)/.dev ## Fuzz every reader of input with a million inputs, 20,000 whole requests and 6,000 damaged folders (ARGS="--inputs 20000" for fewer)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz $(ARGS)

soak: $(VENV)/.dev ## Do everything at once for 15 minutes and look for growth and leaks (MINUTES=1 for less)
	$(BIN)/python -m tools.proof.soak --minutes $(or $(MINUTES),15) $(ARGS)

chaos: $(VENV)/.dev ## Kill servers, fill the disk, overload, read slowly (ARGS=overload for one of them)
	$(BIN)/python -m tools.proof.chaos $(ARGS)

constraints: ## Pin the newest versions in constraints.txt (torch keeps its pin; edit that line by hand)
	rm -rf .cache/constraints
	$(MAKE) --no-print-directory VENV=.cache/constraints PINS= .cache/constraints/.dev
	sed -n '/^#/p' constraints.txt > .cache/constraints.txt
	@.cache/constraints/bin/python -c 'from importlib.metadata import distributions as all; \
		names = {d.name.lower().replace("_", "-"): d.version.split("+")[0] for d in all()}; \
		print(*(f"{n}=={v}" for n, v in sorted(names.items()) if n not in ("attention-service", "pip", "uv")), sep="\n")' >> .cache/constraints.txt
	mv .cache/constraints.txt constraints.txt
	rm -rf .cache/constraints

web/node_modules/.package-lock.json: web/package-lock.json
	cd web && npm ci --ignore-scripts
	@touch $@

clean: ## Remove the environment and every cache
	rm -rf web/node_modules $(VENV) .cache build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment, filled step by step; a stamp says which extras of the present pins it holds.
PINS := -c constraints.txt

$(BIN)/python:
	@test -n "$(UV)$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(if $(UV),$(UV) venv --quiet --python $(or $(PYTHON),3.11) $(VENV),$(PYTHON) -m venv $(VENV))

$(VENV)/.torch: constraints.txt deploy/install_torch.sh | $(BIN)/python
	@echo 'Installing PyTorch into $(VENV), a minute or so ...' >&2
	@deploy/install_torch.sh $(BIN)/python $(TORCH) --no-compile
	@touch $@

$(VENV)/.server: pyproject.toml $(VENV)/.torch
	@echo 'Installing the server and its libraries into $(VENV), a minute or two ...' >&2
	@$(INSTALL) $(PINS) -e '.[server,plot,hub,mcp,transformers]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	@echo 'Installing what builds the documents into $(VENV) ...' >&2
	@$(INSTALL) $(PINS) -e '.[docs]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	@echo 'Installing the server and what its tests need into $(VENV) ...' >&2
	@$(INSTALL) $(PINS) -e '.[test]'
	@touch $(VENV)/.server $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo 'Installing the server and what its development needs into $(VENV) ...' >&2
	@$(INSTALL) $(PINS) -e '.[dev]'
	@touch $(VENV)/.server $(VENV)/.docs $(VENV)/.test $@

# Never torch.
$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing the client and what its tests need into $(VENV) ...' >&2
	@$(INSTALL) $(PINS) -e '.[test-base]'
	@touch $@
