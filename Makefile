# `make book` and `make test` are all a reader needs; `make help` lists the rest.
#
#   PIP_ARGS="..."   passed through to pip by `make setup`
#   CH=03            one chapter, for `make test` and `make chapters`
#   STRICT=1         warnings are errors, for `make book`
#   JOBS=2           test processes (default: one for each core, at most 8)

.DEFAULT_GOAL := help
.PHONY: help setup lab chapters book test lint bench doctor test-gpu clean

PIP_ARGS ?=
LAB_ARGS ?=
CH ?=
STRICT ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -gt 8 ] && n=8; echo "$$n")
BENCH ?= ceilings

VENV := .venv
PY := $(VENV)/bin/python
LOCK := $(shell nvidia-smi >/dev/null 2>&1 && echo requirements-gpu.txt || echo requirements-cpu.txt)
# The stamp's name changes with what is to be installed, so that setup runs again when, and only when, that changed.
KEY := $(shell { cat $(LOCK) pyproject.toml; pwd; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.set-up-$(LOCK:.txt=)-$(KEY)

# Where there is no .venv, test-gpu takes the Python at hand: a machine with a GPU often has its own torch.
ANY_PY := $(shell [ -x $(PY) ] && echo $(PY) || echo python3)

define FIND_PYTHON
found=; \
for candidate in python3 python3.13 python3.12 python3.11 python3.14; do \
  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
    found=$$candidate; \
    if $$candidate -c 'import venv, ensurepip' >/dev/null 2>&1; then break; fi; \
  fi; \
done; \
if [ -z "$$found" ]; then \
  echo "kvlab needs Python 3.11 or newer and found none: tried python3, python3.11 to python3.14." >&2; exit 1; \
fi; \
if ! $$found -c 'import venv, ensurepip' >/dev/null 2>&1; then \
  echo "$$found has no venv module: install it (on Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; \
fi
endef

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP) ## the environment, in .venv

$(STAMP):
	@$(FIND_PYTHON); \
	echo "Setting up .venv with $$($$found --version) from $(LOCK); the first time takes a few minutes."; \
	if [ -x $(PY) ] && $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then :; \
	else rm -rf $(VENV) && $$found -m venv $(VENV); fi
	@$(PY) -m pip install --disable-pip-version-check -r $(LOCK) $(PIP_ARGS)
	@$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat --editable .  # a plain path: found also from the folder that holds the clone
	@rm -f $(VENV)/.set-up-* && touch $@
	@echo "Set up. Next: make lab, make book or make test."

lab: $(STAMP) ## JupyterLab, opened on chapters/
	$(PY) -m jupyterlab --notebook-dir=. --LabApp.default_url=/lab/tree/chapters $(LAB_ARGS)

chapters: $(STAMP) ## pair each chapter's .md and .ipynb and execute it in place
	$(PY) book/bookmaker.py chapters $(CH)

book: $(STAMP) ## execute copies of the chapters and build the site in book/_build/html
	$(PY) book/bookmaker.py book $(if $(STRICT),--strict)

test: $(STAMP) lint ## everything: lint, unit tests, chapters, solutions, the site
	tests="$(if $(CH),$$($(PY) book/bookmaker.py tests $(CH)))" && \
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout=600 $$tests

lint: $(STAMP) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP) ## this machine's figures: make bench BENCH=ceilings
	$(PY) -m kvlab.bench $(BENCH)

doctor: ## what this machine gives, what is missing, and the command that mends it
	@$(ANY_PY) kvlab/doctor.py

test-gpu: ## tests and chapters on a machine with a GPU, with or without Jupyter
	$(ANY_PY) -m pytest tests
	for chapter in chapters/*_*.md chapters/solutions/*_*.md; do \
	  $(ANY_PY) -m kvlab.run_chapter $$chapter || exit 1; \
	done

clean: ## remove what was built; keep .venv
	rm -rf book/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
