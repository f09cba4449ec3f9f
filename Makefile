# Everything a newcomer, a developer and CI run. On a fresh Debian 12 with Rust, `make demo` is the only command needed.

CARGO ?= cargo

# To build: the eBPF program (clang, llvm), libbpf (libelf-dev, zlib1g-dev, pkg-config, make, gcc).
# To run: fusermount3 (fuse3). To draw the demo's chart as PNG: a font.
PACKAGES := clang llvm libelf-dev zlib1g-dev pkg-config make gcc fuse3 fonts-dejavu-core
# Options of the demo, such as DEMO="--seconds 30 --seed 7"; `target/release/demo --help` lists them.
DEMO ?=

.PHONY: help deps build test demo check lint clean

help:
	@echo 'make demo    show what lent memory does for random reads, in about a minute'
	@echo 'make deps    install the Debian packages that are missing (as root)'
	@echo 'make build   build the release binaries, in target/release'
	@echo 'make test    run all tests; those that this machine cannot run say so'
	@echo 'make check   what CI runs: format, lints, tests, documentation'
	@echo 'make clean   remove everything that was built'

# Only what is missing is installed, so that this needs neither root nor a network once everything is there.
deps:
	@command -v $(CARGO) >/dev/null || { \
		echo 'Rust is missing: install the stable toolchain, then try again.' >&2; exit 1; }
	@if ! command -v dpkg-query >/dev/null; then \
		echo 'This is not Debian: install the counterparts of $(PACKAGES) yourself.' >&2; exit 0; fi; \
	missing=; \
	for package in $(PACKAGES); do \
		dpkg-query -W -f '$${db:Status-Status}' "$$package" 2>/dev/null | grep -qx installed || missing="$$missing $$package"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ]; then \
		echo "These packages are missing:$$missing. Install them as root: sudo apt-get install$$missing" >&2; exit 1; fi; \
	echo "Installing$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get install -y -q --no-install-recommends $$missing || \
		{ apt-get update -q && apt-get install -y -q --no-install-recommends $$missing; }

build: deps
	$(CARGO) build --release --workspace --bins

test: deps
	$(CARGO) test --workspace

demo: build
	target/release/demo $(DEMO)

check: lint test

lint: deps
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items

clean:
	$(CARGO) clean
