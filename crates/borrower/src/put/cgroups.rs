//! Which control group a number in an eviction is, and which of the borrower's groups that makes
//! it.
//!
//! An eviction says the lower half of its group's number, which is the number of the group's
//! directory. Directories are looked at when a number is seen that nobody knows, no more than once
//! a second, and by a thread of its own: who deals with evictions must not wait for that. Until it
//! is known, a page counts as one of the others; so does a page of a group that has gone, or whose
//! directory cannot be seen from here. The kernel does not give a number to another group before
//! four billion were made.

use crate::put::groups::{Counts, Groups, Limits, NUMBERS};
use hashbrown::HashMap;
use serde::Serialize;
use std::fs;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Between two looks at the directories.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// Numbers that are remembered, and directories that are looked at: some 10 MiB of paths.
const KNOWN_MAX: usize = 1 << 16;
/// Groups that can be named: 0 is none, and one is for all others.
pub const NAMED_MAX: usize = NUMBERS as usize - 2;

/// Control groups for which pages are lent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    /// Where the hierarchy that governs memory is mounted.
    pub hierarchy: PathBuf,
    /// Those that are named, each with all below it; of two of which one is in the other, the inner
    /// one counts.
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

/// Directories by their numbers.
type Paths = HashMap<u32, PathBuf>;

/// Tells groups from their numbers.
pub(crate) struct Resolver {
    cgroups: Cgroups,
    /// Of the borrower's groups from number 1 on: others, those that are named, and with
    /// [`Others::Each`] those that have evicted.
    names: Vec<String>,
    limits: Vec<Limits>,
    /// Where directories are, as far as nobody has asked for them yet.
    paths: Paths,
    /// What numbers in evictions are.
    known: HashMap<u32, u8>,
    looked: Option<Instant>,
    /// The thread that looks at the directories now, and the number that this is for.
    looking: Option<(JoinHandle<Paths>, u32)>,
    /// Looks at all directories below that one.
    look: fn(&Path) -> Paths,
}

/// The borrower's group of all that are not told apart.
const OTHERS: u8 = 1;

