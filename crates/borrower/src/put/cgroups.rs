//! Finds the control group of an eviction by the number in its event, and the borrower's group for
//! it.
//!
//! An event has the lower half of its group's number, which is the inode number of the group's
//! directory. If a number is unknown, a separate thread scans the directories, at most once a
//! second, because the thread that handles evictions must not wait for a scan. Until the number is
//! known, a page counts as one of the others. So does a page of a group that was removed, or whose
//! directory is not visible here. The kernel reuses a number only after it has made four billion
//! groups.

use crate::put::groups::{Counts, Groups, Limits, NUMBERS};
use hashbrown::HashMap;
use report::Cgroup;
use std::fs;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The minimum time between two scans of the directories.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// The number of group numbers that are remembered, and of directories that are scanned: some 10
/// MiB of paths.
const KNOWN_MAX: usize = 1 << 16;
/// The number of groups that can be named: 0 is none, and one number is for all others.
pub const NAMED_MAX: usize = NUMBERS as usize - 2;

/// Control groups for which pages are lent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    /// The mount point of the hierarchy that controls memory.
    pub hierarchy: PathBuf,
    /// The named groups, each with all groups in it. Where one is inside another, the inner one
    /// counts.
    pub named: Vec<(PathBuf, Limits)>,
    /// The limits of all other groups.
    pub others: Others,
}

/// The limits of control groups that are not named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// These limits for all of them together.
    Together(Limits),
    /// These limits for each of them, as long as there are numbers; the rest share the limits of
    /// the others.
    Each(Limits),
}

/// Directories by their numbers.
type Paths = HashMap<u32, PathBuf>;

/// Maps numbers in events to the borrower's groups.
pub(crate) struct Resolver {
    cgroups: Cgroups,
    /// The names of the borrower's groups from number 1 on: others, the named groups, and with
    /// [`Others::Each`] the groups that have evicted pages.
    names: Vec<String>,
    limits: Vec<Limits>,
    /// The directories of numbers that have not been used yet.
    paths: Paths,
    /// The borrower's group of each known number in events.
    known: HashMap<u32, u8>,
    looked: Option<Instant>,
    /// The running thread that scans the directories, and the number that it was started for.
    looking: Option<(JoinHandle<Paths>, u32)>,
    /// Returns all directories in the given one.
    look: fn(&Path) -> Paths,
}

/// The borrower's group for all groups without a number of their own.
const OTHERS: u8 = 1;

impl Resolver {
    /// Sets the limits of the groups. Of more than [`NAMED_MAX`] names the last ones count as
    /// others.
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

    /// Returns the borrower's group for a number in an event.
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

    /// Starts a thread that scans the directories, for that number.
    fn begin_to_look(&mut self, id: u32, now: Instant) {
        self.looked = Some(now);
        let (root, look) = (self.cgroups.hierarchy.clone(), self.look);
        // If no thread can be started, the next eviction tries again.
        let thread = thread::Builder::new().name("puma-cgroups".into()).spawn(move || look(&root));
        self.looking = thread.ok().map(|thread| (thread, id));
    }

    /// Waits for the thread, and takes the directories that it has found.
    fn have_looked(&mut self) {
        let Some((thread, id)) = self.looking.take() else { return };
        let Ok(paths) = thread.join() else { return };
        self.paths = paths;
        if !self.paths.contains_key(&id) {
            // The group was removed, and its number stays unused.
            self.known.insert(id, OTHERS);
        }
    }

    /// Returns the group for a directory, relative to the hierarchy's. Returns None if it has no
    /// number yet. With `look`, a number is searched for it.
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

    /// Frees the number of a group that was removed and has no pages at lenders. Returns that
    /// number.
    fn vacate(&mut self, groups: &Groups) -> Option<u8> {
        let first = 1 + self.cgroups.named.len();
        let is_vacant = |at: &usize| {
            let path = self.cgroups.hierarchy.join(self.names[*at].trim_start_matches('/'));
            groups.counts(*at as u8 + 1).lent == 0 && !path.is_dir()
        };
        let number = (first..self.names.len()).find(is_vacant)? as u8 + 1;
        // Late evictions of the removed group count as others'.
        self.known.values_mut().filter(|group| **group == number).for_each(|group| *group = OTHERS);
        Some(number)
    }

    /// Returns the status of the groups that have evicted any page.
    pub(crate) fn status(&self, groups: &Groups) -> Vec<Cgroup> {
        let status = |(at, (name, limits)): (usize, (&String, &Limits))| {
            let Counts { lent, evicted, put, got, given_up, over_share, apart } = groups.counts(at as u8 + 1);
            Cgroup {
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
        let is_named = |status: &Cgroup| matches!(self.cgroups.others, Others::Together(_)) || status.evicted_pages > 0;
        self.names.iter().zip(&self.limits).enumerate().map(status).filter(is_named).collect()
    }
}

/// Returns this directory and all directories in it.
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

    /// A hierarchy of plain directories, which have inode numbers, too.
    fn tree(paths: &[&str]) -> (tempfile::TempDir, impl Fn(&str) -> u32 + use<>) {
        let root = tempfile::tempdir().unwrap();
        paths.iter().for_each(|path| fs::create_dir_all(root.path().join(path)).unwrap());
        let at = root.path().to_owned();
        (root, move |path: &str| fs::metadata(at.join(path)).unwrap().ino() as u32)
    }

    /// Returns the group of a number, after a scan of the directories if one is needed.
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
        assert_eq!(settled(&mut resolver, u32::MAX, now + LOOK_PERIOD, &groups), 1, "a group that was removed");
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
        // Groups that exist and have evicted nothing take no number.
        for (nth, path) in many.iter().rev().take(NAMED_MAX).enumerate() {
            assert_eq!(of(number(path), 0, &groups), 2 + nth as u8);
        }
        let next = number(&many[0]);
        assert_eq!(of(next, 1, &groups), OTHERS, "all numbers are taken");
        // One group is removed: its number is free as soon as lenders have none of its pages.
        let gone = number(&many[99]);
        fs::remove_dir(root.path().join(&many[99])).unwrap();
        groups.evicted(2);
        groups.moved(2, 1, 0);
        assert_eq!(of(next, 2, &groups), OTHERS);
        groups.moved(2, -1, 0);
        assert_eq!(of(next, 2, &groups), OTHERS, "not looked for at each eviction");
        assert_eq!(of(next, 3, &groups), 2);
        assert_eq!((of(next, 3, &groups), of(gone, 4, &groups)), (2, OTHERS));
        assert_eq!(groups.counts(2).evicted, 0, "these were of the removed group");
        groups.evicted(2);
        let status = resolver.status(&groups);
        assert_eq!((status.len(), status[0].cgroup.as_str(), status[0].evicted_pages), (1, many[0].as_str(), 1));
    }
}
