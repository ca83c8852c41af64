# Everything a fresh machine needs: python3 (3.11 to 3.13) and make.
#   make demo       set up, measure every KV format on the embedded model, write demo/report.html
#   make test       set up, lint, types, architecture, tests
#   make test-long  the tests that take minutes
#   make sanitize   the C++ kernels' tests under Address-, UndefinedBehavior- and ThreadSanitizer (gcc)
#   make arm        the portable C++ kernels on an emulated Arm CPU (aarch64-linux-gnu-g++, qemu-aarch64-static)
#   make docs       the documentation as a site, in build/docs/index.html
#   make wheel      a wheel with the C++ kernels for every CPU of this kind, in dist/, tried in an environment of its own
#   make resolve    whether pip can resolve every extra; EXTRAS=vllm for some
#   make fuzz       everything from outside, made up and broken, for an hour; FUZZ_SECONDS=60 for a minute
#   make scale      kvq inside vLLM, LMCache, Ray Serve and Dynamo, each in an environment of its own in
#                   build/scale (some gigabytes, once); scale-vllm, scale-lmcache, scale-ray, scale-dynamo for one
#   make real       real models, texts and tasks for python -m benchmarks.real in ../kvq-real (docs/real.md);
#                   REAL=folder for another one outside the clone, MODELS=smollm2,qwen05 for some,
#                   RIVALS=1 for other engines, too
#   make gpu        check and measure all that runs on an NVIDIA GPU, without installing anything (docs/gpu.md);
#                   PARTS=facts,tests,decode for some, OUT=folder, MINUTES=9

SHELL := /bin/bash
comma := ,
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter of a version that torch supports; override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done)

# The C++ kernels; when one changes, they are compiled anew.
NATIVE := setup.py $(shell find kvq/kernels -name '*.cpp' -o -name '*.h')
# What a compiler said that failed
UNBUILT := kvq/kernels/native/not_built.txt

.PHONY: demo docs test test-long fuzz sanitize sanitize-address sanitize-thread arm gpu real lint setup setup-demo wheel resolve clean

demo: setup-demo
	@echo 'kvq: measuring ten KV formats on the embedded model: about a minute'
	$(BIN)/kvq demo --out demo
	@echo 'kvq is in $(BIN): . $(BIN)/activate'

test: lint
	# D378: bytecode is kept: rewritten assertions are half of collection
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
		$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" --durations=10

test-long: setup
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m long --durations=10

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'the documentation is in build/docs/index.html'

fuzz: setup
	$(BIN)/python -m benchmarks.fuzz --seconds $(or $(FUZZ_SECONDS),3600)

SANITIZED := tests/kernels/adapters tests/kernels/attend/test_attend.py tests/kernels/attend_latent tests/kernels/write_kv tests/kernels/gather_dense tests/kernels/seal \
	tests/kernels/merge_partials tests/kernels/copy_blocks tests/kernels/experts tests/kernels/linear tests/kernels/rms_norm \
	tests/kernels/rope tests/kernels/test_decoder.py tests/kernels/native tests/models/loading/test_fused_layers.py \
	tests/models/test_aside.py
define sanitize  # kinds, preloaded libraries
	rm -rf build/sanitize
	KVQ_SANITIZE=$(1) $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/temp
	LD_PRELOAD="$(foreach lib,$(2) stdc++,$(shell gcc -print-file-name=lib$(lib).so))" ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=suppressions=tests/kernels/native/tsan.supp:die_after_fork=0 \
	KVQ_TEST_KERNELS=build/sanitize OMP_NUM_THREADS=2 setarch -R \
	$(BIN)/python -m pytest -q -s -p no:cacheprovider -m "not long" -k "not triton and not reference and not openmp" $(SANITIZED)
endef

sanitize: sanitize-address sanitize-thread

sanitize-address: setup
	$(call sanitize,address$(comma)undefined,asan ubsan)

sanitize-thread: setup
	$(call sanitize,thread,tsan)

