//! Which control group a number in an eviction is, and which of the borrower's groups that makes it.
//!
//! An eviction says the lower half of its group's number, which is the number of the group's directory. Directories are looked at when a number
//! is seen that nobody knows, and no more than once a second. A page of a group that has gone, or whose directory cannot be seen
//! from here, counts as one of the others.

use crate::logic::groups::{Counts, Groups, Limits, NUMBERS};
use hashbrown::HashMap;
use serde::Serialize;
use std::fs;
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two looks at the directories.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Numbers that are remembered, and directories that are looked at.
const KNOWN_MAX: usize = 1 << 16;

/// Control groups for which pages are lent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    /// Where the hierarchy that governs memory is mounted.
    pub hierarchy: PathBuf,
    /// Those that are named, each with all below it; of two of which one is in the other, the inner one counts.
    pub named: Vec<(PathBuf, Limits)>,
    /// All others.
    pub others: Others,
}

/// What control groups may have that are not named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// This, all of them together.
    Together(Limits),
    /// This each, as long as there are numbers; the rest together.
    Each(Limits),
}

/// What there is to say of one of them.
#[derive(Clone, Debug, Serialize)]
pub struct CgroupStatus {
    /// Its directory, below the hierarchy's; or `others`.
    pub cgroup: String,
    /// Whether its pages are lent.
    pub takes_part: bool,
    /// Pages lent at the most.
    pub quota_pages: Option<u64>,
    /// Its part of a full pool, in proportion to those of others.
    pub share: Option<u32>,
    /// Pages of it at lenders.
    pub lent_pages: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Pages put at lenders.
    pub put_pages: u64,
    /// Pages of it asked back from lenders.
    pub got_pages: u64,
    /// Pages given up at lenders, as it had more than its quota.
    pub given_up_pages: u64,
    /// Pages not put, as all lenders were full and it had more than its share.
    pub over_share_pages: u64,
    /// Pages not put, as it has no part in it.
    pub apart_pages: u64,
}

/// Where the hierarchy of control groups that governs memory is mounted: that of version 1 with the memory controller, else version 2.
///
/// # Errors
/// When there is none.
pub fn memory_hierarchy() -> io::Result<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    hierarchy(&table).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no control groups are mounted here (with the memory controller)")
    })
}

fn hierarchy(mountinfo: &str) -> Option<PathBuf> {
    let mounts = mountinfo.lines().filter_map(|line| {
        // 36 35 0:31 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory
        let (mount, kind) = line.split_once(" - ")?;
        let at = mount.split(' ').nth(4)?;
        let mut kind = kind.split(' ');
        Some((at, kind.next()?, kind.nth(1)?))
    });
    let of = |wanted: &str| {
        let is_it = |(_, kind, options): &(&str, &str, &str)| {
            *kind == wanted && (wanted == "cgroup2" || options.split(',').any(|option| option == "memory"))
        };
        mounts.clone().find(is_it).map(|(at, ..)| PathBuf::from(at))
    };
    of("cgroup").or_else(|| of("cgroup2"))
}

/// Tells groups from their numbers.
pub(crate) struct Resolver {
    cgroups: Cgroups,
    /// Of the borrower's groups from number 1 on; `others` is among them, or comes last.
    names: Vec<String>,
    limits: Vec<Limits>,
    others: u8,
    known: HashMap<u32, u8>,
    looked: Option<Instant>,
}

impl Resolver {
    /// Has the groups limited. Of more than there are numbers for, the last ones count as others.
    pub(crate) fn new(cgroups: Cgroups, groups: &Groups) -> Resolver {
        let room = usize::from(NUMBERS) - 2; // 0 is none, and one is for others
        let mut resolver = Resolver {
            names: Vec::new(),
            limits: Vec::new(),
            others: 0,
            known: HashMap::new(),
            looked: None,
            cgroups: Cgroups { named: Vec::new(), ..cgroups },
        };
        let (Others::Together(limits) | Others::Each(limits)) = cgroups.others;
        resolver.others = resolver.add("others".to_owned(), limits, groups);
        for (path, limits) in cgroups.named.into_iter().take(room) {
            resolver.add(path.display().to_string(), limits, groups);
            resolver.cgroups.named.push((path, limits));
        }
        resolver
    }

    fn add(&mut self, name: String, limits: Limits, groups: &Groups) -> u8 {
        self.names.push(name);
        self.limits.push(limits);
        let number = self.names.len() as u8;
        groups.limit(number, limits);
        number
    }

    /// The borrower's group for a number in an eviction.
    pub(crate) fn group_of(&mut self, id: u32, groups: &Groups) -> u8 {
        if let Some(group) = self.known.get(&id) {
            return *group;
        }
        let now = Instant::now();
        if id == 0 || self.looked.is_some_and(|looked| now - looked < LOOK_PERIOD) {
            return self.others;
        }
        self.looked = Some(now);
        self.look(groups);
        if self.known.len() < KNOWN_MAX {
            self.known.entry(id).or_insert(self.others);
        }
        self.known.get(&id).copied().unwrap_or(self.others)
    }

