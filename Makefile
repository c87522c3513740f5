# Two commands do everything: `make demo` shows Overbook at work on real guests, `make test` proves it.
# Both install what is missing: tools into TOOLS, QEMU and the guest's kernel into the lab's cache.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
CARGO ?= cargo
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
BIN := $(TARGET)/release
# What the package's description calls target/release/packaging; cargo-deb follows CARGO_TARGET_DIR there.
PAGES := $(BIN)/packaging
TRIPLE := x86_64-unknown-linux-gnu
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/overbook/tools
# The client of etcd is built from its protocol's description.
export PROTOC := $(TOOLS)/bin/protoc
MDBOOK_VERSION := 0.5.4
DENY_VERSION := 0.20.2
DEB_VERSION := 3.8.0

.PHONY: help demo test build guest lint unit api-test promtool loom e2e docs audit advisories experiments bench deb clean

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: build ## Six real guests in two groups, without Overbook and with it
	$(BIN)/overbook lab run quickstart

test: lint unit api-test e2e docs audit ## Everything that CI runs

build: guest $(PROTOC) ## The binaries, optimised
	$(CARGO) build --locked --release -p overbook -p overbook-lab -p overbook-shim -p overbook-stand-in -p overbook-tracer

# Static, so that it runs in a guest that holds nothing else.
guest: ## The workload program that runs inside lab guests
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static" \
		$(CARGO) build --locked --release -p overbook-guest --target $(TRIPLE)
	mkdir -p $(BIN)
	install -m 755 $(TARGET)/$(TRIPLE)/release/overbook-guest $(BIN)/overbook-guest

lint: $(PROTOC) ## Format and lints; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	PROTOC=/none $(CARGO) clippy --locked -p overbook --no-default-features -- -D warnings

unit: loom promtool $(PROTOC) ## Unit, property and simulator tests
	$(CARGO) test --locked --workspace --exclude overbook-tests --exclude overbook-lab
	$(CARGO) test --locked -p overbook-shim --features hot-set --test hot_set

# A test of its own, because it takes a while and needs a tool of 90 MB.
api-test: $(TOOLS)/schemathesis/bin/schemathesis $(PROTOC) ## Every path of the API with odd requests, against a real daemon
	SCHEMATHESIS=$< $(CARGO) test --locked -p overbook --test api_conformance -- --ignored

promtool: $(TOOLS)/bin/promtool ## Prometheus' own judge of metrics and rules, for the tests

# Built apart: `--cfg loom` swaps the atomics of everything below it.
loom: ## The ring between shim and worker, in every interleaving of its two ends
	RUSTFLAGS="--cfg loom" $(CARGO) test --locked --release --target-dir $(TARGET)/loom \
		-p overbook-protocol --test loom

e2e: build $(PROTOC) ## Tests on real guests, and the architecture's rules
	OVERBOOK_BIN=$(BIN) $(CARGO) test --locked -p overbook-lab -p overbook-tests

docs: $(TOOLS)/bin/mdbook $(PROTOC) ## The user guide and the API documentation
	$(TOOLS)/bin/mdbook build docs
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --locked --no-deps --workspace --document-private-items

audit: $(TOOLS)/bin/cargo-deny ## Licences, sources and duplicates of dependencies
	$(TOOLS)/bin/cargo-deny --locked --offline check bans licenses sources

# Apart from `audit`, for it needs the network: what was never looked up must not pass for looked up.
advisories: $(TOOLS)/bin/cargo-deny ## Known faults of dependencies; needs the network
	@$(TOOLS)/bin/cargo-deny --locked fetch db || { \
		echo "advisories: NOT CHECKED: the database of known faults cannot be reached" \
			"(https://github.com/RustSec/advisory-db)" >&2; exit 1; }
	$(TOOLS)/bin/cargo-deny --locked --offline check advisories

experiments: build ## Beside these, a shim with the paper's hot set: for meb-overhead and meb-imt
	$(CARGO) build --locked --release -p overbook-shim --features hot-set --target-dir $(TARGET)/hot-set
	install -m 755 $(TARGET)/hot-set/release/liboverbook_shim.so $(BIN)/liboverbook_shim_hot_set.so

bench: ## Benchmarks; figures stand in CLAIMS.md
	$(CARGO) bench --locked -p overbook-sim -p overbook-pages

deb: build $(TOOLS)/bin/cargo-deb ## A Debian package, in target/debian
	mkdir -p $(PAGES)/man $(PAGES)/completions
	$(BIN)/overbook man $(PAGES)/man
	for shell in bash zsh fish; do \
		$(BIN)/overbook completions $$shell > $(PAGES)/completions/overbook.$$shell; \
	done
	$(TOOLS)/bin/cargo-deb -p overbook --no-build --locked

# Debian's own, unpacked privately: nothing is installed.
$(PROTOC):
	mkdir -p $(TOOLS)/bin $(TOOLS)/protoc
	cd $$(mktemp -d) && download() { \
			apt-get -q download protobuf-compiler libprotobuf-dev $$(apt-cache depends --recurse \
				--important protobuf-compiler | grep -E '^libproto(c|buf)[0-9]'); \
		} && { download || { apt-get -q update && download; }; } && \
		for package in *.deb; do dpkg -x $$package $(TOOLS)/protoc; done
	printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s\nexec %s -I%s "$$@"\n' \
		$(TOOLS)/protoc/usr/lib/x86_64-linux-gnu $(TOOLS)/protoc/usr/bin/protoc \
		$(TOOLS)/protoc/usr/include > $@
	chmod +x $@

$(TOOLS)/bin/promtool:
	mkdir -p $(TOOLS)/bin
	cd $$(mktemp -d) && download() { apt-get -q download prometheus; } && \
		{ download || { apt-get -q update && download; }; } && \
		dpkg --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && \
		install -m 755 usr/bin/promtool $@

$(TOOLS)/schemathesis/bin/schemathesis: crates/overbook/tests/schemathesis.txt
	python3 -m venv $(TOOLS)/schemathesis
	$(TOOLS)/schemathesis/bin/pip install --quiet --requirement $<
	touch $@

$(TOOLS)/bin/mdbook:
	$(CARGO) install --locked --root $(TOOLS) mdbook@$(MDBOOK_VERSION)

$(TOOLS)/bin/cargo-deny:
	$(CARGO) install --locked --root $(TOOLS) cargo-deny@$(DENY_VERSION)

$(TOOLS)/bin/cargo-deb:
	$(CARGO) install --locked --root $(TOOLS) cargo-deb@$(DEB_VERSION)

clean: ## Everything that was built here
	$(CARGO) clean
	rm -rf docs/book
