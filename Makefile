# Everything a developer types. Needs Python 3.11 and make; the rest is installed into .venv.
#
#   make demo    two ranks train, one is killed, training goes on
#   make fast    the tests that need no process, no torch and no network: for every save
#   make test    every check and every test: for every commit
#   make check   format, lint, types, import rules, tidiness
#   make coverage  all tests again, with the lines and branches that they reach, in build/coverage
#   make test-torch       what depends on torch, with the installed torchrun instead of the recorded one; TORCH=2.15.0: with
#                         that version, in an environment of its own (its registry build brings 5 GB of CUDA libraries)
#   make test-trainers    the trainers' tests with torchtitan too, installed without most of what it depends on
#   make test-engines     the lines of docs/engines.md, by the real torchx and Ray, in an environment of their own
#   make test-kubernetes  manifests in a real API server, from the folder KUBEBUILDER_ASSETS or PATH, or built from Debian's source;
#                         TEST_KUBERNETES_CRDS=folder: with JobSet's, Kubeflow's and KEDA's objects, by their CRDs
#   make test-without-torch  the launcher's tests (the folders in tools/pythons.py) in an environment without torch: fails if one
#                         needs it. `make check` looks at their imports alone
#   make test-pythons     the same under 3.11, 3.12 and 3.13, where they are found; PYTHONS="3.12 3.13"
#   make record-torchrun  record again what the installed torchrun does; TORCH=… as above
#   make bench   holdfast beside torchrun: a table, and a file for each row under benchmarks/results
#   make soak    simulated jobs (SOAK_SEEDS=50000), then chaos on pretend hosts beside torchrun (SOAK_MINUTES=20,
#                SOAK_SEED=1, SOAK_LAUNCHERS) and with a script in ht.survive, then kills of ranks and nodes of sharded models, then patience
#                (SOAK_PATIENCE_MINUTES=60); soak-seeds, soak-chaos, soak-kills and soak-patience are the parts; chaos and patience need root on Linux
#   make dist    an sdist and a manylinux wheel in dist/, each installed into an empty environment and tried
#   make release  the same with wheels for x86_64 and aarch64 (MACHINES=x86_64: for that alone), checked for publication
#                (REPOSITORY=https://…: README's links lead there on the package's page); prints what a
#                person does by hand
#   make docs    the documentation as a site, in build/site
#   make screenshots  the pictures in docs/pictures, of the dashboard and of the gallery, from real jobs
#   make fmt     format the code and regenerate the pages of docs/ that are made from it

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SOAK_SEEDS ?= 50000
SOAK_SEED ?= 1
SOAK_MINUTES ?= 20
SOAK_LAUNCHERS ?= holdfast,torchrun-tuned,torchrun
SOAK_PATIENCE_MINUTES ?= 60
JOBS ?= 6
COMMA := ,
DEVICE ?= cuda
GPU_PYTHON ?= $(if $(filter cpu,$(DEVICE)),$(VENV)/bin/python,python3)
MACHINES ?= x86_64,aarch64
REPOSITORY ?=
# Held to that by a plugin: a test in it that starts a process, connects, sleeps or imports torch fails.
FAST := tests/agent tests/authority tests/benchmarks tests/coordinator tests/corpus tests/diagnosis tests/protocol tests/scenarios tests/simulation tests/extensions/hangs/test_hang_detector.py tests/extensions/hangs/test_hang_reports.py tests/extensions/stragglers
LIGHT_AGENTS := tests/benchmarks/test_harness.py::test_light_agents_form_a_generation_and_another_without_one_of_them

BIN := $(VENV)/bin
TORCH ?=
TORCH_VENV := $(if $(TORCH),.venv-torch-$(TORCH),$(VENV))
# What may depend on the version of torch.
WITH_TORCH := tests/beside_torchrun tests/clients tests/fork_server tests/torchrun_handler tests/train tests/supervisor/test_store_host.py \
    tests/worker/test_progress.py \
    tests/processes/test_restarts.py tests/processes/test_hang_jobs.py tests/processes/test_hang_ranks.py \
    tests/processes/test_survive_jobs.py

