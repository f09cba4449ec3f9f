//! Runs every seed and every kept input through its target: an earlier finding stays found.

#[test]
fn seeds_and_kept_inputs_pass() {
    for target in fuzz::TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{} has no seed", target.name);
        let kept = fuzz::corpus::kept(target.name).unwrap();
        println!("{}: {} seeds, {} kept inputs", target.name, seeds.len(), kept.len());
        for input in seeds.iter().chain(&kept) {
            assert!(input.len() <= target.input_bytes_max, "{}: an input is too long", target.name);
            if std::panic::catch_unwind(|| (target.run)(input)).is_err() {
                panic!("{}: this input panics (the reason is above): {}", target.name, fuzz::corpus::show(input));
            }
        }
    }
}

/// Cuts every seed at any place and changes a byte of it, without a fuzzer: the same on every
/// machine.
#[test]
fn damaged_seeds_pass() {
    for target in fuzz::TARGETS {
        for seed in (target.seeds)() {
            let steps = seed.len().min(64);
            for at in (0..steps).map(|step| step * seed.len() / steps) {
                let mut changed = seed.clone();
                changed[at] ^= 0x81;
                (target.run)(&changed);
                (target.run)(&seed[..at]);
            }
        }
    }
}
