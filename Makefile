# Thin: each target calls a program. `lab/lab --help` has the finer verbs.
.DEFAULT_GOAL := help
.PHONY: help setup demo check test drills down clean docs locks

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## Debian packages, the control node's tools (.venv), the image of a lab host
	@lab/lab setup

demo: ## a real prefill/decode pair on this machine, deployed by site.yml, asked real questions
	@lab/lab demo

check: ## linters and unit tests
	@lab/lab check

test: ## check, then every role and the whole stack on lab hosts; SCENARIO="router site": these alone
	@lab/lab test $(SCENARIO)

drills: ## the long series
	@lab/lab drills

down: ## remove the lab hosts, keep the caches
	@lab/lab down --all

clean: ## remove everything but the Debian packages
	@lab/lab clean

docs: ## write the role READMEs anew from their argument_specs
	@.venv/bin/python tools/role_docs.py

locks: ## pin the control node's tools and the engine releases anew
	@lab/lab locks
	@.venv/bin/python tools/engine_locks.py
