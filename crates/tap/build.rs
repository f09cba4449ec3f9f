//! Compiles the BPF programs (needs clang) into objects that the crate includes.

use libbpf_cargo::SkeletonBuilder;
use std::path::{Path, PathBuf};

const SOURCES: &str = "src/bpf";

fn main() {
    println!("cargo:rerun-if-changed={SOURCES}");
    let Some(out) = std::env::var_os("OUT_DIR").map(PathBuf::from) else {
        panic!("build.rs runs under cargo only: OUT_DIR is not set");
    };
    for name in ["tap", "calibrate", "watch"] {
        let built = SkeletonBuilder::new()
            .source(Path::new(SOURCES).join(format!("{name}.bpf.c")))
            .obj(out.join(format!("{name}.bpf.o")))
            // v3 of the instruction set (Linux 5.12) has the atomic exchange.
            .clang_args(["-mcpu=v3", "-Wall", "-Wextra", "-Werror"])
            .build();
        if let Err(error) = built {
            panic!("compiling {SOURCES}/{name}.bpf.c failed (is clang, version 14 or newer, installed?): {error:#}");
        }
    }
}
