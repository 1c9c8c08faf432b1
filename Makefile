# A thin face over the presets of CMakePresets.json:
#
#   make profile    build and run the profiler; ARGS="--preset decode" hands it options
#   make test       build everything, run ctest and pytest
#   make lint       formatters, clang-tidy, ruff, mypy (pre-commit on all files)
#   make clean      remove builds and caches; what was fetched (.venv, third_party) stays
#
# Tools live in .venv. PRESET=cpu or PRESET=cuda overrides the choice below; PYTHON=python3.12 the
# interpreter .venv is made from.
PYTHON ?= python3
ARGS ?=

gpu := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
nvcc := $(shell for c in "$$CUDACXX" "$$CUDA_HOME/bin/nvcc" nvcc /usr/local/cuda/bin/nvcc; do \
    command -v "$$c" && break; done 2>/dev/null)
ifdef PRESET
    why := as asked
else ifeq ($(gpu),)
    PRESET := cpu
    why := no GPU here$(if $(nvcc), (nvcc is installed; PRESET=cuda compiles the GPU kernels anyway))
else ifeq ($(nvcc),)
    PRESET := cpu
    why := there is a GPU but no nvcc (install the CUDA toolkit or set CUDACXX)
else
    PRESET := cuda
    why := a GPU and nvcc
endif

# Relative to the checkout, whose path may have spaces.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CMAKE_GENERATOR ?= Ninja
pip := .venv/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: profile test lint clean configure
.DELETE_ON_ERROR:

profile: configure
	cmake --build build --target profile-attention
	./build/profile-attention $(ARGS)

test: .venv/test
	ctest --preset $(PRESET)
	.venv/bin/python -m pytest

lint: .venv/lint
	.venv/bin/pre-commit run --all-files

clean:
	rm -rf build build-* dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache .venv/test .venv/lint

configure: .venv/build
	@echo "fa101: $(PRESET) preset: $(why)"
	cmake --preset $(PRESET)

# Runs always; Ninja decides, and an unchanged library keeps its date.
build/libfa101.a: configure
	cmake --build build

.venv/build:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "fa101: $(PYTHON) is missing or older than 3.10 (PYTHON=... names another)"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	    echo "fa101: Python's venv is needed (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	$(pip) 'cmake>=3.25' ninja scikit-build-core nanobind
	@touch $@

# The package, editable, its extension linked to the library in build/: seconds.
.venv/test .venv/lint: .venv/%: build/libfa101.a csrc/bindings.cpp python/CMakeLists.txt pyproject.toml
	$(pip) --no-build-isolation --editable '.[$(if $(filter lint,$*),dev,test)]' \
	    -C cmake.define.FA101_PREBUILT=build -C build-dir=build/python
	@touch $@
