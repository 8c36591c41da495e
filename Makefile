# The short way in. Every target prepares what it needs (tools/bootstrap.sh) and does only what is missing.
# On an offline machine whose Python already has torch and the tools: make test PYTHON=python3 VENV=
VENV ?= .venv
PYTHON ?= python3
export VENV PYTHON
ifeq ($(VENV),)
python := PYTHONPATH=. $(PYTHON)
else
python := $(VENV)/bin/python
endif
STEPS := lint types budget layering cpp_tests cuda_build python_tests

.PHONY: help bootstrap demo test bench clean $(STEPS)

help:
	@echo "make demo    train a small GPT in FP8 and plot its loss (ARGS=... are passed on)"
	@echo "make test    all checks and tests; one alone: make $(STEPS)"
	@echo "make bench   measure and write benchmarks/results (ARGS=... are passed on)"
	@echo "make clean   remove build products; .venv stays"

bootstrap:
	@tools/bootstrap.sh

demo: bootstrap
	$(python) examples/train_gpt.py $(ARGS)

test: bootstrap
	@tools/steps.sh $(STEPS)

$(STEPS): bootstrap
	@tools/steps.sh $@

bench: bootstrap
	$(python) -m benchmarks $(ARGS)

clean:
	rm -rf build transformer_engine/_C*.so
