# Every target works alone on a machine that has only Python 3.11 or later and pip.

PYTHON ?= $(shell for p in python3.11 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
BASE := .venv/.base
READY := .venv/.ready
CPU_TORCH := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help demo test soak clients format model browser

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Some systems ship Python without ensurepip: their own pip then fills the environment.
# torch comes first, alone and pinned, so that no other package can ask for one with CUDA. PyPI's for Linux brings CUDA
# along: where there is no GPU, the one for CPUs is taken if its index can be reached. pip itself looks, since proxies and
# certificates may stand in its configuration, and at that index alone.
$(BASE): pyproject.toml constraints.txt
	@echo "setting up .venv (once)"
	@$(PYTHON) -m venv .venv || { \
	    $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@index=; what="for CPUs, 0.2 GB: half a minute at 100 Mbit/s"; \
	if [ "$$(uname -s)" = Linux ]; then \
	    if ! command -v nvidia-smi >/dev/null && \
	        PIP_EXTRA_INDEX_URL=$(CPU_TORCH) PIP_FIND_LINKS=$(CPU_TORCH)/torch/ $(BIN)/python -m pip index versions torch \
	        --index-url $(CPU_TORCH) --retries 0 --timeout 5 >/dev/null 2>&1; \
	    then index="--extra-index-url $(CPU_TORCH)"; \
	    else what="of PyPI, with CUDA up to 2.7 GB: some 4 minutes at 100 Mbit/s"; fi; \
	fi; \
	echo "1/2 downloading torch $$what"; \
	$(BIN)/python -m pip install --constraint constraints.txt $$index torch
	@echo "2/2 downloading transformers and the rest, 0.1 GB"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable '.[serve]'
	@touch $@

$(READY): $(BASE)
	@echo "downloading what the checks need, 0.5 GB"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,serve,grammar]'
	@touch $@

model: $(BASE) ## fetch the default model once (93 MB)
	@$(BIN)/python -m slipstream.models.default

# The page's tests run in a real Chromium. Debian's is installed where that can be done; elsewhere the tests say what is
# missing.
browser:
	@test -n "$$SLIPSTREAM_CHROMIUM" || command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing chromium, for the tests of the page"; \
	        export DEBIAN_FRONTEND=noninteractive; \
	        { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; } >/dev/null; \
	    else \
	        echo "no Chromium here: install one (apt-get install chromium), or name it in SLIPSTREAM_CHROMIUM;"; \
	        echo "without it the tests of the page fail"; \
	    fi; }

demo: $(BASE) model ## the same answer with and without speculation, and the speed of each
	@$(BIN)/python -m slipstream.bench.demo

# Two at a time with a thread each, since tiny models gain nothing by more; then what measures time, by itself.
FAST := not soak and not gpu
test: $(READY) model browser ## format, lint, types, layers, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(FAST) and not alone" -n 2 --dist worksteal
	$(BIN)/python -m pytest -m "$(FAST) and alone"

soak: $(READY) model ## the long tests
	$(BIN)/python -m pytest -m soak

clients: $(READY) model ## other projects' clients against a server; writes docs/clients.md
	@$(BIN)/python tools/clients.py

format: $(READY) ## put the code into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
