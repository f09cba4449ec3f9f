//! From statuses to the values of metrics, for the Prometheus page and its reference.

use crate::metric::{Kind, Measured, Metric, Sample, Section};
use crate::{
    Borrower, Catalog, Cgroup, Daemon, Disk, Files, Guest, GuestCounts, HostGuest, Join, Latencies, Lend, Lender,
    LenderInfo, Link, Member, Mount, NodeMount, Pool, RequestCount, Role, Tap, Target,
};
use std::collections::HashSet;

/// Labels of a value, in the order of their declaration.
pub type Labels = Vec<(&'static str, String)>;

/// A value on the page.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// Of everything but a histogram.
    Number(f64),
    /// Of a histogram.
    Times {
        /// Upper bounds in seconds, the last one infinite, and how many fell into each bucket.
        buckets: Vec<(f64, u64)>,
        /// In seconds.
        sum: f64,
    },
}

/// A metric, and its value for each set of labels.
#[derive(Debug)]
pub struct Family {
    /// The metric.
    pub metric: &'static Metric,
    /// Each set of labels is there once.
    pub readings: Vec<(Labels, Reading)>,
}

/// All sections, in the order of a reader's interest.
pub fn sections() -> &'static [Section] {
    const SECTIONS: &[Section] = &[
        Mount::SECTION,
        Latencies::SECTION,
        Disk::SECTION,
        Borrower::SECTION,
        Catalog::SECTION,
        Cgroup::SECTION,
        Tap::SECTION,
        Files::SECTION,
        RequestCount::SECTION,
        Link::SECTION,
        LenderInfo::SECTION,
        Lender::SECTION,
        Role::SECTION,
        NodeMount::SECTION,
        Pool::SECTION,
        Member::SECTION,
        HostGuest::SECTION,
        Guest::SECTION,
        GuestCounts::SECTION,
        Target::SECTION,
    ];
    SECTIONS
}

/// Reads the metrics of these daemons. Metrics without a value are left out. If two daemons have
/// the same labels (such as two mounts at one place), the first one counts, because a page must not
/// have a value twice.
pub fn read<'a>(daemons: impl IntoIterator<Item = &'a Daemon>) -> Vec<Family> {
    let mut page = Page::new();
    daemons.into_iter().for_each(|daemon| page.add_daemon(daemon));
    page.families.retain(|family| !family.readings.is_empty());
    page.families
}

/// The page as far as it is made.
struct Page {
    families: Vec<Family>,
    /// Labels that a metric has a value for already.
    seen: HashSet<(&'static str, Labels)>,
}

impl Page {
    fn new() -> Page {
        let metrics = sections().iter().flat_map(Section::metrics);
        let families = metrics.map(|metric| Family { metric, readings: Vec::new() }).collect();
        Page { families, seen: HashSet::new() }
    }

    fn add_daemon(&mut self, daemon: &Daemon) {
        match daemon {
            Daemon::Mount(mount) => self.add_mount(mount),
            Daemon::Lend(lend) => self.add_lend(lend),
            Daemon::Join(join) => {
                let Join { lend, role, mounts } = &**join;
                self.add_lend(lend);
                self.add(role, &[&lend.listen]);
                for mount in mounts {
                    self.add(mount, &[&lend.listen, &mount.mountpoint]);
                }
            }
            Daemon::Guest(guest) => {
                self.add(&**guest, &[&guest.fs]);
                self.add(&guest.guest, &[&guest.fs]);
            }
            Daemon::Numa(numa) => numa.targets.iter().for_each(|target| self.add(target, &[&target.who])),
            Daemon::Unknown => {}
        }
    }

    fn add_mount(&mut self, mount: &Mount) {
        let at = mount.mountpoint.as_str();
        self.add(mount, &[at]);
        self.add(&mount.latencies, &[at]);
        self.add(&mount.disk, &[at]);
        self.add(&mount.borrower, &[at]);
        self.add(&mount.catalog, &[at]);
        for group in mount.cgroups.iter().flatten() {
            self.add(group, &[at, &group.cgroup]);
        }
        if let Some(tap) = &mount.tap {
            self.add(tap, &[at]);
        }
        self.add(&mount.mount, &[at]);
        for (request, count) in &mount.mount.requests {
            self.add(&RequestCount { count: *count }, &[at, request]);
        }
        for link in &mount.lenders {
            self.add(link, &[at, &link.address]);
        }
        for guest in mount.guests.iter().flat_map(|guests| &guests.list) {
            self.add(guest, &[at, &guest.image]);
        }
        self.add_pool(mount.pool.as_ref());
    }

    fn add_lend(&mut self, lend: &Lend) {
        self.add(&LenderInfo { version: lend.version.clone() }, &[&lend.listen]);
        self.add(&lend.lender, &[&lend.listen]);
        self.add_pool(lend.pool.as_ref());
    }

    fn add_pool(&mut self, pool: Option<&Pool>) {
        let Some(pool) = pool else { return };
        self.add(pool, &[&pool.advertise]);
        for member in &pool.members {
            self.add(member, &[&pool.advertise, &member.address]);
        }
    }

