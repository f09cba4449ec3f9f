//! Compiles the BPF programs (needs clang) into objects that the crate includes, and makes Rust's
//! side of their contract out of `intf.h` (needs bindgen).

use libbpf_cargo::SkeletonBuilder;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCES: &str = "src/bpf";
const CONTRACT: &str = "src/bpf/intf.h";

fn main() {
    println!("cargo:rerun-if-changed={SOURCES}");
    let Some(out) = std::env::var_os("OUT_DIR").map(PathBuf::from) else {
        panic!("build.rs runs under cargo only: OUT_DIR is not set");
    };
    if let Err(error) = translate_contract(&out.join("intf.rs")) {
        panic!("translating {CONTRACT} with bindgen failed (is the package bindgen installed?): {error}");
    }
    for name in ["tap", "layout_probe", "access_trace"] {
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

/// Writes the structures and constants of the contract as Rust. Each structure gets zerocopy's
/// traits, so that it is read from bytes, and made into bytes, without `unsafe`.
fn translate_contract(to: &Path) -> Result<(), String> {
    let options = ["--no-layout-tests", "--no-doc-comments", "--no-prepend-enum-name"];
    let made = Command::new("bindgen").args(options).arg(CONTRACT).output().map_err(|error| error.to_string())?;
    if !made.status.success() {
        return Err(String::from_utf8_lossy(&made.stderr).into_owned());
    }
    let rust = String::from_utf8(made.stdout).map_err(|error| error.to_string())?;
    let traits = "zerocopy::FromBytes, zerocopy::Immutable, zerocopy::IntoBytes, zerocopy::KnownLayout";
    let rust = rust.replace("#[repr(C)]", &format!("#[repr(C)]\n#[derive({traits})]"));
    std::fs::write(to, rust).map_err(|error| error.to_string())
}
