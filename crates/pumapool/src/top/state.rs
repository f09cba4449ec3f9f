//! What `top` knows: statuses, taken one after the other, and from them rates and their history.
//! Nothing but logic: the time is told.
//!
//! Numbers are those of the registry, by their names there.

use crate::metrics::reading::{Labels, Reading, read};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Points of a history line: more than a wide terminal shows.
const HISTORY_MAX: usize = 512;
/// Daemons that are followed.
const DAEMONS_MAX: usize = 256;
/// A daemon that does not answer, as while another one takes its mount over, is shown for so many
/// looks.
const MISSED_MAX: u32 = 5;

/// A number of a daemon: its name in the registry, and its labels.
type Key = (&'static str, Labels);

/// What a history line shows, or a rate: None, if nothing is known.
pub type Point = Option<f64>;

/// A line of history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Track {
    /// Which part of the pages asked for the pool had.
    HitRatio,
    /// Pages from the pool, or of a lender, asked for, each second.
    Asked,
    /// Pages read from the directory below, each second.
    Below,
    /// Pages evicted, each second.
    Evicted,
    /// Pages put, sent or moved, each second.
    Put,
    /// Memory lent, in bytes.
    Lent,
    /// Memory given up, in pages each second.
    GivenUp,
    /// What a get takes, in seconds.
    Get,
    /// What a read below takes, in seconds.
    ReadBelow,
}

/// A daemon.
pub struct Daemon {
    /// Its status, as it was last told.
    pub status: Value,
    /// For how many looks it has not answered.
    pub missed: u32,
    socket: String,
    readings: HashMap<Key, Reading>,
    before: HashMap<Key, Reading>,
    elapsed: Duration,
    history: HashMap<Track, VecDeque<Point>>,
}

/// All daemons, in the order in which they are shown.
#[derive(Default)]
pub struct State {
    /// The daemons.
    pub daemons: Vec<Daemon>,
    /// Whether any status was taken.
    pub has_looked: bool,
}

impl State {
    /// Takes statuses, of which the last ones were taken so long ago.
    pub fn take(&mut self, statuses: Vec<Value>, elapsed: Duration) {
        self.has_looked = true;
        self.daemons.iter_mut().for_each(|daemon| daemon.missed += 1);
        for status in statuses {
            let socket = status["socket"].as_str().unwrap_or_default().to_owned();
            match self.daemons.iter().position(|daemon| daemon.socket == socket) {
                Some(at) => self.daemons[at].take(status, elapsed),
                None if self.daemons.len() < DAEMONS_MAX => self.daemons.push(Daemon::new(socket, status)),
                None => {}
            }
        }
        self.daemons.retain(|daemon| daemon.missed <= MISSED_MAX);
        let order = ["join", "mount", "lend", "guest", "numa"];
        let place = |daemon: &Daemon| order.iter().position(|kind| daemon.kind() == *kind);
        self.daemons.sort_by_cached_key(|daemon| (place(daemon), daemon.name(), daemon.socket.clone()));
    }
}

impl Daemon {
    fn new(socket: String, status: Value) -> Daemon {
        let mut daemon = Daemon {
            status: Value::Null,
            missed: 0,
            socket,
            readings: HashMap::new(),
            before: HashMap::new(),
            elapsed: Duration::ZERO,
            history: HashMap::new(),
        };
        daemon.take(status, Duration::ZERO);
        daemon
    }

