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
# Tests list here what they could not run. A list of an earlier run is no part of this one's.
export OVERBOOK_SKIPPED := $(TARGET)/skipped
# The client of etcd is built from its protocol's description.
export PROTOC := $(TOOLS)/bin/protoc
MDBOOK_VERSION := 0.5.4
DENY_VERSION := 0.20.2
DEB_VERSION := 3.8.0
# No directory of the machine that builds stands in a program.
CARGO_HOME ?= $(HOME)/.cargo
REMAPPED := $(CURDIR)=/overbook $(TARGET)=/target $(CARGO_HOME)=/cargo
RELEASE_RUSTFLAGS := $(addprefix --remap-path-prefix=,$(REMAPPED))
RELEASE := CFLAGS="$(CFLAGS) $(addprefix -ffile-prefix-map=,$(REMAPPED))" RUSTFLAGS="$(RUSTFLAGS) $(RELEASE_RUSTFLAGS)" $(CARGO)
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
INSTALL := $(ROOT) env DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install
LIBVIRTD := libvirt-daemon-system libvirt-clients

SITE := web/dist/site/index.html
NODE_MODULES := web/node_modules/.package-lock.json
WEB_SOURCES := $(shell find web/src web/public -type f ! -name api.d.ts) web/index.html web/openapi.json \
	web/vite.config.ts web/tsconfig.json
# Vite's oldest.
NODE_IS_THERE := command -v npm >/dev/null && node -e \
	'const [a, b] = process.versions.node.split(".").map(Number); \
	process.exit((a === 20 && b >= 19) || (a === 22 && b >= 12) || a > 22 ? 0 : 1)'
