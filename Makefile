# Every target sets up what it needs; `make demo` and `make test` are all a new clone needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
CC ?= gcc
# Arguments for the program behind a target: make test ARGS="-k mask"
ARGS ?=
# Rounds of `make test-faults`, and seconds of `make soak` and `make fuzz`.
ROUNDS ?= 200
soak: TIME ?= 600
fuzz: TIME ?= 60
# Benches run beside the real vLLM where `make test-vllm` has made its environment.
BENCH_PY := $(firstword $(wildcard .venv-vllm/bin/python) $(PY))

C_TESTS := $(patsubst tests/c/%.c,build/c/%,$(wildcard tests/c/test_*.c))
C_FLAGS := -std=c11 -g -O1 -Wall -Wextra -Werror -Ikvmask/csrc \
	-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# What `make fuzz` runs, half of its time in C.
CLANG ?= clang
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/*.c))
# Inputs that `make fuzz-replay` makes for each of them.
REPLAYS ?= 200000
ASAN := build/asan
# What `make test-vllm` runs of vLLM itself: its connector's tests, whole engines, and the ways to
# deploy them.
VLLM_SUITES ?= $(shell python3 kvmask/versions.py)
VLLM_MODELS ?= llama gemma hybrid eagle
VLLM_MODES ?= one apart parts share fleet workers outage
# What `make test-ascend` runs: vllm-ascend's releases, and random cases of each.
ASCEND_SUITES ?= $(shell python3 kvmask/versions.py ascend)
ASCEND_CASES ?= 100000

.PHONY: help
help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup-demo setup-dev setup-vllm setup-fuzz
setup-demo setup-dev setup-vllm setup-fuzz: setup-%:
	@scripts/bootstrap.sh $*

.PHONY: demo
demo: setup-demo ## save, look up and load a request through a real store on this machine
	@$(PY) -m kvmask demo $(ARGS)

.PHONY: test
test: setup-dev test-c ## the tests, against a real store too
	$(PY) -m pytest $(ARGS)

.PHONY: test-c
test-c: $(C_TESTS) ## the C headers' own tests, with sanitizers
	@for test in $(C_TESTS); do echo "$$test"; "$$test"; done

build/c/%: tests/c/%.c $(wildcard tests/c/*.h kvmask/csrc/*.h)
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $< -o $@ -lm -ldl

# The paths of the C headers for 64-bit Arm, on any machine.
ARM_CC := aarch64-linux-gnu-gcc
ARM_RUN := qemu-aarch64-static
ARM_TESTS := $(C_TESTS:build/c/%=build/aarch64/%)

.PHONY: test-aarch64
test-aarch64: $(ARM_TESTS) ## the C headers' own tests for aarch64, by a cross compiler and an emulator
	@for test in $(ARM_TESTS); do echo "$$test"; $(ARM_RUN) -L /usr/aarch64-linux-gnu "$$test"; done

build/aarch64/%: tests/c/%.c $(wildcard tests/c/*.h kvmask/csrc/*.h)
	@mkdir -p $(@D)
	@command -v $(ARM_CC) $(ARM_RUN) >/dev/null || { echo "install gcc-aarch64-linux-gnu," \
		"libc6-dev-arm64-cross and qemu-user-static" >&2; exit 1; }
	$(ARM_CC) -std=c11 -O2 -Wall -Wextra -Werror -Ikvmask/csrc $< -o $@ -lm -ldl

.PHONY: fuzz
fuzz: setup-fuzz $(FUZZERS:%=build/fuzz/%) ## libFuzzer over the C headers, then a fuzzer of the public names: make fuzz TIME=600
	@for name in $(FUZZERS); do \
		mkdir -p build/fuzz/corpus/$$name; \
		build/fuzz/$$name -max_total_time=$$(($(TIME) / 2 / $(words $(FUZZERS)) + 1)) -max_len=512 \
			-artifact_prefix=build/fuzz/$$name- -print_final_stats=1 -verbosity=1 -close_fd_mask=1 \
			build/fuzz/corpus/$$name tests/fuzz/corpus/$$name 2>build/fuzz/$$name.log || \
			{ tail -n 40 build/fuzz/$$name.log >&2; exit 1; }; \
		echo "$$name: $$(sed -n 's/.*DONE *//p; s/stat::number_of_executed_units: */runs: /p' \
			build/fuzz/$$name.log | paste -sd ' ')"; \
	done
	$(PY) tests/fuzz/public_names.py --seconds $$(($(TIME) / 2)) $(ARGS)

