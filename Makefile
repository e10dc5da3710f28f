# make demo   a virtual environment, the package, and the main example
# make test   the same environment, and every test
# make paper  the paper's experiments, a reduced set: at most half an hour on two cores, resumable
# make dev    builds the extension in place, for work on the source
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test paper dev lint clean
demo: $(VENV)/installed
	$(BIN)/normalign demo

test: $(VENV)/installed
	$(BIN)/pytest

paper: $(VENV)/installed
	$(BIN)/python bench/paper_grokking.py --set reduced --jobs 2 --minutes 30 --runs build/paper_runs.jsonl

# Sources newer than the last install lead to a new one: a test never runs against an old build.
$(VENV)/installed: pyproject.toml CMakeLists.txt constraints.txt $(shell find csrc normalign -type f -not -name '*.so' -not -name '*.pyc')
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	NORMALIGN_EMU=$(or $(NORMALIGN_EMU),ON) $(BIN)/python -m pip install --quiet --constraint constraints.txt '.[dev]'
	touch $@

dev:
	cmake -S . -B build/dev -DSKBUILD_PROJECT_VERSION=dev -Dpybind11_DIR="$$($(PYTHON) -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$$(command -v $(PYTHON))" -DCMAKE_INSTALL_PREFIX="$(CURDIR)" -DNORMALIGN_CUDA=$(or $(NORMALIGN_CUDA),OFF) -DNORMALIGN_EMU=$(or $(NORMALIGN_EMU),ON)
	cmake --build build/dev --parallel 2
	cmake --install build/dev

lint:
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*')

clean:
	rm -rf build $(VENV) normalign/*.so