# Run by `make check`, `make dist` and `make release`.
ELSEWHERE := --ignore=tests/tidy --ignore=tests/packaging

PYTEST := $(BIN)/python -m pytest tests -n $(JOBS) --dist loadgroup
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt
PACKAGING := pyproject.toml constraints.txt src/holdfast/train/_stream.c

.DELETE_ON_ERROR:
.PHONY: demo fast test test-engines test-kubernetes test-torch test-trainers test-without-torch test-pythons record-torchrun coverage check types tidy collected dist release docs bench gpu gpu-wheels soak soak-seeds soak-chaos soak-kills soak-patience screenshots fmt debian clean

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

fast: $(VENV)/.dev
	$(BIN)/python -m pytest $(FAST) -q -n 2 -p tests.support.pure --deselect $(LIGHT_AGENTS)

# Debian's packages are downloaded while pip works: one waits for the network, the other for a processor.
test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev debian
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m tools.measured $(PYTEST) -p tests.support.processor_time $(ELSEWHERE)

test-torch: $(TORCH_VENV)/.dev
	$(TORCH_VENV)/bin/python -m pytest $(WITH_TORCH) -n $(JOBS) --dist loadgroup --torchrun live

test-pythons:
	$(PYTHON) -m tools.pythons $(PYTHONS)

test-without-torch:
	$(PYTHON) -m tools.pythons $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

test-engines: $(VENV)/.dev .venv-engines/.ready
	$(BIN)/python -m pytest tests/engines -q

test-kubernetes: $(VENV)/.dev debian
	@sh tools/kubernetes_server.sh
	PATH="$$PATH:build/kubernetes/bin" $(BIN)/python -m pytest tests/kubernetes/test_k8s_server.py -q -rs

test-trainers: $(VENV)/.dev
	$(PIP) --no-deps torchtitan torch_checkpointing tyro spmd_types docstring_parser
	$(BIN)/python -m pytest tests/train/integrations -n $(JOBS) --dist loadgroup

record-torchrun: $(TORCH_VENV)/.dev
	$(TORCH_VENV)/bin/python -m pytest tests/beside_torchrun --torchrun record

coverage: $(VENV)/.dev debian
	rm -rf build/coverage
	$(BIN)/python -m coverage run $(wordlist 2,99,$(PYTEST)) --ignore=tests/packaging
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered --sort=cover > build/coverage/report.txt
	@tail -1 build/coverage/report.txt

# An environment may forbid Python to write bytecode: then every start of the launcher would compile what has changed.
# The types and the tidiness take half a minute each: side by side. Once all tests are collected, their assertions are
# rewritten: without that, each of the test processes would do it for itself.
check: $(VENV)/.dev
	@$(BIN)/python -m compileall -q src
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory -j2 --output-sync=target types tidy collected

types: $(VENV)/.dev
	$(BIN)/mypy

tidy: $(VENV)/.dev
	$(BIN)/python -m pytest tests/tidy -q

collected: $(VENV)/.dev
	@mkdir -p build
	@$(BIN)/python -m pytest tests --collect-only -qq $(ELSEWHERE) > build/collected.txt || { cat build/collected.txt; exit 1; }

# Strictly: a page that is in no menu, a link or an anchor that leads nowhere is an error. Needs no network.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

# It installs nothing into an environment: a machine with a GPU is lent for minutes.
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE)

gpu-wheels: $(VENV)/.python
	$(BIN)/python -m benchmarks.gpu.packages

# Its tests are no part of `make test`: they need what this builds.
dist: $(VENV)/.dist
	$(BIN)/python -m tools.dist
	$(BIN)/python -m pytest tests/packaging -q

# aarch64 needs gcc-aarch64-linux-gnu and libc6-dev-arm64-cross of Debian.
release: $(VENV)/.dist
	$(BIN)/python -m tools.release --machines $(MACHINES) --repository "$(REPOSITORY)"