impl Resolver {
    /// Has the groups limited. Of more than [`NAMED_MAX`] names the last ones count as others.
    pub(crate) fn new(cgroups: Cgroups, groups: &Groups) -> Resolver {
        let mut resolver = Resolver {
            names: Vec::new(),
            limits: Vec::new(),
            paths: HashMap::new(),
            known: HashMap::new(),
            looked: None,
            looking: None,
            look: directories,
            cgroups: Cgroups { named: Vec::new(), ..cgroups },
        };
        let (Others::Together(limits) | Others::Each(limits)) = cgroups.others;
        resolver.add("others".to_owned(), limits, groups);
        for (path, limits) in cgroups.named.into_iter().take(NAMED_MAX) {
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
    pub(crate) fn group_of(&mut self, id: u32, now: impl FnOnce() -> Instant, groups: &Groups) -> u8 {
        if let Some(group) = self.known.get(&id) {
            return *group;
        }
        if id == 0 {
            return OTHERS;
        }
        let now = now();
        let may_look = self.looking.is_none() && self.looked.is_none_or(|looked| now - looked >= LOOK_PERIOD);
        if self.looking.as_ref().is_some_and(|(thread, _)| thread.is_finished()) {
            self.have_looked();
            if let Some(group) = self.known.get(&id) {
                return *group;
            }
        }
        let group = match self.paths.get(&id).cloned() {
            Some(path) => self.group(&path, may_look.then_some(now), groups),
            None => {
                if may_look {
                    self.begin_to_look(id, now);
                }
                None
            }
        };
        let Some(group) = group else { return OTHERS };
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.paths.remove(&id);
        self.known.insert(id, group);
        group
    }

    /// Has a thread look where the directories are now, for that number.
    fn begin_to_look(&mut self, id: u32, now: Instant) {
        self.looked = Some(now);
        let (root, look) = (self.cgroups.hierarchy.clone(), self.look);
        // Without a thread it is tried again.
        let thread = thread::Builder::new().name("puma-cgroups".into()).spawn(move || look(&root));
        self.looking = thread.ok().map(|thread| (thread, id));
    }

    /// Takes what the thread has found. Waits for it.
    fn have_looked(&mut self) {
        let Some((thread, id)) = self.looking.take() else { return };
        let Ok(paths) = thread.join() else { return };
        self.paths = paths;
        if !self.paths.contains_key(&id) {
            // It has gone, and stays so.
            self.known.insert(id, OTHERS);
        }
    }

    /// The group for a directory below the hierarchy's. None: there is no number for it as yet.
    /// With `look` it may be looked for one.
    fn group(&mut self, path: &Path, look: Option<Instant>, groups: &Groups) -> Option<u8> {
        let named = self.cgroups.named.iter().enumerate().filter(|(_, (named, _))| path.starts_with(named));
        if let Some((at, _)) = named.max_by_key(|(_, (named, _))| named.components().count()) {
            return Some(OTHERS + 1 + at as u8);
        }
        let Others::Each(limits) = self.cgroups.others else { return Some(OTHERS) };
        let name = path.display().to_string();
        let name = if name.is_empty() { "/".to_owned() } else { name };
        if let Some(at) = self.names.iter().position(|known| *known == name) {
            return Some(at as u8 + 1);
        }
        if self.names.len() < usize::from(NUMBERS) - 1 {
            return Some(self.add(name, limits, groups));
        }
        self.looked = Some(look?);
        let number = self.vacate(groups)?;
        self.names[usize::from(number) - 1] = name;
        groups.reset(number, limits);
        Some(number)
    }

    /// The number of a group that has gone, and of which lenders have nothing any more.
    fn vacate(&mut self, groups: &Groups) -> Option<u8> {
        let first = 1 + self.cgroups.named.len();
        let is_vacant = |at: &usize| {
            let path = self.cgroups.hierarchy.join(self.names[*at].trim_start_matches('/'));
            groups.counts(*at as u8 + 1).lent == 0 && !path.is_dir()
        };
        let number = (first..self.names.len()).find(is_vacant)? as u8 + 1;
        // Late evictions of the one that has gone are others'.
        self.known.values_mut().filter(|group| **group == number).for_each(|group| *group = OTHERS);
        Some(number)
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

/// All directories below that one, and itself.
fn directories(root: &Path) -> Paths {
    let mut paths = Paths::new();
    let Ok(root_inode) = fs::metadata(root).map(|metadata| metadata.ino()) else { return paths };
    let mut waiting = vec![(root.to_owned(), root_inode)];
    while let Some((folder, inode)) = waiting.pop() {
        if paths.len() >= KNOWN_MAX {
            tracing::warn!("there are more control groups than {KNOWN_MAX}: some count as others");
            break;
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        waiting.extend(folders.map(|entry| (entry.path(), entry.ino())));
        let path = folder.strip_prefix(root).unwrap_or(&folder).to_owned();
        paths.insert(inode as u32, path);
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    const PART: Limits = Limits { takes_part: true, quota_pages: Some(7), share: None };

    /// A hierarchy of plain directories: theirs are numbers as well.
    fn tree(paths: &[&str]) -> (tempfile::TempDir, impl Fn(&str) -> u32 + use<>) {
        let root = tempfile::tempdir().unwrap();
        paths.iter().for_each(|path| fs::create_dir_all(root.path().join(path)).unwrap());
        let at = root.path().to_owned();
        (root, move |path: &str| fs::metadata(at.join(path)).unwrap().ino() as u32)
    }

    /// What a number is once the directories were looked at for it, if need be.
    fn settled(resolver: &mut Resolver, id: u32, now: Instant, groups: &Groups) -> u8 {
        let group = resolver.group_of(id, || now, groups);
        if resolver.looking.is_none() {
            return group;
        }
        resolver.have_looked();
        resolver.group_of(id, || now, groups)
    }

    #[test]
    fn who_deals_with_evictions_does_not_wait_for_a_look_at_the_directories() {
        static IS_LOOKED_AT: Mutex<()> = Mutex::new(());
        let (root, number) = tree(&["db", "web"]);
        let groups = Groups::default();
        let named = vec![(PathBuf::from("db"), PART)];
        let hierarchy = root.path().to_owned();
        let mut resolver = Resolver::new(Cgroups { hierarchy, named, others: Others::Together(Limits::NONE) }, &groups);
        resolver.look = |root| {
            let _lock = IS_LOOKED_AT.lock().unwrap();
            directories(root)
        };
        let (db, web, now) = (number("db"), number("web"), Instant::now());
        let lock = IS_LOOKED_AT.lock().unwrap();
        for periods in 0..3 {
            let now = now + periods * LOOK_PERIOD;
            assert_eq!(resolver.group_of(db, || now, &groups), OTHERS, "it is not known yet");
            assert_eq!(resolver.group_of(web, || now, &groups), OTHERS);
            assert_eq!(resolver.status(&groups).len(), 2);
        }
        drop(lock);
        assert_eq!(settled(&mut resolver, db, now, &groups), 2);
        assert!(!resolver.known.contains_key(&web), "it has not gone");
        assert_eq!(settled(&mut resolver, web, now, &groups), OTHERS);
    }

    #[test]
    fn the_innermost_name_counts() {
        let (root, number) = tree(&["db/inner/leaf", "db/other", "web"]);
        let groups = Groups::default();
        let named = ["db", "db/inner"].map(|path| (PathBuf::from(path), PART)).into();
        let hierarchy = root.path().to_owned();
        let mut resolver = Resolver::new(Cgroups { hierarchy, named, others: Others::Together(Limits::NONE) }, &groups);
        let now = Instant::now();
        let mut of = |path: &str| settled(&mut resolver, number(path), now, &groups);
        assert_eq!((of("db"), of("db/other"), of("db/inner"), of("db/inner/leaf")), (2, 2, 3, 3));
        assert_eq!((of("web"), of("")), (1, 1));
        assert_eq!(resolver.group_of(0, || now, &groups), 1);
        assert_eq!(settled(&mut resolver, u32::MAX, now + LOOK_PERIOD, &groups), 1, "one that has gone");
        let names: Vec<String> = resolver.status(&groups).into_iter().map(|status| status.cgroup).collect();
        assert_eq!(names, ["others", "db", "db/inner"]);
    }

    #[test]
    fn each_that_evicts_has_a_number_while_there_are_any() {
        let many: Vec<String> = (0..100).map(|nth| format!("all/{nth}")).collect();
        let (root, number) = tree(&many.iter().map(String::as_str).collect::<Vec<_>>());
        let groups = Groups::default();
        let hierarchy = root.path().to_owned();
        let mut resolver = Resolver::new(Cgroups { hierarchy, named: Vec::new(), others: Others::Each(PART) }, &groups);
        let begun = Instant::now();
        let mut of =
            |id: u32, periods: u32, groups: &Groups| settled(&mut resolver, id, begun + periods * LOOK_PERIOD, groups);
        // Those that are only there take none.
        for (nth, path) in many.iter().rev().take(NAMED_MAX).enumerate() {
            assert_eq!(of(number(path), 0, &groups), 2 + nth as u8);
        }
        let next = number(&many[0]);
        assert_eq!(of(next, 1, &groups), OTHERS, "all numbers are taken");
        // One goes: its number is another's as soon as lenders have nothing of it.
        let gone = number(&many[99]);
        fs::remove_dir(root.path().join(&many[99])).unwrap();
        groups.evicted(2);
        groups.moved(2, 1, 0);
        assert_eq!(of(next, 2, &groups), OTHERS);
        groups.moved(2, -1, 0);
        assert_eq!(of(next, 2, &groups), OTHERS, "not looked for at each eviction");
        assert_eq!(of(next, 3, &groups), 2);
        assert_eq!((of(next, 3, &groups), of(gone, 4, &groups)), (2, OTHERS));
        assert_eq!(groups.counts(2).evicted, 0, "that was the other");
        groups.evicted(2);
        let status = resolver.status(&groups);
        assert_eq!((status.len(), status[0].cgroup.as_str(), status[0].evicted_pages), (1, many[0].as_str(), 1));
    }
}