    fn look(&mut self, groups: &Groups) {
        self.known.clear();
        let root = self.cgroups.hierarchy.clone();
        let Ok(root_inode) = fs::metadata(&root).map(|metadata| metadata.ino()) else { return };
        let mut waiting = vec![(root.clone(), root_inode)];
        while let Some((folder, inode)) = waiting.pop() {
            if self.known.len() >= KNOWN_MAX {
                tracing::warn!("there are more control groups than {KNOWN_MAX}: some count as others");
                return;
            }
            let group = self.group(folder.strip_prefix(&root).unwrap_or(&folder), groups);
            self.known.insert(inode as u32, group);
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            waiting.extend(folders.map(|entry| (entry.path(), entry.ino())));
        }
    }

    /// The group for a directory below the hierarchy's.
    fn group(&mut self, path: &Path, groups: &Groups) -> u8 {
        let named = self.cgroups.named.iter().enumerate().filter(|(_, (named, _))| path.starts_with(named));
        if let Some((at, _)) = named.max_by_key(|(_, (named, _))| named.components().count()) {
            return self.others + 1 + at as u8;
        }
        let Others::Each(limits) = self.cgroups.others else { return self.others };
        let name = path.display().to_string();
        let name = if name.is_empty() { "/".to_owned() } else { name };
        match self.names.iter().position(|known| *known == name) {
            Some(at) => at as u8 + 1,
            None if self.names.len() < usize::from(NUMBERS) - 1 => self.add(name, limits, groups),
            None => self.others,
        }
    }

    /// What there is to say of those that have evicted anything.
    pub(crate) fn status(&self, groups: &Groups) -> Vec<CgroupStatus> {
        let status = |(at, (name, limits)): (usize, (&String, &Limits))| {
            let Counts { lent, evicted, put, got, given_up, over_share, apart } = groups.counts(at as u8 + 1);
            CgroupStatus {
                cgroup: name.clone(),
                takes_part: limits.takes_part,
                quota_pages: limits.quota_pages,
                share: limits.share,
                lent_pages: lent,
                evicted_pages: evicted,
                put_pages: put,
                got_pages: got,
                given_up_pages: given_up,
                over_share_pages: over_share,
                apart_pages: apart,
            }
        };
        let is_named =
            |status: &CgroupStatus| matches!(self.cgroups.others, Others::Together(_)) || status.evicted_pages > 0;
        self.names.iter().zip(&self.limits).enumerate().map(status).filter(is_named).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Limits = Limits { takes_part: true, quota_pages: Some(7), share: None };

    /// A hierarchy of plain directories: theirs are numbers as well.
    fn tree(paths: &[&str]) -> (tempfile::TempDir, impl Fn(&str) -> u32 + use<>) {
        let root = tempfile::tempdir().unwrap();
        paths.iter().for_each(|path| fs::create_dir_all(root.path().join(path)).unwrap());
        let at = root.path().to_owned();
        (root, move |path: &str| fs::metadata(at.join(path)).unwrap().ino() as u32)
    }

    #[test]
    fn the_innermost_name_counts() {
        let (root, number) = tree(&["db/inner/leaf", "db/other", "web"]);
        let groups = Groups::default();
        let named = ["db", "db/inner"].map(|path| (PathBuf::from(path), PART)).into();
        let hierarchy = root.path().to_owned();
        let mut resolver = Resolver::new(Cgroups { hierarchy, named, others: Others::Together(Limits::NONE) }, &groups);
        let mut of = |path: &str| resolver.group_of(number(path), &groups);
        assert_eq!((of("db"), of("db/other"), of("db/inner"), of("db/inner/leaf")), (2, 2, 3, 3));
        assert_eq!((of("web"), of("")), (1, 1));
        assert_eq!(resolver.group_of(0, &groups), 1);
        assert_eq!(resolver.group_of(u32::MAX, &groups), 1, "one that has gone");
        let names: Vec<String> = resolver.status(&groups).into_iter().map(|status| status.cgroup).collect();
        assert_eq!(names, ["others", "db", "db/inner"]);
    }

    #[test]
    fn each_has_a_number_while_there_are_any() {
        let many: Vec<String> = (0..100).map(|nth| format!("all/{nth}")).collect();
        let (root, number) = tree(&many.iter().map(String::as_str).collect::<Vec<_>>());
        let groups = Groups::default();
        let hierarchy = root.path().to_owned();
        let mut resolver = Resolver::new(Cgroups { hierarchy, named: Vec::new(), others: Others::Each(PART) }, &groups);
        let mut of: Vec<u8> = many.iter().map(|path| resolver.group_of(number(path), &groups)).collect();
        assert!(of.iter().all(|group| (1..NUMBERS).contains(group)));
        of.sort_unstable();
        of.dedup();
        // The hierarchy itself and its only child have one, too.
        assert!(of.len() >= usize::from(NUMBERS) - 3, "{of:?}");
        assert!(resolver.status(&groups).is_empty(), "none has evicted anything");
        groups.evicted(2);
        assert_eq!(resolver.status(&groups)[0].evicted_pages, 1);
    }

    #[test]
    fn the_hierarchy_of_memory_is_found() {
        let v1 = "36 35 0:31 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory";
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw";
        let cpu = "37 35 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
        let found = |lines: &[&str]| hierarchy(&lines.join("\n"));
        assert_eq!(found(&[v2, cpu, v1]), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(found(&[cpu, v2]), Some("/sys/fs/cgroup".into()));
        assert_eq!(found(&[cpu, "nonsense"]), None);
    }
}
