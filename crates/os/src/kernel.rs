//! The running kernel (uname(2)).

/// The release, such as `6.12.9-amd64`.
pub fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The major and the minor version. A number that the release lacks is 0.
pub fn version() -> (u32, u32) {
    version_of(&release())
}

fn version_of(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_begins_with_its_version() {
        for (release, version) in [
            ("6.1.0-13-amd64", (6, 1)),
            ("6.18", (6, 18)),
            ("7.0-rc1", (7, 0)),
            ("6-x", (6, 0)),
            ("", (0, 0)),
            ("x.y", (0, 0)),
            ("99999999999.1", (0, 1)),
        ] {
            assert_eq!(version_of(release), version, "{release}");
        }
        assert!(version() >= (2, 6), "{}", release());
    }
}
