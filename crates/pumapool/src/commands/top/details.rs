//! The details of a daemon, for each kind: its history lines, and the text below them.

use crate::commands::{
    top::numbers::{bytes, count, micros, millis, number, pages, percent, seconds, shortened},
    top::state::{self, Daemon, Point, Track},
};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use report::{
    Daemon as Report, GuestCounts, HostGuest, Join, Lender, LentTo, Link, LinkState, Mount, NodeMountState, Numa, Pool,
    Pressure, Target,
};

/// Severity of a part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Well,
    Warning,
    Bad,
}

impl Mood {
    pub(super) fn style(self) -> Style {
        match self {
            Mood::Well => Style::new().fg(Color::Green),
            Mood::Warning => Style::new().fg(Color::Yellow),
            Mood::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        }
    }
}

pub(super) const FAINT: Style = Style::new().fg(Color::DarkGray);
pub(super) const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);

/// The details of one daemon.
pub(super) struct Details {
    pub(super) title: String,
    pub(super) tracks: Vec<(&'static str, String, Track)>,
    pub(super) lines: Vec<Line<'static>>,
}

pub(super) fn details(daemon: &Daemon) -> Details {
    let (title, tracks, lines) = match &daemon.status {
        Report::Mount(mount) => {
            let title = format!("{} at {}", mount.source, mount.mountpoint);
            let tracks = match mount.guests {
                Some(_) => vec![
                    ("from the pool", Track::Asked),
                    ("from the disk", Track::Below),
                    ("stored", Track::Put),
                    ("disk read", Track::ReadBelow),
                ],
                None => vec![
                    ("hit ratio", Track::HitRatio),
                    ("from the pool", Track::Asked),
                    ("from the disk", Track::Below),
                    ("evicted", Track::Evicted),
                    ("get", Track::Get),
                    ("disk read", Track::ReadBelow),
                ],
            };
            (title, tracks, of_mount(daemon, mount))
        }
        Report::Lend(lend) => {
            let lines = [of_lender(daemon, &lend.lender), pool_line(lend.pool.as_ref())].concat();
            (format!("lender at {}", lend.listen), LENDER_TRACKS.to_vec(), lines)
        }
        Report::Join(join) => {
            let tracks = [&[("evicted", Track::Evicted)], &LENDER_TRACKS[..]].concat();
            let lines =
                [of_node(join), of_lender(daemon, &join.lend.lender), pool_line(join.lend.pool.as_ref())].concat();
            (format!("node at {}", join.lend.listen), tracks, lines)
        }
        Report::Guest(guest) => {
            let title = format!("{}, given to {}", guest.fs, guest.host);
            (title, vec![("evicted", Track::Evicted), ("sent", Track::Put)], of_guest(daemon))
        }
        Report::Numa(numa) => {
            ("memory on NUMA nodes".to_owned(), vec![("moved", Track::Put)], of_targets(daemon, numa))
        }
        Report::Unknown => {
            let line = Line::raw("a daemon of a newer version: its own program shows it");
            (daemon.name(), Vec::new(), vec![line])
        }
    };
    let shown = |(name, track): (&'static str, Track)| (name, amount(daemon, track), track);
    Details { title, tracks: tracks.into_iter().map(shown).collect(), lines }
}

const LENDER_TRACKS: [(&str, Track); 5] = [
    ("hit ratio", Track::HitRatio),
    ("asked", Track::Asked),
    ("put", Track::Put),
    ("lent", Track::Lent),
    ("given up", Track::GivenUp),
];

/// A track's newest point.
fn amount(daemon: &Daemon, track: Track) -> String {
    let point = daemon.last(track);
    match track {
        Track::HitRatio => percent(point),
        Track::Lent => bytes(point),
        Track::Get | Track::ReadBelow => seconds(point),
        Track::Asked | Track::Below | Track::Evicted | Track::Put | Track::GivenUp => format!("{}/s", count(point)),
    }
}

pub(super) fn lending(lender: &Lender) -> (String, Mood) {
    match lender.pressure {
        Pressure::Shrink => ("gives back".to_owned(), Mood::Warning),
        Pressure::Hold => ("does not grow".to_owned(), Mood::Warning),
        Pressure::None | Pressure::Unknown => ("lends".to_owned(), Mood::Well),
    }
}

/// A line of text, with its name.
fn said(name: &str, words: Vec<Span<'static>>) -> Line<'static> {
    let mut line = Line::from(Span::styled(format!("{name:<10}"), FAINT));
    line.spans.extend(words);
    line
}

/// Parts of a line. Parts with problems are highlighted.
fn parts(parts: Vec<(String, Mood)>) -> Vec<Span<'static>> {
    let mut spans = Vec::new();
    for (at, (text, mood)) in parts.into_iter().enumerate() {
        if at > 0 {
            spans.push(Span::styled(" · ", FAINT));
        }
        spans.push(if mood == Mood::Well { Span::raw(text) } else { Span::styled(text, mood.style()) });
    }
    spans
}

/// Shows a count, as a warning unless it is 0.
fn none_wanted(point: Point, mood: Mood) -> Mood {
    if point.is_some_and(|point| point > 0.0) { mood } else { Mood::Well }
}

/// The rate of a counter, as text.
fn each_second(daemon: &Daemon, number: impl Fn(&Report) -> Point) -> String {
    format!("{}/s", count(daemon.rate(number)))
}

fn of_mount(daemon: &Daemon, mount: &Mount) -> Vec<Line<'static>> {
    let rate = |number: fn(&Mount) -> u64| each_second(daemon, state::of_mount(number));
    let mut lines = Vec::new();
    for guest in mount.guests.iter().flat_map(|guests| &guests.list) {
        lines.push(guest_line(daemon, guest));
    }
    if !mount.lenders.is_empty() {
        let heading = format!(
            "{:<26}{:<9}{:>8}{:>9}{:>8}{:>8}{:>10}",
            "LENDER", "STATE", "PING", "GET", "GOT/s", "PUT/s", "FREE"
        );
        lines.push(Line::styled(heading, HEAD));
        lines.extend(mount.lenders.iter().map(|link| link_line(daemon, link)));
    }
    let hedges = rate(|mount| mount.borrower.hedges);
    let hedges_won = rate(|mount| mount.borrower.hedges_won);
    lines.push(said(
        "policies",
        parts(vec![
            (mount.strategy.to_string(), Mood::Well),
            (format!("filter {}", rate(|mount| mount.borrower.evictions_sequential)), Mood::Well),
            (format!("hedges {hedges}, {hedges_won} won"), Mood::Well),
            (format!("late after {}", micros(mount.disk.get_is_late_us)), Mood::Well),
        ]),
    ));
    let most_gets = daemon.quantile(|mount| &mount.latencies.get, 0.95);
    lines.push(said(
        "lent",
        parts(vec![
            (format!("{} of {} files", pages(mount.catalog.live_pages), number(mount.catalog.files)), Mood::Well),
            (format!("catalog {}", bytes(Some(mount.catalog.entry_bytes as f64))), Mood::Well),
            (format!("gets 95 % below {}", seconds(most_gets)), Mood::Well),
        ]),
    ));
    let ring_full = |mount: &Mount| mount.tap.as_ref().map_or(0, |tap| tap.ring_full_pages);
    let (bad, takeovers) = (mount.borrower.bad_pages, mount.mount.takeovers);
    lines.push(said(
        "trouble",
        parts(vec![
            (
                format!("{} lost, ring full", number(ring_full(mount))),
                none_wanted(daemon.rate(state::of_mount(ring_full)), Mood::Warning),
            ),
            (format!("{} bad pages", number(bad)), none_wanted(Some(bad as f64), Mood::Bad)),
            (format!("{} takeovers", number(takeovers)), none_wanted(Some(takeovers as f64), Mood::Warning)),
        ]),
    ));
    lines.extend(pool_line(mount.pool.as_ref()));
    lines
}

fn link_line(daemon: &Daemon, link: &Link) -> Line<'static> {
    let mood = match link.state {
        LinkState::Used => Mood::Well,
        LinkState::Down => Mood::Bad,
        LinkState::Bypassed | LinkState::Suspended | LinkState::Unknown => Mood::Warning,
    };
    let rate = |number: fn(&Link) -> u64| count(daemon.rate(state::of_link(&link.address, number)));
    let numbers = format!(
        "{:>8}{:>9}{:>8}{:>8}{:>10}",
        micros(link.ping_us),
        link.get_us.map_or("–".to_owned(), micros),
        rate(|link| link.get_pages),
        rate(|link| link.put_pages),
        pages(link.free_pages),
    );
    let mut spans = vec![
        Span::raw(format!("{:<26}", shortened(&link.address, 25))),
        Span::styled(format!("{:<9}", link.state), mood.style()),
    ];
    match link.reason.as_str() {
        "" => spans.push(Span::raw(numbers)),
        reason => spans.push(Span::styled(format!("  {reason}"), mood.style())),
    }
    Line::from(spans)
}

