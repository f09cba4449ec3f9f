# Everything a newcomer, a developer and CI run. On a fresh Debian 12 with git, make, and Rust 1.95
# or newer by rustup (curl; root's own if run as root), `make demo` is the only command needed.

CARGO ?= cargo

# To build: the eBPF programs (clang, llvm), and Rust's side of them (bindgen); libbpf (libelf-dev,
# zlib1g-dev, pkg-config, make, gcc).
# To run: fusermount3 (fuse3). To draw the demo's chart as PNG: a font.
PACKAGES := bindgen clang llvm libelf-dev zlib1g-dev pkg-config make gcc fuse3 fonts-dejavu-core
# To test: fio, network namespaces (iproute2), captures (tshark), file systems (e2fsprogs, xfsprogs,
# btrfs-progs), a database, what reads metrics (python3-prometheus-client), what the POSIX suite is
# built with, and a C++ compiler for libFuzzer.
TEST_PACKAGES := fio g++ acl attr btrfs-progs e2fsprogs iproute2 libacl1-dev python3 python3-prometheus-client postgresql postgresql-contrib tshark xfsprogs
# To make the documentation's web site, and check it.
BOOK_PACKAGES := mkdocs python3
# To bench: the peers.
BENCH_PACKAGES := bindfs memcached mergerfs
# The papers' programs; with them go-tpc, which is built with Go.
PAPER_PACKAGES := coreutils git ncbi-blast+ postgresql postmark util-linux
# To test in a virtual machine.
VM_PACKAGES := qemu-system-x86 fio busybox-static cpio kmod e2fsprogs xfsprogs iproute2 dmsetup python3
# Where the public test programs are installed; set it to keep them when the checkout goes.
TOOLS ?= $(CURDIR)/target/tools
# Options of the demo, such as DEMO="--seconds 30 --seed 7"; `target/release/demo --help` lists
# them.
DEMO ?=

# The simulation (`make test` has fixed seeds): a seed to repeat (else fresh ones for two minutes),
# the steps of a run, and processes at once.
SEED ?=
STEPS ?= 20000
JOBS ?= $(shell nproc)
# Options of chaos and soak, such as CHAOS="--seconds 120 --seed 7";
# `target/release/chaos run --help` lists them.
CHAOS ?=

# Options of the hunter of races, such as HUNT="--seconds 60 --seed 7"; `target/release/hunt --help`
# lists them.
HUNT ?=

# Where xfstests is installed, and what of it is run, such as SUITE="-g quick generic".
XFSTESTS ?= /var/lib/xfstests
SUITE ?=

# Options of the fuzzing, such as FUZZ="--seconds 3600 --jobs 2 tap_ring";
# `cargo run -p fuzz -- --help` lists them.
FUZZ ?=

# Options of the benches, such as BENCH="--quick"; `bench/run --help` lists them.
BENCH ?=
# Which of the papers' experiments, and their options.
PAPER ?= all

.PHONY: help rust book book-deps deps bench-deps vm-deps vm build test test-programs bench microbench simulate rules test-long xfstests database test-deps tools interleavings fuzz fuzz-program sanitize miri deny demo \
	gossip chaos hunt races soak deb deb-check static static-check check check-fast lint clean paper paper-deps paper-packages

deps: WANTED := $(PACKAGES)
book-deps: WANTED := $(BOOK_PACKAGES)
bench-deps: WANTED := $(PACKAGES) $(BENCH_PACKAGES)
vm-deps: WANTED := $(PACKAGES) $(VM_PACKAGES)
test-deps: WANTED := $(PACKAGES) $(TEST_PACKAGES) $(BOOK_PACKAGES) $(BENCH_PACKAGES) $(PAPER_PACKAGES)
paper-packages: WANTED := $(PACKAGES) $(PAPER_PACKAGES) $(VM_PACKAGES)