    /// Adds the values of a structure, whose labels are these.
    fn add<T: Measured>(&mut self, of: &T, labels: &[&str]) {
        debug_assert_eq!(labels.len(), T::SECTION.labels.len());
        let labels: Labels =
            T::SECTION.labels.iter().zip(labels).map(|(name, value)| (*name, (*value).to_owned())).collect();
        for (metric, sample) in T::SECTION.metrics().zip(of.samples()) {
            let Some(family) = self.families.iter_mut().find(|family| family.metric.name == metric.name) else {
                continue;
            };
            for (further, reading) in readings(metric, sample) {
                let labels: Labels = labels.iter().cloned().chain(further).collect();
                if self.seen.insert((metric.name, labels.clone())) {
                    family.readings.push((labels, reading));
                }
            }
        }
    }
}

/// The values of a sample, each with its further labels.
fn readings(metric: &Metric, sample: Sample<'_>) -> Vec<(Labels, Reading)> {
    match (metric.kind, sample) {
        (Kind::State(words), Sample::Word(found)) => {
            let one =
                |word: &&'static str| (vec![("state", (*word).to_owned())], Reading::Number(f64::from(*word == found)));
            words.iter().map(one).collect()
        }
        (Kind::Info(names), Sample::Texts(texts)) => {
            vec![(names.iter().copied().zip(texts).collect(), Reading::Number(1.0))]
        }
        (_, Sample::Number(number)) => vec![(Vec::new(), Reading::Number(number * metric.unit.factor()))],
        (_, Sample::Times(times)) => {
            let bounds = times.bounds_us.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
            let buckets = bounds.zip(times.counts.iter().copied()).collect();
            vec![(Vec::new(), Reading::Times { buckets, sum: times.sum_ns as f64 / 1e9 })]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Lend, LinkState, Times};

    #[test]
    fn names_tell_kind_and_unit() {
        let mut names = HashSet::new();
        for metric in sections().iter().flat_map(Section::metrics) {
            let name = metric.name;
            assert!(names.insert(name), "{name} is declared twice");
            assert!(
                name.starts_with("pumapool_")
                    && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
            assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
            assert_eq!(name.ends_with("_info"), matches!(metric.kind, Kind::Info(_)), "{name}");
            if let Some(unit) = metric.unit.base() {
                assert!(name.trim_end_matches("_total").ends_with(&format!("_{unit}")), "{name} is in {unit}");
            }
            assert!(!metric.help().is_empty(), "{name}");
            for suffix in ["_count", "_sum", "_bucket", "_created"] {
                assert!(!name.ends_with(suffix), "{name} would be taken for a part of another one");
            }
        }
    }

    fn value(families: &[Family], name: &str, wanted: &[(&str, &str)]) -> Option<f64> {
        let family = families.iter().find(|family| family.metric.name == name)?;
        let is_wanted =
            |labels: &Labels| labels.iter().map(|(name, value)| (*name, &value[..])).eq(wanted.iter().copied());
        match family.readings.iter().find(|(labels, _)| is_wanted(labels))?.1 {
            Reading::Number(number) => Some(number),
            Reading::Times { sum, .. } => Some(sum),
        }
    }

    #[test]
    fn places_labels_and_units() {
        let link = |address: &str, state| Link {
            address: address.into(),
            state,
            ping_us: 250,
            free_pages: 2,
            ..Link::default()
        };
        let mount = Daemon::Mount(Box::new(Mount {
            mountpoint: "/mnt".into(),
            source: "/srv".into(),
            lender_is_up: true,
            lenders: vec![link("a", LinkState::Used), link("b", LinkState::Down)],
            borrower: Borrower { reads: 7, ..Borrower::default() },
            mount: Files { requests: [("READ".to_owned(), 5)].into(), ..Files::default() },
            latencies: Latencies {
                get: Times { bounds_us: vec![10, 1000], counts: vec![1, 2, 3], sum_ns: 2_500_000_000 },
                ..Latencies::default()
            },
            ..Mount::default()
        }));
        let lender = Lender { cpu_ms: Some(1500), cpu_percent: Some(50), ..Lender::default() };
        let lend = Daemon::Lend(Box::new(Lend { listen: "x".into(), lender, ..Lend::default() }));
        // One mount twice: once on the page.
        let families = read(&[mount.clone(), mount, lend, Daemon::Unknown]);
        let of = |name: &str, labels: &[(&str, &str)]| value(&families, name, labels);
        let (first, second) = ([("mount", "/mnt"), ("lender", "a")], [("mount", "/mnt"), ("lender", "b")]);
        assert_eq!(of("pumapool_mount_reads_total", &first[..1]), Some(7.0));
        assert_eq!(of("pumapool_mount_lender_up", &first[..1]), Some(1.0));
        assert_eq!(of("pumapool_link_ping_seconds", &second), Some(250e-6));
        assert_eq!(of("pumapool_link_free_bytes", &first), Some(8192.0));
        assert_eq!(of("pumapool_link_get_recent_seconds", &first), None);
        let state = |lender: &str, state: &str| {
            of("pumapool_link_state", &[("mount", "/mnt"), ("lender", lender), ("state", state)])
        };
        assert_eq!((state("a", "used"), state("b", "used"), state("b", "down")), (Some(1.0), Some(0.0), Some(1.0)));
        assert_eq!(of("pumapool_mount_requests_total", &[("mount", "/mnt"), ("request", "READ")]), Some(5.0));
        assert_eq!(of("pumapool_mount_get_seconds", &first[..1]), Some(2.5));
        assert_eq!(of("pumapool_lender_cpu_seconds_total", &[("lender", "x")]), Some(1.5));
        assert_eq!(of("pumapool_lender_cpu_limit_ratio", &[("lender", "x")]), Some(0.5));
        let get = families.iter().find(|family| family.metric.name == "pumapool_mount_get_seconds").unwrap();
        let buckets = vec![(10e-6, 1), (1e-3, 2), (f64::INFINITY, 3)];
        assert_eq!(get.readings[0].1, Reading::Times { buckets, sum: 2.5 });
        assert_eq!(get.readings.len(), 1);
    }
}
