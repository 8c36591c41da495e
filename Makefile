# Short commands for a checkout. Each target first installs or builds what it needs and is still missing (tools/bootstrap.sh).
# On an offline machine whose Python already has torch and the tools, run: make test PYTHON=python3 VENV=
VENV ?= .venv
PYTHON ?= python3
export VENV PYTHON
ifeq ($(VENV),)
python := PYTHONPATH=. $(PYTHON)
else
python := $(VENV)/bin/python
endif
STEPS := $(shell tools/steps.sh --list)

.PHONY: help bootstrap tools demo test format docs wheel soak bench clean $(STEPS)

help:
	@echo "make demo    train a small GPT in FP8 and plot its loss (ARGS=... are passed on)"
	@echo "make test    all checks and tests; one alone: make $(STEPS)"
	@echo "make format  rewrite the sources as lint wants them"
	@echo "make docs    build the documentation into build/docs and say where it is"
	@echo "make wheel   build wheels for other machines into dist, and try them"
	@echo "make soak    long tests of what must not break (ARGS=\"ops --seconds 600\")"
	@echo "make bench   measure and write benchmarks/results (ARGS=\"names\" for some)"
	@echo "make clean   remove build products; .venv stays"

bootstrap:
	@tools/bootstrap.sh

tools:
	@tools/bootstrap.sh tools

demo: bootstrap
	$(python) examples/train_gpt.py $(ARGS)

test: tools
	@tools/steps.sh

$(filter-out soak,$(STEPS)): tools
	@tools/steps.sh $@

format: tools
	@tools/steps.sh format

docs:
	@tools/docs.sh $(ARGS)

wheel:
	@tools/wheel.sh

soak: bootstrap
	$(python) tools/soak $(ARGS)

bench: bootstrap
	@tools/bench.sh $(ARGS)

clean:
	rm -rf build transformer_engine/_C*.so nvdlfw_inspect/_engine*.so nvdlfw_inspect/libyaml-cpp.so*
