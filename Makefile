# make demo    a cluster on this machine, a dozen prompts through it, a table; then all stopped
# make serve   a cluster with the defaults, or CONFIG's, left running for `tandem chat`, `tandem generate`, `tandem status`, `tandem stop`
# make test    every test;  make check   formatter, linter, types, fresh stubs
#
# PYTHON  the interpreter the environment is made from      VENV   where it is; an existing one is used as it is
# TORCH   what to install when there is no torch yet        UCX    cu12 or cu13; else the one that fits torch

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
UCX ?=
CONFIG ?=
ARGS ?=

RUN := $(VENV)/bin/python
SETUP := $(PYTHON) scripts/environment.py --venv '$(VENV)' --torch '$(TORCH)' --ucx '$(UCX)'

.PHONY: demo serve stop doctor test check clean setup

demo: setup
	@$(RUN) -m cluster.cli demo --config '$(or $(CONFIG),deploy/demo.sla.yaml)' $(ARGS)

serve: setup
	@$(RUN) -m cluster.cli serve --detach $(if $(CONFIG),--config '$(CONFIG)') $(ARGS)

stop: setup
	@$(RUN) -m cluster.cli stop

doctor: setup
	@$(RUN) -m cluster.cli doctor

test: setup-test
	@$(RUN) -m pytest $(ARGS)

check: setup-dev
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) scripts/gen_proto.py --check

setup:
	@$(SETUP)

.PHONY: setup-test setup-dev
setup-test:
	@$(SETUP) --extra test

setup-dev:
	@$(SETUP) --extra test --extra dev

clean:
	@rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
