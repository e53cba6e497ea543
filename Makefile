# SPDX-License-Identifier: Apache-2.0
# Each target sets up what is missing first. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
ARGS ?=
TIMED = start=$$SECONDS; trap 'echo "make $@: $$((SECONDS - start)) s"' EXIT;

.PHONY: help setup demo test unit contract-test sim-test lint format bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | while IFS=$$'\t' read -r name what; do printf '  make %-14s %s\n' "$$name" "$$what"; done
	@echo "  ARGS='...' is handed on, for example: make test ARGS='-k layout', make demo ARGS='--arch glm', make bench ARGS='transfer'"

setup: ## make .venv ready: system packages, locked Python packages, native build (a second call does nothing)
	@.ci/setup.sh

demo: setup ## two engines, a proxy and real transfers; every answer compared with a single engine
	@$(TIMED) $(BIN)/tidal demo $(ARGS)

test: setup ## all tests: unit first, then end to end; pytest's last line holds the result and the time
	@$(BIN)/python -m pytest $(ARGS)

unit: setup ## only the tests that need no engine (minutes)
	@$(BIN)/python -m pytest -m "not e2e and not faults and not sanitizers" $(ARGS)

contract-test: setup ## our code against the real sources of vllm-ascend and vLLM 0.23, which are downloaded once (minutes)
	@$(BIN)/python -m tests.vllm_plugin.ascend.bed.sources
	@$(BIN)/python -m pytest -m contract tests/vllm_plugin/ascend $(ARGS)

sim-test: setup ## the AscendC kernels on simulated cores against their definitions, with planted faults and coverage (minutes)
	@$(BIN)/python -m pytest tests/ops_ascendc $(ARGS)

lint: setup ## formatting, style, types and spelling
	@$(TIMED) $(BIN)/ruff check .; \
	$(BIN)/ruff format --check .; \
	git ls-files -z '*.cpp' '*.h' | xargs -0 -r $(BIN)/clang-format --dry-run -Werror; \
	git ls-files -z | xargs -0 $(BIN)/codespell; \
	$(BIN)/mypy

format: setup ## rewrite Python and C++ in the project's format
	@$(TIMED) $(BIN)/ruff check --fix-only --quiet .; $(BIN)/ruff format .; git ls-files -z '*.cpp' '*.h' | xargs -0 -r $(BIN)/clang-format -i

bench: setup ## measure gather, transfer, prefill overhead, decode and capacity; one of them by its name
	@$(TIMED) $(BIN)/tidal bench $(ARGS)

clean: ## remove .venv and everything that was built
	@rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
