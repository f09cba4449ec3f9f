//! The program that libFuzzer drives: one input after the other through the target that
//! `PUMA_FUZZ_TARGET` names.
#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<&fuzz::Target> = LazyLock::new(|| {
    let name = std::env::var("PUMA_FUZZ_TARGET").unwrap_or_default();
    fuzz::find(&name).unwrap_or_else(|| panic!("PUMA_FUZZ_TARGET={name:?} names no target"))
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| (TARGET.run)(input));