    fn take(&mut self, status: Value, elapsed: Duration) {
        let families = read(std::slice::from_ref(&status));
        let readings = families.into_iter().flat_map(|family| {
            family.readings.into_iter().map(move |(labels, reading)| ((&*family.metric.name, labels), reading))
        });
        self.before = std::mem::replace(&mut self.readings, readings.collect());
        // While it did not answer, as many looks went by.
        self.elapsed = elapsed * (self.missed.max(1));
        (self.status, self.missed) = (status, 0);
        let tracks: &[Track] = match self.kind() {
            "mount" => &[
                Track::HitRatio,
                Track::Asked,
                Track::Below,
                Track::Evicted,
                Track::Put,
                Track::Lent,
                Track::Get,
                Track::ReadBelow,
            ],
            "lend" => &[Track::HitRatio, Track::Asked, Track::Put, Track::Lent, Track::GivenUp],
            "join" => &[Track::Evicted, Track::HitRatio, Track::Asked, Track::Put, Track::Lent, Track::GivenUp],
            "guest" => &[Track::Evicted, Track::Put],
            _ => &[Track::Put],
        };
        for track in tracks {
            let point = self.measure(*track);
            let line = self.history.entry(*track).or_default();
            if line.len() == HISTORY_MAX {
                line.pop_front();
            }
            line.push_back(point);
        }
    }

    /// `mount`, `lend`, `join`, `guest` or `numa`.
    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    /// What it is called.
    pub fn name(&self) -> String {
        match self.kind() {
            "mount" => self.text("/mountpoint").to_owned(),
            "guest" => self.text("/fs").to_owned(),
            "numa" => format!("process {}", self.status["pid"]),
            _ => self.text("/listen").to_owned(),
        }
    }

    /// A text of its status.
    pub fn text(&self, at: &str) -> &str {
        self.status.pointer(at).and_then(Value::as_str).unwrap_or_default()
    }

    /// A list of its status.
    pub fn list(&self, at: &str) -> &[Value] {
        self.status.pointer(at).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether it serves images of guests.
    pub fn has_guests(&self) -> bool {
        self.status.pointer("/guests").is_some_and(|guests| !guests.is_null())
    }

    /// A number as it is now, all that have this label together.
    pub fn now(&self, name: &str, label: Option<(&str, &str)>) -> Point {
        sum(&self.readings, name, label)
    }

    /// How much a number has grown each second lately.
    pub fn rate(&self, name: &str, label: Option<(&str, &str)>) -> Point {
        let seconds = self.elapsed.as_secs_f64();
        (seconds > 0.0).then_some(self.growth(name, label)? / seconds)
    }

    fn growth(&self, name: &str, label: Option<(&str, &str)>) -> Point {
        let (now, before) = (self.now(name, label)?, sum(&self.before, name, label)?);
        // Another daemon counts anew.
        Some(if now < before { now } else { now - before })
    }

    /// What something took lately, on average, in seconds.
    fn mean(&self, name: &str) -> Point {
        let (now, now_sum) = times(&self.readings, name)?;
        let (mut before, mut before_sum) = times(&self.before, name)?;
        if now < before {
            (before, before_sum) = (0, 0.0);
        }
        (now > before).then(|| (now_sum - before_sum) / (now - before) as f64)
    }

    /// What `part` of the gets, or whatever it is, did not exceed lately, in seconds: the bound of
    /// the bucket.
    pub fn quantile(&self, name: &str, part: f64) -> Point {
        let (now, before) = (buckets(&self.readings, name)?, buckets(&self.before, name)?);
        let grown = now.iter().zip(before).map(|((bound, now), (_, before))| (*bound, now.saturating_sub(*before)));
        let grown: Vec<_> = grown.collect();
        let all: u64 = grown.iter().map(|(_, count)| count).sum();
        let (wanted, mut so_far) = ((all as f64 * part).ceil() as u64, 0);
        grown.into_iter().find_map(|(bound, count)| {
            so_far += count;
            (all > 0 && so_far >= wanted).then_some(bound)
        })
    }

    fn measure(&self, track: Track) -> Point {
        let rate = |names: &[&str]| total(names.iter().map(|name| self.rate(name, None)));
        let ratio = |part: Point, whole: Point| {
            part.zip(whole).filter(|(_, whole)| *whole > 0.0).map(|(part, whole)| part / whole)
        };
        let is_mount = self.kind() == "mount";
        match track {
            Track::Asked if is_mount => rate(&FROM_POOL),
            Track::HitRatio if is_mount => {
                let from_pool = rate(&FROM_POOL);
                ratio(from_pool, total([from_pool, self.measure(Track::Below)].into_iter()))
            }
            Track::Put if self.has_guests() => rate(&["pumapool_host_stored_pages_total"]),
            Track::Put if is_mount => rate(&["pumapool_mount_put_pages_total"]),
            Track::Lent if is_mount => self.now("pumapool_mount_lent_bytes", None),
            Track::Evicted if is_mount => rate(&["pumapool_mount_evictions_total"]),
            Track::Evicted if self.kind() == "join" => self.now("pumapool_node_evicted_pages_per_second", None),
            Track::Evicted => rate(&["pumapool_guest_evicted_pages_total"]),
            Track::Below => rate(&["pumapool_mount_below_pages_total"]),
            Track::Asked => rate(&["pumapool_lender_asked_pages_total"]),
            Track::HitRatio => ratio(rate(&["pumapool_lender_hit_pages_total"]), self.measure(Track::Asked)),
            Track::Put => match self.kind() {
                "guest" => rate(&["pumapool_guest_sent_pages_total"]),
                "numa" => rate(&["pumapool_numa_moved_pages_total"]),
                _ => rate(&["pumapool_lender_put_pages_total"]),
            },
            Track::Lent => self.now("pumapool_lender_stored_bytes", None),
            Track::GivenUp => rate(&GIVEN_UP),
            Track::Get => self.mean("pumapool_mount_get_seconds"),
            Track::ReadBelow => self.mean("pumapool_mount_below_read_seconds"),
        }
    }

    /// A line of its history, oldest first; empty: it has none.
    pub fn history(&self, track: Track) -> impl DoubleEndedIterator<Item = Point> + '_ {
        self.history.get(&track).into_iter().flatten().copied()
    }

