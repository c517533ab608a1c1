# `make demo` and `make test` set everything up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin

# Without PASSIVE, threads that wait for work keep a busy machine's cores from doing it.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: setup demo test test-browser test-slow test-wheel lint docs wheel bench bench-attacks bench-scaling clean

setup: .venv/installed

# What users get by `pip install`; the demo needs no more.
.venv/usable: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# And what tests, lint and types need.
.venv/installed: .venv/usable
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	@# They are compared with dent; what they depend on is not needed for that, and pins old packages.
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps robustbench torchattacks torchvision
	touch $@

# One model and its defense: under a third of the work of `dent evaluate` without flags, on as many batches.
demo: .venv/usable
	$(BIN)/dent evaluate --model resnet20-at --defense static --defense dent+ --out runs/demo

# A process for each core, each with one thread: small tensors gain nothing from more.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses auto --dist loadfile

# The pages in a real browser; where there is none, Debian's is installed.
test-browser: setup
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) || \
		echo "no Chromium and no way to install it: tests that need it are skipped"
	$(BIN)/python -m pytest --quiet -m browser tests

test-slow: setup
	$(BIN)/python -m pytest --quiet -m slow

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site, in site/: open site/index.html. A broken link is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel and a source archive in dist/, with the shipped weights and images.
wheel: .venv/usable
	rm -rf dist
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --outdir dist .
	test -z "$$(find dist -size +45M)"

# The wheel where nothing else is installed, from another folder.
test-wheel: wheel
	$(BIN)/python -m pytest --quiet -m slow tests/test_wheel.py

bench: setup
	$(BIN)/python benchmarks/defense.py --json benchmarks/defense.json

bench-scaling: setup
	$(BIN)/python benchmarks/scaling.py --json benchmarks/scaling.json

bench-attacks: setup
	$(BIN)/python benchmarks/attacks.py --json benchmarks/attacks.json

clean:
	rm -rf .venv dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
