//! `--cgroup`: for which control groups a mount borrows, and how much.

use crate::cli::cgroups::{CgroupName, Who};
use anyhow::{Context, Result, bail};
use borrower::cgroups::{Cgroups, NAMED_MAX, Others};
use borrower::groups::Limits;
use os::cgroup::memory_hierarchy;
use std::path::{Path, PathBuf};

/// Combines the options. Returns `None` if there are none.
pub fn cgroups(names: &[CgroupName]) -> Result<Option<Cgroups>> {
    if names.is_empty() {
        return Ok(None);
    }
    let hierarchy = memory_hierarchy().context("--cgroup cannot be applied")?;
    let (mut named, mut others) = (Vec::new(), None);
    for CgroupName { text, who, limits } in names {
        let rest = match who {
            Who::Path(path) => {
                let path = below(path, &hierarchy);
                if named.iter().any(|(other, _)| *other == path) {
                    bail!("--cgroup {text}: it is named twice");
                }
                if !hierarchy.join(&path).is_dir() {
                    tracing::warn!("there is no control group {} in {} yet", path.display(), hierarchy.display());
                }
                named.push((path, *limits));
                continue;
            }
            Who::Others => Others::Together(*limits),
            Who::Each => Others::Each(*limits),
        };
        if others.replace(rest).is_some() {
            bail!("--cgroup {text}: what all others may have is said twice");
        }
    }
    if named.len() > NAMED_MAX {
        bail!(
            "--cgroup: {} are named, and {NAMED_MAX} can be told apart; name a control group above them",
            named.len()
        );
    }
    // If some groups are named, only these are lent for.
    let others = others.unwrap_or(Others::Together(Limits { takes_part: false, ..Limits::NONE }));
    Ok(Some(Cgroups { hierarchy, named, others }))
}

/// The directory of a group. `path` is as in /proc/PID/cgroup, or within the mounted hierarchy.
fn below(path: &Path, hierarchy: &Path) -> PathBuf {
    let path = path.strip_prefix(hierarchy).unwrap_or(path);
    path.components().filter(|part| matches!(part, std::path::Component::Normal(_))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_within_the_hierarchy() {
        let at = Path::new("/sys/fs/cgroup/memory");
        for path in ["/sys/fs/cgroup/memory/db/one", "/db/one", "db/one/"] {
            assert_eq!(below(Path::new(path), at), Path::new("db/one"));
        }
    }

    #[test]
    fn who_names_some_wants_those_alone() {
        let read = |names: &[&str]| cgroups(&names.iter().map(|name| name.parse().unwrap()).collect::<Vec<_>>());
        assert!(read(&[]).unwrap().is_none());
        if memory_hierarchy().is_err() {
            return testbed::skip("who_names_some_wants_those_alone", "no control groups are mounted here");
        }
        let apart = Limits { takes_part: false, ..Limits::NONE };
        assert_eq!(read(&["db"]).unwrap().unwrap().others, Others::Together(apart));
        assert_eq!(read(&["db", "others"]).unwrap().unwrap().others, Others::Together(Limits::NONE));
        assert_eq!(read(&["each"]).unwrap().unwrap().others, Others::Each(Limits::NONE));
        let many: Vec<String> = (0..=NAMED_MAX).map(|nth| format!("no/{nth}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(read(&many[1..]).is_ok());
        assert!(read(&many).unwrap_err().to_string().contains("can be told apart"));
        for twice in [["db", "/db"], ["others", "each"]] {
            assert!(read(&twice).unwrap_err().to_string().contains("twice"));
        }
    }
}