fn guest_line(daemon: &Daemon, guest: &HostGuest) -> Line<'static> {
    let (state, mood) = match (&guest.problem, guest.connected) {
        (Some(problem), _) => (problem.clone(), Mood::Bad),
        (None, true) => ("connected".to_owned(), Mood::Well),
        (None, false) => ("disconnected".to_owned(), Mood::Warning),
    };
    let rate = |number: fn(&HostGuest) -> u64| each_second(daemon, state::of_image(&guest.image, number));
    said(
        "guest",
        parts(vec![
            (guest.image.clone(), Mood::Well),
            (state, mood),
            (format!("{} placed", pages(guest.placed_pages)), Mood::Well),
            (format!("{} stored", rate(|guest| guest.stored_pages)), Mood::Well),
            (format!("{} read again", rate(|guest| guest.hit_pages)), Mood::Well),
        ]),
    )
}

fn of_lender(daemon: &Daemon, lender: &Lender) -> Vec<Line<'static>> {
    let rate = |number: fn(&Lender) -> u64| each_second(daemon, state::of_lender(number));
    let (pressure, mood) = lending(lender);
    let in_bytes = |of: u64| bytes(Some(of as f64));
    let refused = lender.refused_keys;
    let mut lines = vec![
        said(
            "memory",
            parts(vec![
                (format!("{} of {} lent", pages(lender.stored_pages), pages(lender.capacity_pages)), Mood::Well),
                (format!("may take {} more", in_bytes(lender.available_bytes)), Mood::Well),
                (format!("reserve {}", in_bytes(lender.reserve_bytes)), Mood::Well),
            ]),
        ),
        said(
            "reclaim",
            parts(vec![
                (pressure, mood),
                (format!("replaced {}", rate(|lender| lender.replaced)), Mood::Well),
                (format!("given back {}", rate(|lender| lender.shrunk)), Mood::Well),
                (format!("by the kernel {}", rate(|lender| lender.reclaimed_by_kernel)), Mood::Well),
            ]),
        ),
        said(
            "borrowers",
            parts(vec![
                (format!("{} connected", number(lender.borrowers)), Mood::Well),
                (format!("{} may come back", number(lender.kept_sessions)), Mood::Well),
                (format!("{} keys refused", number(refused)), none_wanted(Some(refused as f64), Mood::Warning)),
            ]),
        ),
    ];
    for LentTo { name, stored_pages, gets, hits, .. } in &lender.borrower_list {
        let ratio = (*gets > 0).then(|| *hits as f64 / *gets as f64);
        lines.push(said(
            "",
            parts(vec![
                (name.clone(), Mood::Well),
                (pages(*stored_pages), Mood::Well),
                (format!("{} of {} gets hit", percent(ratio), number(*gets)), Mood::Well),
            ]),
        ));
    }
    lines
}