NODE_MISSING := the dashboard needs Node.js 20.19 or 22.12 and npm \
	(Debian 13: apt install nodejs npm; before: https://nodejs.org)

.PHONY: help demo test build older web guest libvirt libvirt-dev libvirtd lint unit api-test promtool loom fuzz e2e programs web-test chromium docs audit advisories experiments claims bench deb package-test upgrade-test lintian clean no-skips

help: ## This list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: build ## Six real guests in two groups, without Overbook and with it
	$(BIN)/overbook lab run quickstart

test: no-skips lint web ## Everything that CI runs
	@# Many unit tests wait. The programs and the guide are built in that time, at the lowest priority.
	@nice -n 19 $(MAKE) --no-print-directory programs docs & built=$$!; \
		trap "kill $$built 2>/dev/null || :" EXIT; \
		$(MAKE) --no-print-directory unit; wait $$built
	@$(MAKE) --no-print-directory api-test e2e web-test audit
	@if test -s $(OVERBOOK_SKIPPED); then echo "Not run on this machine:"; sort -u $(OVERBOOK_SKIPPED); \
		else echo "No test was skipped."; fi

no-skips:
	@rm -f $(OVERBOOK_SKIPPED)

build: guest web $(PROTOC) ## The binaries, optimised; with the dashboard, if there is Node.js
	$(RELEASE) build --locked --release -p overbook -p overbook-lab -p overbook-shim -p overbook-stand-in -p overbook-tracer

# Unoptimised, next to the others: for the test of upgrades. It shares all crates but those above the
# protocol with the tests' own build.
older: $(PROTOC) ## Daemon, worker and shim that speak the version of the protocol before
	$(CARGO) build --locked -p overbook -p overbook-shim -p overbook-protocol --features overbook-protocol/older
	mkdir -p $(BIN)/older
	install -m 755 $(TARGET)/debug/overbook $(TARGET)/debug/liboverbook_shim.so $(BIN)/older/

libvirt: libvirt-dev ## overbook-libvirt, optimised
	$(RELEASE) build --locked --release -p overbook-libvirt

# Without Node.js the program is built all the same; its page says how to build the dashboard.
web: ## The dashboard's files, in web/dist/site
	@if $(NODE_IS_THERE); then $(MAKE) --no-print-directory $(SITE); else \
		echo "web: NOT BUILT: $(NODE_MISSING)" >&2; fi

$(SITE): $(NODE_MODULES) $(WEB_SOURCES)
	cd web && npm run --silent build

$(NODE_MODULES): web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund

# Static, so that it runs in a guest that holds nothing else.
guest: ## The workload program that runs inside lab guests
	RUSTFLAGS="$(RUSTFLAGS) $(RELEASE_RUSTFLAGS) -C target-feature=+crt-static" \
		$(CARGO) build --locked --release -p overbook-guest --target $(TRIPLE)
	mkdir -p $(BIN)
	install -m 755 $(TARGET)/$(TRIPLE)/release/overbook-guest $(BIN)/overbook-guest

lint: libvirt-dev $(PROTOC) ## Format and lints; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	PROTOC=/none $(CARGO) clippy --locked -p overbook --no-default-features -- -D warnings

unit: loom libvirt-dev promtool $(PROTOC) ## Unit, property and simulator tests
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

# libFuzzer with the workspace's own compiler: these flags count the branches that an input reaches,
# and random bytes alone reach few. The corpus stays for the next time.
FUZZ_S ?= 300
FUZZ := $(TARGET)/fuzz
COUNTS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares

fuzz: ## Each fuzz target for FUZZ_S (300) seconds, with its corpus
	for crate in pages pageserver; do \
		(cd crates/$$crate/fuzz && cp ../../../Cargo.lock . && \
			RUSTFLAGS="$(COUNTS)" $(CARGO) build --release --target $(TRIPLE) --target-dir $(FUZZ)); \
		for source in crates/$$crate/fuzz/*.rs; do \
			target=$$(basename $$source .rs) corpus=$(FUZZ)/corpus/$$target; \
			kept=crates/$$crate/tests/fuzzed/corpus/$$target; \
			mkdir -p $$corpus $(FUZZ)/found; \
			echo "fuzz: $$target, $(FUZZ_S) s"; \
			$(FUZZ)/$(TRIPLE)/release/$$target -max_total_time=$(FUZZ_S) -verbosity=0 -print_final_stats=1 \
				-artifact_prefix=$(FUZZ)/found/$$target- $$corpus $$(test ! -d $$kept || echo $$kept); \
		done; \
	done

e2e: build libvirt libvirtd $(PROTOC) ## Tests on real guests, and the architecture's rules
	OVERBOOK_BIN=$(BIN) tests/lanes.sh $(CARGO) test --locked

programs: build libvirt $(PROTOC) ## Programs for the tests on real guests, and these tests; none is run
	$(CARGO) test --locked --no-run -p overbook-lab -p overbook-tests

upgrade-test: build older $(PROTOC) ## Twenty restarts and upgrades under load, with real guests
	OVERBOOK_BIN=$(BIN) $(CARGO) test --locked -p overbook-tests --test upgrade -- --ignored

web-test: build chromium ## The dashboard in Chromium, with a real daemon; as root
	@$(NODE_IS_THERE) || { echo "web-test: $(NODE_MISSING)" >&2; exit 1; }
	cd web && OVERBOOK_BIN=$(BIN) npm test --silent

chromium:
	@command -v "$${CHROMIUM:-chromium}" >/dev/null || { $(INSTALL) chromium || \
		{ $(ROOT) apt-get -q update && $(INSTALL) chromium; }; }

docs: libvirt-dev $(TOOLS)/bin/mdbook $(PROTOC) ## The user guide and the API documentation
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
	$(RELEASE) build --locked --release -p overbook-shim --features hot-set --target-dir $(TARGET)/hot-set
	install -m 755 $(TARGET)/hot-set/release/liboverbook_shim.so $(BIN)/liboverbook_shim_hot_set.so

claims: $(PROTOC) ## CLAIMS.md and docs/src/papers.md, from the claims in the code and the records in results
	$(CARGO) run --locked --release -p overbook-lab --bin overbook-lab -- claims

bench: ## Benchmarks; figures stand in CLAIMS.md
	$(RELEASE) bench --locked -p overbook-sim -p overbook-pages

deb: build libvirt $(TOOLS)/bin/cargo-deb ## Debian packages: Overbook, its lab, its libvirt part, and symbols
	@test -e $(SITE) || { echo "deb: $(NODE_MISSING)" >&2; exit 1; }
	rm -rf $(PAGES) $(TARGET)/debian
	mkdir -p $(PAGES)/{man,lab,libvirt,completions}
	$(BIN)/overbook man $(PAGES)/man
	rm $(PAGES)/man/overbook-{lab,libvirt}.8
	cp packaging/man/overbook-{guest.1,lab.8} $(PAGES)/lab
	cp packaging/man/overbook-libvirt.8 $(PAGES)/libvirt
	gzip -9n $(PAGES)/*/*.[158]
	for shell in bash zsh fish; do \
		$(BIN)/overbook completions $$shell > $(PAGES)/completions/overbook.$$shell; \
	done
	for package in overbook overbook-lab overbook-libvirt; do \
		$(TOOLS)/bin/cargo-deb -p $$package --no-build --locked; \
	done

# Apart from `test`, for it waits for the minute in which nothing is taken, and builds the packages.
package-test: deb lintian $(PROTOC) ## The packages: lintian, and a clean Debian with systemd from the installation to the purge; as root
	lintian --fail-on error,warning $(TARGET)/debian/*.deb
	OVERBOOK_DEB=$$(echo $(TARGET)/debian/overbook_*.deb) OVERBOOK_BIN=$(BIN) \
		$(CARGO) test --locked -p overbook-tests --test package -- --ignored

lintian:
	@command -v lintian >/dev/null || { $(INSTALL) lintian || \
		{ $(ROOT) apt-get -q update && $(INSTALL) lintian; }; }

# Installed by the distribution's package; only overbook-libvirt links it.
libvirt-dev:
	@pkg-config --exists libvirt || { $(INSTALL) libvirt-dev pkg-config || \
		{ $(ROOT) apt-get -q update && $(INSTALL) libvirt-dev pkg-config; }; }

# For its test, which hides the host's own libvirt and starts another one. The test itself unpacks
# a newer libvirt into the lab's cache.
libvirtd:
	@test -x /usr/sbin/libvirtd || { $(INSTALL) $(LIBVIRTD) || \
		{ $(ROOT) apt-get -q update && $(INSTALL) $(LIBVIRTD); }; }

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
	rm -rf docs/book web/dist/site web/node_modules web/test-results