help:
	@echo 'make demo    show what lent memory does for random reads, in about a minute'
	@echo 'make deps    install the Debian packages that are missing (as root)'
	@echo 'make build   build the release binaries, in target/release'
	@echo 'make test    run all tests; those that this machine cannot run say so'
	@echo 'make simulate    whole pools from fresh seeds for two minutes; SEED=n STEPS=n repeats a run'
	@echo 'make rules   break each rule of docs/design/consistency.md in turn: the simulation must catch it'
	@echo 'make gossip  up to a thousand nodes of a pool find each other, some 20 minutes'
	@echo 'make test-long   the public test programs at full length, some 20 minutes; then the hunter of races; xfstests if it is installed'
	@echo 'make xfstests    a public suite of file systems through a mount, an hour, as root; docs/design/checking.md says where it is from'
	@echo 'make fuzz    inputs that libFuzzer makes up, for every decoder, 5 minutes each'
	@echo 'make sanitize    tests under the address and the thread sanitizer; make miri: under Miri'
	@echo 'make chaos   lenders killed, stopped, squeezed, cut off, lying: some 5 minutes, as root'
	@echo 'make hunt    processes race on real mounts, and compare each read with a ledger: 5 minutes, as root'
	@echo 'make races   tests of races, each tried 10,000 times: some five minutes, as root'
	@echo 'make soak    a mixed load with such troubles for 10 minutes: does anything grow?'
	@echo 'make bench   all benches, with BENCH=--quick in some 20 minutes, as root; bench/run --list names them'
	@echo 'make microbench  store, catalog, codec and sealing, some two minutes'
	@echo 'make paper   the papers'"'"' experiments, as root; with PAPER="all --quick" in some 30 minutes'
	@echo 'make database    kill the daemon 20 times under PostgreSQL, some four minutes'
	@echo 'make vm      on the oldest kernel that is supported, in virtual machines: vsock, control groups of version 2, two machines, a guest and its host; some fifteen minutes'
	@echo 'make deb     a Debian package, in target/debian; make deb-check installs, upgrades and removes it, as root'
	@echo 'make static  a program that needs nothing but the kernel, target/static/pumapool; make static-check tries it, as root'
	@echo 'make check   what CI runs: format, lints, tests, documentation'
	@echo 'make check-fast  what needs neither root nor long: format, lints and unit tests of the logic'
	@echo 'make book    the documentation as a web site, in target/book; a link that leads nowhere fails'
	@echo 'make clean   remove everything that was built'

rust:
	@command -v $(CARGO) >/dev/null || { \
		echo 'Rust is missing: install the stable toolchain (rustup), 1.95 or newer, then try again.' >&2; exit 1; }

# Only what is missing is installed, so that this needs neither root nor a network once everything
# is there.
deps bench-deps vm-deps test-deps paper-packages: rust
deps book-deps bench-deps vm-deps test-deps paper-packages:
	@if ! command -v dpkg-query >/dev/null; then \
		echo 'This is not Debian: install the counterparts of $(WANTED) yourself.' >&2; exit 0; fi; \
	missing=; \
	for package in $(WANTED); do \
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
	$(CARGO) build --release

# Those that take longest begin first, so that nothing waits for one of them at the end.
LONGEST := pumapool/suites,simulation/rules,hunt/run,bench/run,pumapool/survival,pumapool/advise
test: test-programs
	TOOLS=$(TOOLS) tests/run --first $(LONGEST) '$(INTERLEAVINGS) -- interleavings' \
		'$${CARGO_TARGET_DIR:-target}/debug/fuzz --seconds 2 --jobs 2'

# All that `make test` runs, built and not run. What a build reads and writes fills the page cache,
# and lenders take only memory that nobody uses: so CI builds first, gives that memory back, and
# then tests.
INTERLEAVINGS := $(CARGO) test -p lender -p borrower --features lender/shuttle,borrower/shuttle --lib
test-programs: test-deps tools fuzz-program
	$(CARGO) test --workspace --no-run
	$(INTERLEAVINGS) --no-run

book: book-deps
	mkdocs build --strict --quiet
	packaging/book/check-links target/book

