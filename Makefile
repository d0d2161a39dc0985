# make setup     create .venv and install the library and what examples need (requirements-train.txt)
# make train     the main job: train the example language model on CPUs (2 processes, 4 minutes; set-up takes 2 more)
# make test      the tests, ruff among them; installs what they need first (requirements.txt)
# make test-all  those that are marked slow, too, mypy, those of torchtitan, which it installs, and
#                the core tests on other Pythons that are found (tests/README.md)
# make test-oldest  those that compile kernels with the oldest Triton that symmoe takes, that of torch 2.11
# make test-newest  core tests and those that compile kernels with the newest torch of the registry, in .venv-newest
# make lint      sizes and their bounds, ruff, and mypy --strict on the package
# make dist      wheel and sdist in dist/; the tests build and install them elsewhere
# make docs      the documentation with its pictures (make plots), into the folder site/
# make plots     the pictures of benchmarks in docs/images, from the committed records
#
# JOBS=1                  tests one after the other (needs no pytest-xdist)
# PYTHON=python3.12       another interpreter for the virtual environment
# PYTHON=... VENV=none    use that interpreter as it is (it has torch already), e.g. on a GPU machine

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
JOBS ?= 3
ARGS ?=

ifeq ($(VENV),none)
PY := "$(PYTHON)"
INSTALLED :=
DEVELOPS :=
TORCHTITAN :=
else
PY := "$(VENV)/bin/python"
INSTALLED := $(VENV)/installed
DEVELOPS := $(VENV)/develops
TORCHTITAN := $(VENV)/torchtitan
endif

export PYTHONPATH := $(CURDIR):$(PYTHONPATH)

# Isolated from that path: on it pip takes the checkout's egg-info for an installation that it cannot remove.
PIP := $(PY) -I -m pip

.PHONY: setup train test test-all test-oldest test-newest lint dist docs plots clean

setup: $(INSTALLED)
	$(PY) -c "import torch, symmoe; print('symmoe', symmoe.__version__, 'with torch', torch.__version__)"

$(VENV)/installed: pyproject.toml requirements-train.txt Makefile
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install --requirement requirements-train.txt
	touch $@

$(VENV)/develops: requirements.txt $(INSTALLED)
	$(PIP) install --requirement requirements.txt
	touch $@

# Some 80 MB, for two files of slow tests, which are skipped where it cannot be had.
$(VENV)/torchtitan: requirements-torchtitan.txt $(DEVELOPS)
	$(PIP) install --quiet --no-deps --requirement $< && touch $@ || echo "torchtitan's tests will be skipped"

train: setup
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node=$(RANKS) examples/train_lm.py $(ARGS)

lint: $(DEVELOPS)
	$(PY) tests/support/budgets.py
	$(PY) -m ruff check symmoe tests examples benchmarks docs
	$(PY) -m ruff format --check symmoe tests examples benchmarks docs README.md
	$(PY) -m mypy

# A file is of one worker, which starts its processes once; files come in the order of tests/conftest.py.
SPREAD := $(if $(filter 1,$(JOBS)),,-n $(JOBS) --dist loadfile --no-loadscope-reorder)
OTHERS ?= python3.10 python3.12 python3.13 python3.14
TEST_OTHERS = for python in $(OTHERS); do ! $$python --version >/dev/null 2>&1 || \
  $(MAKE) test PYTHON=$$python VENV=.venv-$$python TESTS='$(CORE:%=tests/%.py)' || exit 1; done
COMPILED := tests/kernels/test_fast_launch.py tests/kernels/test_*_compile.py
NEWEST := $(COMPILED) tests/project/test_torch_internals.py
CORE := project/test_import symm_mem/test_heap symm_mem/test_peers dispatch/test_oracle moe/test_gradients \
  grouped/test_grouped_linear moe/test_layer moe/test_schedules checkpoint/test_checkpoint


test-all: MARKED := -m 'not gpu'
test-all: $(TORCHTITAN)
test test-all: $(DEVELOPS)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(or $(TESTS),tests) $(MARKED) $(SPREAD) $(ARGS)
	$(if $(filter test-all,$@),$(TEST_OTHERS))

# In a folder of its own, because torch asks for another Triton: what the oldest refuses, a newer one may accept.
test-oldest: $(DEVELOPS)
	$(PIP) install --quiet --no-deps --upgrade --target .venv-oldest triton==3.6.0
	OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/.venv-oldest:$(PYTHONPATH)" $(PY) -m pytest $(COMPILED) $(SPREAD) $(ARGS)

test-newest:
	"$(PYTHON)" -m venv .venv-newest
	.venv-newest/bin/python -I -m pip install --quiet --upgrade --upgrade-strategy eager torch --editable '.[dev,checkpoint]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(CORE:%=tests/%.py) $(NEWEST) $(SPREAD) $(ARGS)

# The wheel is built from the unpacked sdist, by the setuptools that is installed.
dist: $(DEVELOPS)
	$(PY) -m build --no-isolation --outdir dist

# The variable silences a notice of mkdocs-material about versions of mkdocs to come.
docs: plots
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

plots: $(DEVELOPS)
	$(PY) benchmarks/plots.py docs/images

clean:
	rm -rf $(VENV) .venv-* .compiled runs build dist site *.egg-info
