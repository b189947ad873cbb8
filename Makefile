# One-word commands for learners and authors. Works with make 3.81 (macOS) and in a path with spaces.
PYTHON ?= python3
export PYTHON CPU TORCH
# If this is set, each of a thousand processes recompiles the course's modules.
unexport PYTHONDONTWRITEBYTECODE
# Terminals, `!commands` and kernels find the environment's programs.
RUN := PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/python
# All notebooks, or the notebooks whose names start with NB: make render NB=01
NOTEBOOKS = notebooks/$(NB)*.ipynb
NBGRADER = --ServerApp.jpserver_extensions=nbgrader.server_extensions
# One worker more than there are cores, at most 8: while some wait for processes, others work.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))

.PHONY: help own-venv lab doctor test nightly lint export workbook render bench gpu gpu-record bench-planner solution progress cheatsheet site course address

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

# Setup runs again only when the packages to install have changed.
.venv/installed-lab: pyproject.toml constraints.txt | own-venv
	@bash scripts/setup.sh ".[lab]" && touch $@

.venv/installed-site: pyproject.toml constraints.txt | own-venv
	@bash scripts/setup.sh ".[lab,site]" && touch $@ .venv/installed-lab

.venv/installed-test: pyproject.toml constraints.txt | own-venv
	@bash scripts/setup.sh ".[test]" && touch $@ .venv/installed-lab .venv/installed-site

# An environment created by another clone and shared through a link would run that clone's library.
own-venv:
	@bash scripts/setup.sh whose

# Jupyter refuses to run as root unless it is allowed to. Containers on rented GPUs run as root; since the server keeps its
# token and listens only to this machine, we allow it. scripts/lab/ has this server's defaults: no news, no nbgrader menus.
# A learner's own settings override them. The workspace, in workbook/.lab, starts with the welcome page and the contents.
lab: .venv/installed-lab ## set up and open JupyterLab on workbook/ (PYTHON=python3.12, CPU=1, LAB_ARGS="--no-browser --port 8899")
	@$(RUN) scripts/make_workbook.py --missing && \
	echo "Opening JupyterLab on workbook/, in some seconds. Ctrl-C twice ends it." && \
	$(RUN) -m jupyterlab --ServerApp.root_dir=workbook --LabApp.app_settings_dir="$$PWD/scripts/lab" \
		--LabApp.workspaces_dir="$$PWD/workbook/.lab" --log-level=ERROR --LabApp.log_level=ERROR \
		$(foreach name,formgrader validate_assignment assignment_list course_list,$(NBGRADER).$(name)=False) \
		$$([ "$$(id -u)" != 0 ] || echo --allow-root) $(LAB_ARGS)

# Before the environment exists, any Python 3 works.
doctor: ## report what this machine has, what will not work here, and why
	@python=.venv/bin/python; $$python -c "" 2>/dev/null || python="$(PYTHON)"; \
	command -v "$$python" >/dev/null || { echo "doctor: there is no $$python: install Python 3.11, 3.12 or 3.13" >&2; exit 2; }; \
	PATH="$$PWD/.venv/bin:$$PATH" "$$python" scripts/doctor.py

# The quick checks run first, but a failure does not stop later ones: one run shows all errors. Tests and notebooks share
# one pytest run, so that its summary covers both. One thread per process: if processes outnumber cores, OpenMP's threads
# spin-wait for one another (notebook 01 on two busy cores: 35 s with one thread, 70 to 210 with two). glibc keeps the
# memory of freed tensors (up to 1 GiB) instead of returning it to Linux and requesting it again page by page
# (notebook 10: 181 CPU-seconds instead of 189).
test: .venv/installed-test ## set up and run what CI runs: lint, the export check, tests, notebooks (K=zero: one notebook; WORKERS=1)
	@status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \
	$(RUN) -m pytest --nbmake --nbmake-timeout=300 --parts -n $(WORKERS) \
		$(if $(K),--concerning $(K)) tests notebooks || status=1; \
	exit $$status

nightly: .venv/installed-test ## run what takes minutes: blank notebooks, all GPU jobs on the CPU, all compiled configurations
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -m nightly tests

lint: .venv/installed-test ## check style, format, types, layers and exports, in notebooks too
	@status=0; \
	echo "Ruff"; $(RUN) -m ruff check . || status=1; $(RUN) -m ruff format --check --quiet . || status=1; \
	echo "Types"; $(RUN) -m mypy || status=1; \
	echo "Layers"; PATH="$$PWD/.venv/bin:$$PATH" lint-imports --no-logo >/dev/null || status=1; \
	echo "Export check"; $(RUN) scripts/export.py --check || status=1; \
	exit $$status

export: .venv/installed-lab ## copy the exercises' solutions from the notebooks into course_lib/
	@$(RUN) scripts/export.py

workbook: .venv/installed-lab ## write or update workbook/; cells that you have changed are kept
	@$(RUN) scripts/make_workbook.py

render: .venv/installed-test ## run the notebooks and keep their outputs; NB=01 for one notebook
	@$(RUN) scripts/render.py $(NOTEBOOKS)

bench: .venv/installed-test ## run the comparisons of benchmarks/, which write benchmarks/results/
	@status=0; for script in $(filter-out benchmarks/gpu.py benchmarks/record_inductor.py,$(shell grep -l __main__ benchmarks/*.py)); do \
	echo "$$script"; $(RUN) "$$script" || status=1; done; exit $$status

# No setup: a cluster's GPU node has its own torch and triton, and often no network.
gpu: ## run all GPU tests and timings; repeat to resume (OUT=gpu_run BUDGET=540 ONLY="fp8: linear")
	@$(if $(wildcard .venv/bin/python),$(RUN),$(PYTHON)) benchmarks/gpu.py --out "$(or $(OUT),gpu_run)" \
	--budget $(or $(BUDGET),540) $(if $(ONLY),--only "$(ONLY)") $(GPU_ARGS)

gpu-record: .venv/installed-test ## update benchmarks/results/ and notebooks 12 to 14b from the results of make gpu (OUT=gpu_run)
	@$(RUN) benchmarks/gpu.py --out "$(or $(OUT),gpu_run)" --record
	@$(RUN) scripts/render.py $(wildcard notebooks/12*.ipynb notebooks/13*.ipynb notebooks/14*.ipynb)

bench-planner: .venv/installed-test ## compare the planner with measured and published runs: benchmarks/results/planner.json
	@$(RUN) benchmarks/planner.py

solution: .venv/installed-lab ## show the solution of an exercise: make solution EX=01.3
	@$(RUN) scripts/exercises.py solution "$(EX)"

progress: .venv/installed-lab ## show which exercises pass
	@$(RUN) scripts/exercises.py progress

cheatsheet: .venv/installed-lab ## collect the cheatsheet rows of all notebooks on one page
	@$(RUN) scripts/cheatsheet.py

# No notebook is executed: the site shows the stored outputs. Unchanged pages are not rebuilt.
site: .venv/installed-site ## build the site: build/site/index.html
	@$(RUN) -m sphinx -q -W --keep-going -j auto -d build/doctrees -c docs . build/site

course: .venv/installed-lab ## for teachers: write an nbgrader course of all notebooks; your changes and submissions are kept (OUT=course)
	@$(RUN) scripts/make_course.py "$(or $(OUT),course)"

address: .venv/installed-lab ## write where the course is published to all files that link to it: make address REPOSITORY=https://github.com/you/course
	@$(RUN) scripts/address.py "$(REPOSITORY)"