    /// The newest point of a line.
    pub fn last(&self, track: Track) -> Point {
        self.history(track).next_back().flatten()
    }
}

/// Pages that a mount has from lenders, or need not have because it knows them.
const FROM_POOL: [&str; 4] = [
    "pumapool_mount_lender_pages_total",
    "pumapool_mount_buffer_pages_total",
    "pumapool_mount_zero_pages_total",
    "pumapool_mount_demoted_pages_total",
];

/// Why a lender gives pages up.
const GIVEN_UP: [&str; 4] = [
    "pumapool_lender_replaced_pages_total",
    "pumapool_lender_shrunk_pages_total",
    "pumapool_lender_reclaimed_pages_total",
    "pumapool_lender_demanded_pages_total",
];

/// The sum of those that are known; None: none is.
fn total(points: impl Iterator<Item = Point>) -> Point {
    points.flatten().reduce(|one, other| one + other)
}

fn of<'a>(readings: &'a HashMap<Key, Reading>, name: &str) -> impl Iterator<Item = (&'a Labels, &'a Reading)> {
    debug_assert!(is_known(name), "{name} is no metric");
    readings.iter().filter(move |((found, _), _)| *found == name).map(|((_, labels), reading)| (labels, reading))
}

fn is_known(name: &str) -> bool {
    crate::metrics::table::registry().iter().any(|section| section.metrics.iter().any(|metric| metric.name == name))
}

fn sum(readings: &HashMap<Key, Reading>, name: &str, label: Option<(&str, &str)>) -> Point {
    let has_label =
        |labels: &Labels| label.is_none_or(|label| labels.iter().any(|(name, value)| (*name, &value[..]) == label));
    let numbers = of(readings, name).filter(|(labels, _)| has_label(labels)).map(|(_, reading)| match reading {
        Reading::Number(number) => Some(*number),
        Reading::Times { .. } => None,
    });
    total(numbers)
}

fn buckets<'a>(readings: &'a HashMap<Key, Reading>, name: &str) -> Option<&'a [(f64, u64)]> {
    of(readings, name).find_map(|(_, reading)| match reading {
        Reading::Times { buckets, .. } => Some(&buckets[..]),
        Reading::Number(_) => None,
    })
}

