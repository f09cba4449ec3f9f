//! The state of `top`: statuses, taken one after the other, and the rates and histories computed
//! from them. Pure logic: the caller passes the time.
//!
//! A number is given as a function of a status. So its present value and its rate are computed in
//! the same way.

use report::{Daemon as Report, GuestCounts, HostGuest, Lender, Link, Mount, Status, Target, Times};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Points of a history line: more than a wide terminal shows.
const HISTORY_MAX: usize = 512;
/// Limit on the daemons that are shown.
const DAEMONS_MAX: usize = 256;
/// A daemon that does not answer, for example during a takeover, is shown for so many rounds.
const MISSED_MAX: u32 = 5;

/// A value of a history line, or a rate. `None` if it is unknown.
pub type Point = Option<f64>;

/// The kinds of history lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Track {
    /// Hit ratio: the share of the requested pages that the pool had.
    HitRatio,
    /// Pages from the pool, or requested from a lender, each second.
    Asked,
    /// Pages read from the backing directory, each second.
    Below,
    /// Pages evicted, each second.
    Evicted,
    /// Pages put, sent or moved, each second.
    Put,
    /// Memory lent, in bytes.
    Lent,
    /// Memory given up, in pages each second.
    GivenUp,
    /// Latency of a get, in seconds.
    Get,
    /// Latency of a read of the backing directory, in seconds.
    ReadBelow,
}

/// A daemon.
pub struct Daemon {
    /// Its last status.
    pub status: Report,
    /// Number of rounds in which it has not answered.
    pub missed: u32,
    socket: String,
    /// Its status in the previous round.
    before: Report,
    elapsed: Duration,
    history: HashMap<Track, VecDeque<Point>>,
}

/// All daemons, in the order in which they are shown.
#[derive(Default)]
pub struct State {
    /// The daemons.
    pub daemons: Vec<Daemon>,
    /// Whether any round is complete.
    pub has_looked: bool,
}

impl State {
    /// Adds the statuses of a round; `elapsed` is the time since the previous one.
    pub fn take(&mut self, statuses: Vec<Status>, elapsed: Duration) {
        self.has_looked = true;
        self.daemons.iter_mut().for_each(|daemon| daemon.missed += 1);
        for Status { socket, daemon: status } in statuses {
            match self.daemons.iter().position(|daemon| daemon.socket == socket) {
                Some(at) => self.daemons[at].take(status, elapsed),
                None if self.daemons.len() < DAEMONS_MAX => self.daemons.push(Daemon::new(socket, status)),
                None => {}
            }
        }
        self.daemons.retain(|daemon| daemon.missed <= MISSED_MAX);
        let place = |daemon: &Daemon| match daemon.status {
            Report::Unknown => 0,
            Report::Join(_) => 1,
            Report::Mount(_) => 2,
            Report::Lend(_) => 3,
            Report::Guest(_) => 4,
            Report::Numa(_) => 5,
        };
        self.daemons.sort_by_cached_key(|daemon| (place(daemon), daemon.name(), daemon.socket.clone()));
    }
}

impl Daemon {
    fn new(socket: String, status: Report) -> Daemon {
        let mut daemon = Daemon {
            status: Report::Unknown,
            missed: 0,
            socket,
            before: Report::Unknown,
            elapsed: Duration::ZERO,
            history: HashMap::new(),
        };
        daemon.take(status, Duration::ZERO);
        daemon
    }