# One after the other, also with -j: they would spoil each other's times.
soak:
	$(MAKE) soak-seeds
	$(MAKE) soak-chaos
	$(MAKE) soak-kills
	$(MAKE) soak-patience

soak-seeds: $(VENV)/.dev
	$(BIN)/python -m tests.support.simulator.sweep 0:$(SOAK_SEEDS)
	$(BIN)/python -m tests.support.simulator.sweep succession 0:$(SOAK_SEEDS)
	$(BIN)/python -m tests.support.simulator.sweep multiples 0:$(SOAK_SEEDS)
	$(BIN)/python -m tests.support.simulator.sweep questions 0:$(SOAK_SEEDS)
	$(BIN)/python -m tests.support.simulator.sweep questions-succession 0:$(SOAK_SEEDS)

soak-chaos: $(VENV)/.dev debian
	$(BIN)/python -m soak chaos --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED) --launchers $(SOAK_LAUNCHERS)
	$(BIN)/python -m soak chaos --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED) --launchers holdfast --worker survive

soak-kills: $(VENV)/.dev
	$(BIN)/python -m soak kills --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED)

soak-patience: $(VENV)/.dev debian
	$(BIN)/python -m soak patience --minutes $(SOAK_PATIENCE_MINUTES)

screenshots: $(VENV)/.dev debian
	$(BIN)/python -m tools.screenshots
	$(BIN)/python -m tools.gallery

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tools.pages --write

debian:
	@sh tools/debian.sh

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Compiled at once, as pip does for an ordinary install, but on all processors: an environment that forbids Python to
# write bytecode would otherwise compile the launcher, and torch, at every start. Packages also bring templates and files
# for other versions of Python, which cannot be compiled (those errors are not shown), and their own tests, which nobody runs.
# transformers brings hundreds of models, of which none is used here: a fifth of all bytecode.
COMPILE = $(1)/bin/python -m compileall -qq -j0 -x '/tests/|/transformers/models/(?!auto/|__init__)' src $(1)/lib/python*/site-packages || true

define INSTALL
@echo "installing $(1) into $(VENV) (once) ..."
@$(PIP) -e '.[$(2)]'
@$(call COMPILE,$(VENV))
@touch $@
endef

# The demo needs torch, numpy and scikit-learn; development needs the linters and the client libraries as well.
$(VENV)/.demo: $(VENV)/.python $(PACKAGING)
	$(call INSTALL,what the demo needs,demo)

$(VENV)/.docs: $(VENV)/.python $(PACKAGING)
	$(call INSTALL,what the documentation needs,docs)

$(VENV)/.dist: $(VENV)/.dev
	$(call INSTALL,what builds packages,dist)

$(VENV)/.dev: $(VENV)/.python $(PACKAGING)
	$(call INSTALL,the development tools,dev$(COMMA)demo)

# Everything but torch, and what torch asks for in a version of its own, as elsewhere.
.venv-torch-%/.dev: $(PACKAGING)
	@echo "installing torch $* and the development tools into .venv-torch-$* (once) ..."
	@$(PYTHON) -m venv .venv-torch-$*
	@grep -v -e '^torch==' -e '^sympy==' -e '^triton==' -e '^setuptools==' constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c .venv-torch-$*/constraints.txt -e '.[dev]' torch==$* numpy scikit-learn
	@$(call COMPILE,.venv-torch-$*)
	@touch $@

.venv-engines/.ready: $(PACKAGING)
	@$(PYTHON) -m venv .venv-engines
	@.venv-engines/bin/python -m pip install -qq --disable-pip-version-check -e . torchx==0.7.0 'ray[default]==2.60.0'
	@touch $@

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "make: no python3.11 or python3 on the PATH; try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: holdfast needs Python 3.11 or newer, $(PYTHON) is older; try make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -U pip # an older one takes a minute to choose versions
	@touch $@
