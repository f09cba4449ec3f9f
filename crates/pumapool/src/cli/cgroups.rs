//! A value of `--cgroup`: a control group for which a mount borrows, and how much.

use crate::cli::size;
use borrower::groups::Limits;
use page::PAGE_SIZE;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A value of `--cgroup`: PATH, `others` or `each`, with its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupName {
    /// The text of the option.
    pub text: String,
    pub who: Who,
    pub limits: Limits,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    Path(PathBuf),
    Others,
    Each,
}

impl fmt::Display for CgroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for CgroupName {
    type Err = String;

    fn from_str(text: &str) -> Result<CgroupName, String> {
        let mut words = text.split(',');
        let who = match words.next().unwrap_or_default() {
            "" => return Err(format!("{text:?} names no control group: write PATH, others or each first")),
            "others" => Who::Others,
            "each" => Who::Each,
            path => Who::Path(path.into()),
        };
        let mut limits = Limits::NONE;
        for word in words {
            match word.split_once('=') {
                Some(("quota", value)) => {
                    let quota_pages = size::parse(value)? / PAGE_SIZE as u64;
                    (limits.takes_part, limits.quota_pages) = (quota_pages > 0, Some(quota_pages));
                }
                Some(("share", value)) => {
                    let share = value.parse().ok().filter(|share| (1..=10_000).contains(share));
                    limits.share = Some(share.ok_or_else(|| format!("{value:?} is no share: write 1 to 10000"))?);
                }
                _ => {
                    return Err(format!(
                        "{word:?} is nothing that a control group may have: write quota=SIZE or share=NUMBER"
                    ));
                }
            }
        }
        Ok(CgroupName { text: text.to_owned(), who, limits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_as_they_are_written() {
        let limits = |text: &str| text.parse::<CgroupName>().unwrap().limits;
        assert_eq!(limits("/db"), Limits::NONE);
        let some = Limits { takes_part: true, quota_pages: Some(256), share: Some(3) };
        assert_eq!(limits("db,quota=1MiB,share=3"), some);
        assert_eq!(limits("others,quota=0"), Limits { takes_part: false, quota_pages: Some(0), share: None });
        for wrong in ["", ",share=1", "db,quota", "db,quota=much", "db,share=0", "db,weight=1", "each,share=-1"] {
            let problem = wrong.parse::<CgroupName>().unwrap_err();
            assert!(!problem.is_empty() && problem.lines().count() == 1, "{wrong}: {problem}");
        }
    }
}