.PHONY: fuzz-replay
fuzz-replay: $(FUZZERS:%=build/replay/%) ## run what the fuzzers have kept, and inputs made from it, always the same
	@for name in $(FUZZERS); do \
		printf '%s: ' "$$name"; build/replay/$$name tests/fuzz/corpus/$$name $(REPLAYS); \
	done

build/replay/%: tests/fuzz/%.c $(wildcard tests/c/*.[ch] kvmask/csrc/*.h)
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $< tests/c/replay.c -o $@ -lm -ldl

build/fuzz/%: tests/fuzz/%.c $(wildcard tests/c/*.[ch] kvmask/csrc/*.h)
	@mkdir -p $(@D)
	$(CLANG) $(C_FLAGS) -fsanitize=fuzzer $< -o $@ -ldl

.PHONY: build-asan
build-asan: setup-dev # with C asserts, too
	@rm -rf $(ASAN) && mkdir -p $(ASAN)
	@cp -r kvmask tests setup.py pyproject.toml $(wildcard README.md) $(ASAN)/
	@rm -f $(ASAN)/kvmask/_core*.so $(ASAN)/kvmask/_core.c
	@cd $(ASAN) && KVMASK_SANITIZE=1 $(CURDIR)/$(PY) setup.py -q build_ext --inplace \
		>build.log 2>&1 || { tail -n 40 build.log >&2; exit 1; }
	@grep -qa __assert_fail $(ASAN)/kvmask/_core*.so || { echo "the asserts are off" >&2; exit 1; }

# Reports go to files, because pytest takes what is written to stderr.
ASAN_REPORT := $(CURDIR)/$(ASAN)/report
IN_ASAN = cd $(ASAN) && \
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=6144:abort_on_error=1:log_path=$(ASAN_REPORT) \
	UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1:log_path=$(ASAN_REPORT) \
	PYTHONMALLOC=malloc PYTHONPATH=. $(CURDIR)/$(PY)
# Files whose tests build packages, run type checkers or read documents: slow, and not of the core.
NOT_IN_ASAN := docs docs_cli examples figures packaging public_api
SHOW_ASAN = { cat $(ASAN_REPORT).* 2>/dev/null || true; exit 1; }

.PHONY: test-asan
test-asan: build-asan fuzz-replay ## the Python tests and the fuzzers' inputs, with C asserts and sanitizers, in a copy
	$(IN_ASAN) tests/fuzz/public_names.py --runs 5000 --memory 0 || $(SHOW_ASAN)
	$(IN_ASAN) -m pytest -p no:cacheprovider -m "not store and not vllm and not gpu" \
		$(NOT_IN_ASAN:%=--ignore=tests/test_%.py) $(ARGS) || $(SHOW_ASAN)
	@! grep -lE 'ERROR|runtime error' $(ASAN_REPORT).* 2>/dev/null || $(SHOW_ASAN)

# Pythons of `make test-wheel`; each makes a wheel.
PYTHONS ?= python3

.PHONY: test-wheel
test-wheel: ## a wheel for each of PYTHONS, tested by the configured command: make test-wheel PYTHONS="python3.13 python3.14"
	python3 scripts/wheel_test.py $(ARGS) $(PYTHONS)

.PHONY: test-faults
test-faults: setup-dev ## random rounds of faults against a real store, every byte compared
	$(PY) tests/faults/rounds.py --rounds $(ROUNDS) $(ARGS)

.PHONY: test-late
test-late: setup-dev ## peers and masters that stop and go on: late bytes, and how long calls block
	$(PY) tests/faults/late.py
	$(PY) tests/faults/outage.py

.PHONY: soak
soak: setup-dev ## rounds of faults for TIME seconds, with steady memory
	$(PY) tests/faults/rounds.py --seconds $(TIME) $(ARGS)

.PHONY: test-vllm
test-vllm: setup-vllm ## the tests that compare with the real vLLM, in an environment of their own
	.venv-vllm/bin/python -m pytest -m vllm $(ARGS)
	for version in $(VLLM_SUITES); do .venv-vllm/bin/python scripts/vllm_suite.py $$version; done
	for model in $(VLLM_MODELS); do .venv-vllm/bin/python scripts/vllm_engine.py $$model; done
	.venv-vllm/bin/python scripts/vllm_modes.py $(VLLM_MODES)

.PHONY: test-ascend
test-ascend: setup-vllm ## compare with the real vllm-ascend's AscendStore, without an NPU
	for version in $(ASCEND_SUITES); do \
		.venv-vllm/bin/python scripts/ascend_source.py $$version; \
		export KVMASK_ASCEND_VERSION=$$version; \
		.venv-vllm/bin/python -m pytest tests/test_ascend_*.py $(ARGS); \
		.venv-vllm/bin/python scripts/ascend_suite.py $$version; \
		.venv-vllm/bin/python tests/ascend_oracle.py --cases $(ASCEND_CASES); \
	done
	.venv-vllm/bin/python bench/bench_ascend.py --check

.PHONY: bench
bench: setup-dev ## time kvmask, beside vLLM where it is installed
	$(BENCH_PY) -m pytest bench --benchmark-enable --benchmark-quiet --benchmark-timer=time.process_time \
		--benchmark-max-time=0.2 -o python_files='bench_*.py' -o python_functions='bench_*' $(ARGS)

.PHONY: bench-path
bench-path: setup-vllm ## time a request's whole path in vLLM, beside stock, with a live store
	.venv-vllm/bin/python bench/bench_vllm_path.py $(ARGS)

.PHONY: instructions
instructions: setup-dev ## count instructions per call and compare with the checked-in counts
	$(PY) bench/instructions.py $(ARGS)

.PHONY: replay
replay: setup-dev ## replay a request trace against a real store
	$(BENCH_PY) bench/replay.py $(ARGS)

.PHONY: lint
lint: setup-dev ## formatters in check mode, linters, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint kvmask  # it runs pycodestyle by name
	$(VENV)/bin/clang-format --dry-run -Werror kvmask/csrc/*.h $(wildcard tests/c/*.[ch] tests/fuzz/*.c)
	$(VENV)/bin/mypy

.PHONY: docs
docs: setup-dev ## check the documentation, and build it with the API reference into build/docs
	$(PY) scripts/check_docs.py
	$(PY) scripts/build_docs.py

.PHONY: figures
figures: setup-dev ## draw the pictures of the documentation again
	$(PY) scripts/figures.py $(ARGS)

.PHONY: format
format: setup-dev ## rewrite the sources as `make lint` wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i kvmask/csrc/*.h $(wildcard tests/c/*.[ch] tests/fuzz/*.c)

.PHONY: clean
clean: ## remove what was built; the environments stay
	rm -rf build dist *.egg-info kvmask/_core.c kvmask/_core*.so .pytest_cache .mypy_cache
	rm -rf .ruff_cache .hypothesis .benchmarks
	find $(wildcard kvmask tests bench scripts) -name __pycache__ -prune -exec rm -rf {} +
	rm -f .venv/.stamp-build .venv/.stamp-install .venv-vllm/.stamp-build .venv-vllm/.stamp-install