fn times(readings: &HashMap<Key, Reading>, name: &str) -> Option<(u64, f64)> {
    of(readings, name).find_map(|(_, reading)| match reading {
        Reading::Times { buckets, sum } => Some((buckets.iter().map(|(_, count)| count).sum(), *sum)),
        Reading::Number(_) => None,
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    pub fn mount(reads: u64) -> Value {
        json!({
            "kind": "mount", "pid": 7, "socket": "mount-7.sock", "mountpoint": "/mnt/data", "source": "/srv/data",
            "strategy": "exclusive", "fill": "eviction", "write": "through", "lender_is_up": true, "borrowing": true,
            "lenders": [
                {"address": "10.0.0.2:7070", "state": "used", "reason": "", "ping_us": 120, "get_us": 180, "weight": 30,
                 "free_pages": 1000, "put_pages": reads, "get_pages": reads * 3, "bad_pages": 0},
                {"address": "10.0.0.3:7070", "state": "shunned", "reason": "slower than the disk", "ping_us": 90_000, "get_us": null,
                 "weight": 1, "free_pages": 10, "put_pages": 0, "get_pages": 0, "bad_pages": 0},
            ],
            "borrower": {"lender_pages": reads * 3, "buffer_pages": 0, "zero_pages": 0, "demoted_pages": 0, "below_pages": reads,
                "evictions": reads * 4, "put_pages": reads, "evictions_sequential": 5, "hedges": 2, "hedges_won": 1, "bad_pages": 0},
            "catalog": {"live_pages": 1 << 18, "files": 3, "entry_bytes": 1 << 20},
            "tap": {"ring_full_pages": 0}, "mount": {"takeovers": 1}, "pool": null,
            "disk": {"read_us": 4000.0, "get_is_late_us": 9000},
            "latencies": {
                "get": {"bounds_us": [100, 1000], "counts": [reads, reads, 0], "sum_ns": reads * 400_000},
                "below": {"bounds_us": [100, 1000], "counts": [0, 0, reads], "sum_ns": reads * 4_000_000},
            },
        })
    }

    #[test]
    fn rates_and_their_history() {
        let mut state = State::default();
        state.take(vec![mount(100)], Duration::ZERO);
        assert_eq!(state.daemons[0].last(Track::Asked), None, "nothing is known of rates yet");
        state.take(vec![mount(300)], Duration::from_secs(2));
        let daemon = &state.daemons[0];
        assert_eq!(daemon.last(Track::Asked), Some(300.0));
        assert_eq!(daemon.last(Track::HitRatio), Some(0.75));
        assert_eq!(daemon.last(Track::Evicted), Some(400.0));
        assert_eq!(daemon.last(Track::Lent), Some((1u64 << 30) as f64));
        assert!((daemon.last(Track::Get).unwrap() - 200e-6).abs() < 1e-9, "two gets took 400 µs in all");
        assert_eq!(daemon.quantile("pumapool_mount_get_seconds", 0.5), Some(100e-6));
        assert_eq!(daemon.quantile("pumapool_mount_get_seconds", 0.95), Some(1e-3));
        assert_eq!(daemon.rate("pumapool_link_get_pages_total", Some(("lender", "10.0.0.2:7070"))), Some(300.0));
        // It does not answer for a look, and another daemon, which counts anew, does then.
        state.take(vec![], Duration::from_secs(1));
        assert_eq!(state.daemons[0].missed, 1);
        state.take(vec![mount(100)], Duration::from_secs(1));
        assert_eq!(state.daemons[0].last(Track::Below), Some(50.0), "two looks went by");
        assert_eq!(state.daemons[0].history(Track::Below).count(), 3);
        for _ in 0..=MISSED_MAX {
            assert_eq!(state.daemons.len(), 1);
            state.take(vec![], Duration::from_secs(1));
        }
        assert!(state.daemons.is_empty());
    }

    #[test]
    fn histories_end() {
        let mut state = State::default();
        for reads in 0..HISTORY_MAX as u64 + 9 {
            state.take(vec![mount(reads)], Duration::from_secs(1));
        }
        assert_eq!(state.daemons[0].history(Track::Asked).count(), HISTORY_MAX);
    }
}