# Built alike for this CPU and for Arm, with the flags of setup.py for each source.
PORTABLE := -O3 -std=c++17 -fno-math-errno -fno-exceptions -fno-rtti -Wno-psabi -pthread -DKVQ_VARIANT=portable
define check_portable  # compiler, folder
	mkdir -p $(2)
	for name in attend merge_partials copy_blocks; do \
		$(1) $(PORTABLE) -ffp-contract=fast -c kvq/kernels/$$name/$$name.cpp -o $(2)/$$name.o || exit 1; done
	for name in native/pool adapters/adapters write_kv/write_kv gather_dense/gather_dense seal/seal \
		linear/linear linear/blocks linear/block_pack linear/mlp linear/pack linear/rows \
		experts/experts rms_norm/rms_norm rope/rope decoder/decoder decoder/stack; do \
		$(1) $(PORTABLE) -ffp-contract=off -c kvq/kernels/$$name.cpp -o $(2)/$$(basename $$name).o || exit 1; done
	$(1) -O1 -std=c++17 -pthread -DKVQ_VARIANT=portable tests/kernels/native/check.cpp $(2)/*.o -static -o $(2)/check
endef

arm:
	rm -rf build/arm build/here
	$(call check_portable,aarch64-linux-gnu-g++,build/arm)
	$(call check_portable,g++,build/here)
	qemu-aarch64-static build/arm/check | tee build/arm/found
	build/here/check > build/here/found
	diff build/arm/found build/here/found && echo "codes and scales are bit-equal to this CPU's"

gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(PARTS),--parts $(PARTS)) \
		$(if $(OUT),--out $(OUT)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RIVALS),--rivals $(RIVALS))

REAL := ../kvq-real
real: setup-demo
	$(BIN)/python -m benchmarks.real.fetch --folder $(REAL) $(if $(MODELS),--models $(MODELS)) \
		$(if $(RIVALS),--rivals)

SCALES := vllm lmcache ray dynamo
.PHONY: scale $(SCALES:%=scale-%)
scale: $(SCALES:%=scale-%)

$(SCALES:%=scale-%): scale-%: build/scale/%/.ready
	TOKENIZERS_PARALLELISM=false build/scale/$*/bin/python -m pytest tests/scale/$*

# requirements.txt as pip resolves it, then what is taken without its own requirements, and kvq in its place.
build/scale/%/.ready: tests/scale/%/requirements.txt tests/scale/%/bare.txt $(NATIVE) | $(VENV)/.dev $(VENV)/.kernels
	test -x build/scale/$*/bin/python || $(BIN)/python -m venv build/scale/$*
	build/scale/$*/bin/python -m pip install --quiet --disable-pip-version-check -r tests/scale/$*/requirements.txt
	build/scale/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/scale/$*/bare.txt
	KVQ_VARIANTS=none build/scale/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

setup: $(VENV)/.dev $(VENV)/.kernels
setup-demo: $(VENV)/.demo $(VENV)/.kernels-here

# kvq without its kernels, which the next step compiles where one sees it.
define install  # extra, and what it brings
	@echo 'kvq: installing $(2) into $(VENV): a minute, and what downloading takes'
	KVQ_VARIANTS=none $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[$(1)]' 'setuptools>=77'
endef

$(VENV)/.dev: $(VENV)/.created
	$(call install,dev,torch$(comma) all that kvq can use$(comma) and the tools of its tests)
	@touch $(VENV)/.dev $(VENV)/.demo

$(VENV)/.demo: $(VENV)/.created
	$(call install,standard,torch$(comma) transformers and what every command needs)
	@touch $(VENV)/.demo

# For every CPU of this kind, as tests and wheels need them, or for this one alone, which takes a quarter of the time.
$(VENV)/.kernels: $(NATIVE) | $(VENV)/.dev
	$(BIN)/python setup.py -q build_ext --inplace
	@test -e $(UNBUILT) || touch $(VENV)/.kernels $(VENV)/.kernels-here

$(VENV)/.kernels-here: $(NATIVE) | $(VENV)/.demo
	KVQ_VARIANTS=here $(BIN)/python setup.py -q build_ext --inplace
	@rm -f $(VENV)/.kernels
	@test -e $(UNBUILT) || touch $(VENV)/.kernels-here

wheel: $(VENV)/.created
	rm -rf dist build/wheel build/lib*
	@echo 'kvq: compiling the C++ kernels for every CPU of this kind and packing them: 1 to 3 minutes'
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@echo 'kvq: installing it into an environment of its own, with what it requires alone, to try it: a minute or more'
	$(BIN)/python -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/wheel && bin/python $(CURDIR)/tools/check_wheel.py
	@ls dist/*.whl

resolve: $(VENV)/.created
	$(BIN)/python tools/resolve.py $(EXTRAS)

$(VENV)/.docs: $(VENV)/.created
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		mkdocs mkdocs-material 'mkdocstrings[python]' ruff
	@touch $(VENV)/.docs

$(VENV)/.created: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvq needs Python 3.11, 3.12 or 3.13 as python3; found: $$(python3 --version 2>&1). Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || echo 'kvq: making a virtual environment in $(VENV): some seconds'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3 can't make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@touch $(VENV)/.created

clean:
	rm -rf $(VENV) demo build dist *.egg-info kvq/kernels/native/_kernels*.so $(UNBUILT)