simulate: deps
	$(CARGO) run --quiet -p simulation -- --steps $(STEPS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

rules: deps
	$(CARGO) test -p simulation --test rules -- --nocapture every_broken_rule

# The figures of docs/user/discovery.md.
gossip: deps
	$(CARGO) test --release -p discovery --test convergence -- --ignored --nocapture

# Locked parts under every order of threads that shuttle tries. (The ring's reader is tried with
# loom, by the ordinary tests.) PUMA_SCHEDULES=100000 tries so many of each.
interleavings: deps
	$(INTERLEAVINGS) -- interleavings

# Coverage-guided, with the stable compiler. Only the crates of this workspace are built with
# counters of what runs and what is compared; all others are those of the test programs.
fuzz-program: test-deps
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/tests/fuzz/rustc-coverage $(CARGO) build --workspace \
		--features fuzz/libfuzzer --bin fuzz_target

fuzz: fuzz-program
	$(CARGO) run -q --workspace --bin fuzz -- $(FUZZ)

TRIPLE := x86_64-unknown-linux-gnu
# The sanitizers are unstable options of the stable compiler. What they cannot see through (BPF,
# other processes) is in the ordinary tests, as are loom's models, which are not of memory. The
# thread sanitizer wants a standard library that was built with it, hence rust-src.
SANITIZE = RUSTC_BOOTSTRAP=1 RUST_BACKTRACE=0 RUSTFLAGS=-Zsanitizer=$(1) $(CARGO) test --target $(TRIPLE) --target-dir target/$(1)
sanitize: test-deps
	@test -d "$$(rustc --print sysroot)/lib/rustlib/src/rust/library" || { \
		echo 'The sources of the standard library are missing: rustup component add rust-src' >&2; exit 1; }
	$(call SANITIZE,address) -p page -p wire -p fuse -p lender -p borrower -p mount -p fuzz
	$(call SANITIZE,address) -p tap -- --skip consume::tests
	$(call SANITIZE,thread) -Zbuild-std -p lender --lib --test server --test descriptors
	$(call SANITIZE,thread) -Zbuild-std -p borrower --lib --tests

# Under Miri goes what makes no system calls.
miri:
	@cargo +nightly miri --version >/dev/null 2>&1 || { \
		echo 'Miri is missing: rustup toolchain install nightly --component miri,rust-src' >&2; exit 1; }
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --target-dir target/miri -p page -p wire --lib -- --skip address --skip confined --skip key --skip secure --skip seal
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --target-dir target/miri -p borrower --lib -- logic --skip puts

test-long: test-deps tools
	TOOLS=$(TOOLS) PUMA_FSX_OPS=200000 $(CARGO) test -p pumapool --test suites -- --nocapture --test-threads 2
	$(MAKE) hunt
	test ! -e $(XFSTESTS)/check || $(MAKE) xfstests

# It is built from a repository of its own, hence not by this file.
xfstests: test-deps build
	XFSTESTS=$(XFSTESTS) crates/pumapool/tests/xfstests $(SUITE)

# Tests of races, each of which is tried 10,000 times.
races: test-deps
	PUMA_TRIES=10000 $(CARGO) test -p mount --test opening --test overtaken --test copies --test posix --test rights -- --nocapture

# PostgreSQL must not notice that the daemon under it is killed. Three kills of it are part of
# `make test`.
database: test-deps
	PUMA_DATABASE_KILLS=20 PUMA_DATABASE_SECONDS=60 PUMA_DATABASE_SCALE=20 \
		$(CARGO) test -p pumapool --test database -- --nocapture

# Its kernel is Debian 12's. The machine is emulated, so that this runs anywhere.
vm: vm-deps $(TOOLS)/bin/fsx
	tests/vm/run
	tests/vm/pair
	PATH="$(TOOLS)/bin:$$PATH" tests/vm/host-cache
	tests/vm/numa

# Public test programs: fsx (file system exerciser) and pjdfstest (POSIX suite).
tools: $(TOOLS)/bin/fsx $(TOOLS)/bin/pjdfstest

$(TOOLS)/bin/fsx:
	$(CARGO) install --quiet --locked --root $(TOOLS) fsx@0.3.2

$(TOOLS)/bin/pjdfstest: | test-deps
	$(CARGO) install --quiet --locked --root $(TOOLS) pjdfstest@0.2.2

$(TOOLS)/bin/cargo-deny:
	$(CARGO) install --quiet --locked --root $(TOOLS) cargo-deny@0.20.2

# Licences and sources of the dependencies. (Advisories need the network:
# `cargo deny check advisories`.)
deny: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --offline check licenses bans sources

$(TOOLS)/bin/cargo-deb:
	$(CARGO) install --quiet --locked --root $(TOOLS) cargo-deb@3.8.0

# With its man pages and completions, which the command makes of itself.
deb: build $(TOOLS)/bin/cargo-deb
	PATH="$(TOOLS)/bin:$$PATH" packaging/deb release

# Needs nothing of the machine that it runs on but the kernel. With --target, the compiler's
# plug-ins are not built in that way.
STATIC_TARGET = $(shell rustc -vV | sed -n 's/^host: //p')
static: deps
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build --release --target $(STATIC_TARGET) -p pumapool
	mkdir -p target/static
	install --strip $${CARGO_TARGET_DIR:-target}/$(STATIC_TARGET)/release/pumapool target/static/pumapool

# In a directory in which there is nothing else.
static-check: static
	packaging/static-check target/static/pumapool

deb-check: build $(TOOLS)/bin/cargo-deb
	PATH="$(TOOLS)/bin:$$PATH" packaging/check release

demo: build
	target/release/demo $(DEMO)

# Adds a line to bench/history.
bench: bench-deps
	bench/run all $(BENCH)

# The papers' experiments, as root; PAPER="random-read --quick" for one of them, roughly.
paper: paper-deps
	bench/paper/run $(PAPER)

paper-deps: paper-packages $(TOOLS)/bin/go-tpc

# At the version, and of the content, that bench/paper/go-tpc says. Built elsewhere: Go adds to its
# files what a main program would need.
$(TOOLS)/bin/go-tpc: bench/paper/go-tpc/go.mod bench/paper/go-tpc/go.sum
	@command -v go >/dev/null || { echo 'Go is missing: install 1.21 or later, then try again.' >&2; exit 1; }
	mkdir -p $(@D) target/go-tpc
	cp $^ target/go-tpc
	cd target/go-tpc && go build -mod=mod -o $(abspath $@) github.com/pingcap/go-tpc/cmd/go-tpc

# In one process, without a machine of its own: is a part slower than before?
microbench: deps
	$(CARGO) bench -p page -p wire -p lender -p borrower --benches

# Options go to both; each prints its seed, and ends with 0 only if all was well. Results:
# target/chaos, target/soak.
chaos: test-deps tools build
	TOOLS=$(TOOLS) target/release/chaos run --out target/chaos $(CHAOS)

soak: test-deps tools build
	TOOLS=$(TOOLS) target/release/chaos soak --out target/soak $(CHAOS)

# Looks for wrong bytes and lost stores; prints its seed, and ends with 0 only if there were none.
# Logs: target/hunt.
hunt: test-deps build
	target/release/hunt --out target/hunt $(HUNT)

check: lint deny test book

# What needs neither root nor long, for between two edits.
FAST := -p page -p wire -p mrc -p locks -p os -p fuse -p discovery -p borrower -p lender
check-fast: deps
	$(CARGO) fmt --all --check
	packaging/prose/check.py
	$(CARGO) clippy $(FAST) --all-targets -- -D warnings
	$(CARGO) test $(FAST) --lib

# These compile other code without debug assertions. (In the profile of all tests, so that nothing
# else is checked twice.)
WITHOUT_ASSERTIONS := --workspace --lib --exclude simulation --exclude fuzz $(foreach crate,borrower lender,--config profile.dev.package.$(crate).debug-assertions=false)
lint: deps
	$(CARGO) fmt --all --check
	packaging/book/check-bounds
	python3 -m doctest packaging/prose/check.py
	packaging/prose/check.py
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) check $(WITHOUT_ASSERTIONS)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --document-private-items

clean:
	$(CARGO) clean
