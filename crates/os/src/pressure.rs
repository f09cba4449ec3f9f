//! Pressure stall information (PSI): the time that tasks waited for memory. The kernel's
//! Documentation/accounting/psi.rst describes it. The files of the machine and of a control group
//! (`memory.pressure`) have one format.

/// The file of the whole machine, below the proc file system.
pub const MACHINE: &str = "pressure/memory";

/// Whether the kernel reports the pressure of the machine: it has CONFIG_PSI and was not started
/// with `psi=0`, and `/proc` is mounted.
pub fn is_reported() -> bool {
    std::fs::read(std::path::Path::new("/proc").join(MACHINE)).is_ok()
}

/// The time in microseconds that some task was stalled, since the start of the machine or since the
/// control group was made. `None`: the text has no such number.
pub fn stalled_us(text: &str) -> Option<u64> {
    let some = text.lines().find(|line| line.starts_with("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("total=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_some_counts() {
        let text =
            "some avg10=4.50 avg60=0.91 avg300=0.00 total=681245\nfull avg10=2.10 avg60=0.12 avg300=0.00 total=3\n";
        assert_eq!(stalled_us(text), Some(681_245));
        assert_eq!(stalled_us("some total=3\n"), Some(3));
        assert_eq!(stalled_us("full total=1\nsome avg10=0.00 total=500"), Some(500));
        for odd in
            ["", "some", "some ", "full total=1", "some total=", "some total=-1", "some total=x", "something total=1"]
        {
            assert_eq!(stalled_us(odd), None, "{odd}");
        }
    }
}
