# Every target makes what it needs: `make demo` and `make test` work on a fresh clone with Python and make.
PYTHON ?= python3
SEEDS ?= 1
PYTEST ?=  # more arguments of pytest, for example --cov
BIN := .venv/bin

.PHONY: install demo test test-slow test-newest mutants bench lint format docs docs-check docs-pictures docs-serve
.PHONY: notebooks dist clean

install: .venv/.dev
demo: .venv/.dev
	$(BIN)/python examples/demo.py --seeds $(SEEDS)
test: .venv/.dev
	$(BIN)/python -m pytest -m "not slow and not newest" --durations=10 $(PYTEST)
test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow --durations=10 $(PYTEST)
test-newest: .venv/.dev  # limits of TorchRL, which a new version may have removed
	$(BIN)/python -m pytest -m newest $(PYTEST)
mutants: .venv/.dev  # one-line changes of the package that the tests must detect
	$(BIN)/python tests/mutants.py
bench: .venv/.benchmarks
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/memory.py
lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
docs: .venv/.docs  # into site/; warnings and broken links are errors
	CHECK_LINKS=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
docs-check: docs  # in headless Chromium: overflow, contrast, search
	$(BIN)/python docs/browser.py site
docs-pictures: docs  # of all pages, on wide and narrow screens, light and dark
	$(BIN)/python docs/browser.py site --pictures site/pictures
docs-serve: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve
notebooks: .venv/.dev  # the tutorials, into site/notebooks/
	$(BIN)/python docs/notebooks.py
dist: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python .ci/check_dist.py dist
clean:
	rm -rf .venv outputs site dist

# One stamp per extra: the environment is made once, and again after a change of pyproject.toml or constraints.txt.
.venv/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt pip
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[$*]'
	touch $@