    fn take(&mut self, status: Report, elapsed: Duration) {
        self.before = std::mem::replace(&mut self.status, status);
        // The time since its last answer spans several rounds.
        self.elapsed = elapsed * (self.missed.max(1));
        self.missed = 0;
        let tracks: &[Track] = match self.status {
            Report::Mount(_) => &[
                Track::HitRatio,
                Track::Asked,
                Track::Below,
                Track::Evicted,
                Track::Put,
                Track::Lent,
                Track::Get,
                Track::ReadBelow,
            ],
            Report::Lend(_) => &[Track::HitRatio, Track::Asked, Track::Put, Track::Lent, Track::GivenUp],
            Report::Join(_) => {
                &[Track::Evicted, Track::HitRatio, Track::Asked, Track::Put, Track::Lent, Track::GivenUp]
            }
            Report::Guest(_) => &[Track::Evicted, Track::Put],
            Report::Numa(_) => &[Track::Put],
            Report::Unknown => &[],
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

    /// The name of the daemon.
    pub fn name(&self) -> String {
        match &self.status {
            Report::Mount(mount) => mount.mountpoint.clone(),
            Report::Guest(guest) => guest.fs.clone(),
            Report::Numa(numa) => format!("process {}", numa.pid),
            Report::Lend(lend) => lend.listen.clone(),
            Report::Join(join) => join.lend.listen.clone(),
            Report::Unknown => self.socket.clone(),
        }
    }

    /// The recent growth of a number, each second.
    pub fn rate(&self, number: impl Fn(&Report) -> Point) -> Point {
        let seconds = self.elapsed.as_secs_f64();
        let (now, before) = (number(&self.status)?, number(&self.before)?);
        // A new daemon counts from 0.
        let growth = if now < before { now } else { now - before };
        (seconds > 0.0).then_some(growth / seconds)
    }

    /// The recent average of a time, in seconds.
    fn mean(&self, times: impl Fn(&Mount) -> &Times) -> Point {
        let sum = |status: &Report| {
            let times = times(as_mount(status)?);
            Some((sum_of(&times.counts), times.sum_ns))
        };
        let ((now, now_ns), (mut before, mut before_ns)) = (sum(&self.status)?, sum(&self.before)?);
        if now < before {
            (before, before_ns) = (0, 0);
        }
        (now > before).then(|| now_ns.saturating_sub(before_ns) as f64 / 1e9 / (now - before) as f64)
    }

    /// A time, in seconds, that this part of the gets, or whatever it is, did not exceed lately:
    /// the bound of the bucket.
    pub fn quantile(&self, times: impl Fn(&Mount) -> &Times, part: f64) -> Point {
        let (now, before) = (times(as_mount(&self.status)?), times(as_mount(&self.before)?));
        let grown: Vec<u64> =
            now.counts.iter().zip(&before.counts).map(|(now, before)| now.saturating_sub(*before)).collect();
        let all = sum_of(&grown);
        let (wanted, mut so_far) = ((all as f64 * part).ceil() as u64, 0_u64);
        let bounds = now.bounds_us.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        bounds.zip(grown).find_map(|(bound, count)| {
            so_far = so_far.saturating_add(count);
            (all > 0 && so_far >= wanted).then_some(bound)
        })
    }

    fn measure(&self, track: Track) -> Point {
        let ratio = |part: Point, whole: Point| {
            part.zip(whole).filter(|(_, whole)| *whole > 0.0).map(|(part, whole)| part / whole)
        };
        match (track, &self.status) {
            (Track::Asked, Report::Mount(_)) => self.rate(of_mount(from_pool)),
            (Track::HitRatio, Report::Mount(_)) => {
                let asked = self.rate(of_mount(|mount| from_pool(mount).saturating_add(mount.borrower.backing_pages)));
                ratio(self.rate(of_mount(from_pool)), asked)
            }
            (Track::Put, Report::Mount(mount)) => match &mount.guests {
                Some(_) => self.rate(of_mount(|mount| {
                    let guests = mount.guests.iter().flat_map(|guests| &guests.list);
                    guests.map(|guest| guest.stored_pages).fold(0, u64::saturating_add)
                })),
                None => self.rate(of_mount(|mount| mount.borrower.put_pages)),
            },
            (Track::Lent, Report::Mount(mount)) => Some(page_bytes(mount.catalog.live_pages)),
            (Track::Evicted, Report::Mount(_)) => self.rate(of_mount(|mount| mount.borrower.evictions)),
            (Track::Below, _) => self.rate(of_mount(|mount| mount.borrower.backing_pages)),
            (Track::Get, _) => self.mean(|mount| &mount.latencies.get),
            (Track::ReadBelow, _) => self.mean(|mount| &mount.latencies.backing),
            (Track::Evicted, Report::Join(join)) => Some(join.role.evicted_pages_per_second as f64),
            (Track::Evicted, _) => self.rate(of_guest(|guest| guest.evicted_pages)),
            (Track::Put, Report::Guest(_)) => self.rate(of_guest(|guest| guest.sent_pages)),
            (Track::Put, Report::Numa(_)) => self.rate(|status| match status {
                Report::Numa(numa) => {
                    Some(numa.targets.iter().map(|target| target.moved_pages).fold(0, u64::saturating_add) as f64)
                }
                _ => None,
            }),
            (Track::Put, _) => self.rate(of_lender(|lender| lender.puts)),
            (Track::Asked, _) => self.rate(of_lender(|lender| lender.gets)),
            (Track::HitRatio, _) => ratio(self.rate(of_lender(|lender| lender.hits)), self.measure(Track::Asked)),
            (Track::Lent, status) => as_lender(status).map(|lender| page_bytes(lender.stored_pages)),
            (Track::GivenUp, _) => self.rate(of_lender(|lender| {
                let Lender { replaced, shrunk, reclaimed_by_kernel, demanded_pages, .. } = lender;
                let pages = [replaced, shrunk, reclaimed_by_kernel, demanded_pages];
                pages.into_iter().fold(0, |sum, one| sum.saturating_add(*one))
            })),
        }
    }

    /// A history line, oldest value first; empty if there is none.
    pub fn history(&self, track: Track) -> impl DoubleEndedIterator<Item = Point> + '_ {
        self.history.get(&track).into_iter().flatten().copied()
    }

    /// The newest point of a line.
    pub fn last(&self, track: Track) -> Point {
        self.history(track).next_back().flatten()
    }
}

fn sum_of(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// Converts pages to bytes.
pub fn page_bytes(pages: u64) -> f64 {
    pages as f64 * page::PAGE_SIZE as f64
}

/// Pages that a mount got from lenders, or answered from its own knowledge.
fn from_pool(mount: &Mount) -> u64 {
    let from = &mount.borrower;
    let pages = [from.lender_pages, from.buffer_pages, from.zero_pages, from.demoted_pages];
    pages.into_iter().fold(0, u64::saturating_add)
}

fn as_mount(status: &Report) -> Option<&Mount> {
    match status {
        Report::Mount(mount) => Some(mount),
        _ => None,
    }
}

fn as_lender(status: &Report) -> Option<&Lender> {
    match status {
        Report::Lend(lend) => Some(&lend.lender),
        Report::Join(join) => Some(&join.lend.lender),
        _ => None,
    }
}

/// A number of a mount.
pub fn of_mount(number: impl Fn(&Mount) -> u64) -> impl Fn(&Report) -> Point {
    move |status| as_mount(status).map(|mount| number(mount) as f64)
}

/// A number of a lender, also that of a node.
pub fn of_lender(number: impl Fn(&Lender) -> u64) -> impl Fn(&Report) -> Point {
    move |status| as_lender(status).map(|lender| number(lender) as f64)
}

/// A number of the lender with this address, as a mount sees it.
pub fn of_link<'a>(address: &'a str, number: impl Fn(&Link) -> u64 + 'a) -> impl Fn(&Report) -> Point + 'a {
    move |status| {
        let link = as_mount(status)?.lenders.iter().find(|link| link.address == address);
        link.map(|link| number(link) as f64)
    }
}

/// A number of the guest with this image.
pub fn of_image<'a>(image: &'a str, number: impl Fn(&HostGuest) -> u64 + 'a) -> impl Fn(&Report) -> Point + 'a {
    move |status| {
        let guest = as_mount(status)?.guests.as_ref()?.list.iter().find(|guest| guest.image == image);
        guest.map(|guest| number(guest) as f64)
    }
}

/// A number of a guest that gives its evictions to the host.
pub fn of_guest(number: impl Fn(&GuestCounts) -> u64) -> impl Fn(&Report) -> Point {
    move |status| match status {
        Report::Guest(guest) => Some(number(&guest.guest) as f64),
        _ => None,
    }
}

/// A number of a target whose memory is placed.
pub fn of_target<'a>(who: &'a str, number: impl Fn(&Target) -> u64 + 'a) -> impl Fn(&Report) -> Point + 'a {
    move |status| match status {
        Report::Numa(numa) => numa.targets.iter().find(|target| target.who == who).map(|target| number(target) as f64),
        _ => None,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use report::{Borrower, Catalog, Disk, Files, Latencies, LinkState, Mount, Populate, Strategy, Tap, Times, Write};

    /// Puts a status behind a socket.
    pub fn at(socket: &str, daemon: Report) -> Status {
        Status { socket: socket.to_owned(), daemon }
    }

    pub fn mount(reads: u64) -> Mount {
        let link = |address: &str, state, reason: &str| Link {
            address: address.to_owned(),
            state,
            reason: reason.to_owned(),
            ..Link::default()
        };
        let times =
            |counts: [u64; 3], sum_ns: u64| Times { bounds_us: vec![100, 1000], counts: counts.to_vec(), sum_ns };
        Mount {
            pid: 7,
            mountpoint: "/mnt/data".into(),
            source: "/srv/data".into(),
            strategy: Strategy::Exclusive,
            fill: Populate::Eviction,
            write: Write::Through,
            lender_is_up: true,
            borrowing: true,
            lenders: vec![
                Link {
                    ping_us: 120,
                    get_us: Some(180),
                    weight: 30,
                    free_pages: 1000,
                    put_pages: reads,
                    get_pages: reads * 3,
                    ..link("10.0.0.2:7070", LinkState::Used, "")
                },
                Link {
                    ping_us: 90_000,
                    weight: 1,
                    free_pages: 10,
                    ..link("10.0.0.3:7070", LinkState::Bypassed, "slower than the disk")
                },
            ],
            borrower: Borrower {
                lender_pages: reads * 3,
                backing_pages: reads,
                evictions: reads * 4,
                put_pages: reads,
                evictions_sequential: 5,
                hedges: 2,
                hedges_won: 1,
                ..Borrower::default()
            },
            catalog: Catalog { live_pages: 1 << 18, files: 3, entry_bytes: 1 << 20 },
            tap: Some(Tap::default()),
            mount: Files { takeovers: 1, ..Files::default() },
            disk: Disk { read_us: Some(4000), get_is_late_us: 9000 },
            latencies: Latencies {
                get: times([reads, reads, 0], reads * 400_000),
                backing: times([0, 0, reads], reads * 4_000_000),
            },
            ..Mount::default()
        }
    }

    /// A look at that mount alone.
    pub fn look(reads: u64) -> Vec<Status> {
        vec![at("mount-7.sock", Report::Mount(Box::new(mount(reads))))]
    }

    #[test]
    fn rates_and_their_history() {
        let mut state = State::default();
        state.take(look(100), Duration::ZERO);
        assert_eq!(state.daemons[0].last(Track::Asked), None, "nothing is known of rates yet");
        state.take(look(300), Duration::from_secs(2));
        let daemon = &state.daemons[0];
        assert_eq!(daemon.last(Track::Asked), Some(300.0));
        assert_eq!(daemon.last(Track::HitRatio), Some(0.75));
        assert_eq!(daemon.last(Track::Evicted), Some(400.0));
        assert_eq!(daemon.last(Track::Lent), Some((1u64 << 30) as f64));
        assert!((daemon.last(Track::Get).unwrap() - 200e-6).abs() < 1e-9, "two gets took 400 µs in all");
        assert_eq!(daemon.quantile(|mount| &mount.latencies.get, 0.5), Some(100e-6));
        assert_eq!(daemon.quantile(|mount| &mount.latencies.get, 0.95), Some(1e-3));
        assert_eq!(daemon.rate(of_link("10.0.0.2:7070", |link| link.get_pages)), Some(300.0));
        // It does not answer for a look, and another daemon, which counts anew, does then.
        state.take(vec![], Duration::from_secs(1));
        assert_eq!(state.daemons[0].missed, 1);
        state.take(look(100), Duration::from_secs(1));
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
            state.take(look(reads), Duration::from_secs(1));
        }
        assert_eq!(state.daemons[0].history(Track::Asked).count(), HISTORY_MAX);
    }
}
