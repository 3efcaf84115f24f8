# Two commands for users: make demo, make test. Each sets up .venv by itself on a machine with only Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
QUICK := tests/training tests/contracts/test_codec_contract.py tests/contracts/test_gossip_family.py tests/test_imports.py \
	$(addprefix tests/transport/test_,wire.py framing.py peer_queue.py admission.py) \
	tests/peerd/node tests/peerd/membership tests/peerd/protocol tests/peerd/local/test_board.py

# exec: a shell between make and what it runs would die alone of a signal, and the tests would run on
# tests start hundreds of interpreters: where the environment says so, each compiles all that it imports
test thorough quick scripts soak: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test thorough quick scripts check soak fuzz bench format clean

demo: .venv/installed
	$(BIN)/peerd demo

test: .venv/installed
	exec $(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not soak and not scripts"

# all cases and examples, of which make test draws some: a quarter of an hour
thorough: .venv/installed
	exec $(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not soak and not scripts" --all-cases --hypothesis-profile=thorough

# for whoever changed one core: what has no process, no socket and no simulated hour
quick: .venv/installed
	exec $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak and not scripts" --hypothesis-profile=quick $(QUICK)

scripts: .venv/frameworks
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m scripts

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p peerd
	$(BIN)/mypy benchmarks
	$(BIN)/mypy tests
	$(BIN)/python -m pytest -q tests/test_imports.py

soak: .venv/installed
	$(BIN)/python -m pytest -q -m soak

# SECONDS of mutated input for all TARGETS, or led by coverage for one: make fuzz GUIDED=nodes
fuzz: SECONDS ?= 60
fuzz: SEED ?= 0
fuzz: .venv/installed
	PYTHONPATH=tests/training:tests/simulation exec $(BIN)/python $(if $(GUIDED),tests/fuzz/guided.py $(GUIDED) -max_total_time=$(SECONDS) \
		-seed=$(SEED),tests/fuzz/fuzz.py --seconds $(SECONDS) --seed $(SEED) $(TARGETS))

bench: .venv/installed
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/datapath.py
	$(BIN)/python benchmarks/loop_latency.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/installed: pyproject.toml constraints.txt training/kernels/kernels.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "peerd needs Python 3.11 or later; set PYTHON=")'
	@test -d .venv || echo "setting up .venv: 1.5 GB with torch for the CPU, several more where pip takes the one with CUDA; some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/frameworks: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	touch $@

clean:
	rm -rf training/kernels/*.so .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