fn of_node(node: &Join) -> Vec<Line<'static>> {
    let role = &node.role;
    let mut lines = vec![
        said(
            "role",
            parts(vec![
                (format!("{} for {}", role.role, millis(role.since_ms)), Mood::Well),
                (role.reason.clone(), Mood::Well),
            ]),
        ),
        said(
            "",
            parts(vec![
                (format!("wanted: {}", role.wanted), Mood::Well),
                (format!("{} changes", number(role.changes)), Mood::Well),
                (format!("lends after {} of calm", millis(role.calm_ms)), Mood::Well),
            ]),
        ),
    ];
    for mount in &node.mounts {
        let mood = match mount.state {
            NodeMountState::Borrows | NodeMountState::DoesNotBorrow => Mood::Well,
            NodeMountState::DoesNotAnswer | NodeMountState::Gone | NodeMountState::Unknown => Mood::Bad,
        };
        let parts = parts(vec![(mount.mountpoint.clone(), Mood::Well), (mount.state.to_string(), mood)]);
        lines.push(said("mount", parts));
    }
    lines
}

fn of_guest(daemon: &Daemon) -> Vec<Line<'static>> {
    let rate = |number: fn(&GuestCounts) -> u64| each_second(daemon, state::of_guest(number));
    let lost = daemon.rate(state::of_guest(|guest| guest.ring_full_pages));
    vec![said(
        "of those",
        parts(vec![
            (format!("stored {}", rate(|guest| guest.stored_pages)), Mood::Well),
            (format!("no settled place {}", rate(|guest| guest.unsettled_pages)), Mood::Well),
            (format!("lost, ring full {}/s", count(lost)), none_wanted(lost, Mood::Warning)),
        ]),
    )]
}

fn of_targets(daemon: &Daemon, numa: &Numa) -> Vec<Line<'static>> {
    let line = |target: &Target| {
        let moved = each_second(daemon, state::of_target(&target.who, |target| target.moved_pages));
        said(
            "target",
            parts(vec![
                (target.who.clone(), Mood::Well),
                (target.policy.clone(), Mood::Well),
                (format!("{moved} moved"), Mood::Well),
                (target.state.clone(), Mood::Well),
            ]),
        )
    };
    numa.targets.iter().map(line).collect()
}

/// The line of the pool, if the daemon takes part in one.
fn pool_line(pool: Option<&Pool>) -> Vec<Line<'static>> {
    let Some(pool) = pool else { return Vec::new() };
    let gone = Some(pool.dead_nodes as f64);
    vec![said(
        "pool",
        parts(vec![
            (format!("{} nodes beside this one", number(pool.live_nodes)), Mood::Well),
            (format!("{} gone", count(gone)), none_wanted(gone, Mood::Warning)),
            (format!("{} lenders", pool.members.len()), Mood::Well),
        ]),
    )]
}
