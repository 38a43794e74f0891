# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format docs reference bench clean

# Given again, it shows the finished comparison; `make clean` forgets it.
demo: .venv/demo
	$(BIN)/hardneg compare --data digits --seeds 3 --epochs 15 --batch-size 128 --out runs/demo \
	  --arm "simclr(temperature=0.5)" \
	  --arm "simclr(temperature=0.25)" \
	  --arm "hcl(temperature=0.5, beta=1, tau_plus=0.1)" \
	  --arm "simclr(temperature=0.5) @ proximity(num_candidates=200, refresh=11)" \
	  --arm "supcon(temperature=0.5)"

test: .venv/installed check
	$(BIN)/python -m pytest -n 2

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The pages of docs/reference that are generated from the code.
reference: .venv/installed
	$(BIN)/python tools/reference.py

# A site that needs no network: build/docs/index.html
docs: reference
	$(BIN)/zensical build --strict --clean

bench: .venv/installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/dense_loss.py
	$(BIN)/python benchmarks/global_batches.py
	$(BIN)/python benchmarks/mining.py --large
	$(BIN)/python benchmarks/audit.py

# Less than for the tests, and so quicker: the demo needs scikit-learn and accelerate.
.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[eval,train]'
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs/demo build .mypy_cache .pytest_cache .ruff_cache
