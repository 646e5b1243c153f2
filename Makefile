# Two commands: `make book` and `make test`. Everything lands in .venv and _build.
PYTHON ?= python3
# another build or version of torch: make book TORCH='torch==2.12.0'
TORCH ?= torch==2.13.0
CONSTRAINTS := $(lastword $(sort $(wildcard constraints-*.txt)))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

help:               ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

book: .venv/ok      ## run the notebooks whose inputs changed and build the book (_build/html/index.html)
	$(BIN)/jupyter-book build book/

test: .venv/ok      ## run every test, the notebooks' stored outputs included
	$(BIN)/pytest --nbval

refresh: .venv/ok   ## run the notebooks and store their outputs as the new reference (NOTEBOOKS=01_decay for one)
	PYTHONPATH=book/_ext $(BIN)/python -m kvshot_book.refresh $(NOTEBOOKS)

clean:              ## remove the built book and the executed notebooks
	rm -rf _build book/notebooks

# asked for by name and not what .venv was made with: it is set up again
ifneq ($(origin TORCH),file)
ifneq ($(strip $(TORCH)),$(strip $(shell cat .venv/torch 2>/dev/null)))
.PHONY: .venv/ok
endif
endif

.venv/ok: pyproject.toml $(CONSTRAINTS) Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvshot needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv (a few minutes, once) ..."
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) -e '.[book,hub,test]'
	@echo '$(TORCH)' > .venv/torch
	@touch $@

.PHONY: help book test refresh clean
