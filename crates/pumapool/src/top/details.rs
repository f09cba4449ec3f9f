//! What there is to say of one daemon of each kind: which history lines, and which words below
//! them.

use crate::top::numbers::{bytes, count, percent, seconds, shortened};
use crate::top::state::{Daemon, Point, Track};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use serde_json::Value;

/// How things stand.
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

/// What there is to say of one daemon.
pub(super) struct Details {
    pub(super) title: String,
    pub(super) tracks: Vec<(&'static str, String, Track)>,
    pub(super) lines: Vec<Line<'static>>,
}

pub(super) fn details(daemon: &Daemon) -> Details {
    let (title, tracks, lines) = match daemon.kind() {
        "mount" => {
            let title = format!("{} at {}", daemon.text("/source"), daemon.text("/mountpoint"));
            let tracks = match daemon.has_guests() {
                true => vec![
                    ("from the pool", Track::Asked),
                    ("from the disk", Track::Below),
                    ("stored", Track::Put),
                    ("disk read", Track::ReadBelow),
                ],
                false => vec![
                    ("hit ratio", Track::HitRatio),
                    ("from the pool", Track::Asked),
                    ("from the disk", Track::Below),
                    ("evicted", Track::Evicted),
                    ("get", Track::Get),
                    ("disk read", Track::ReadBelow),
                ],
            };
            (title, tracks, of_mount(daemon))
        }
        "lend" => (format!("lender at {}", daemon.name()), LENDER_TRACKS.to_vec(), of_lender(daemon)),
        "join" => {
            let tracks = [&[("evicted", Track::Evicted)], &LENDER_TRACKS[..]].concat();
            (format!("node at {}", daemon.name()), tracks, [of_node(daemon), of_lender(daemon)].concat())
        }
        "guest" => {
            let title = format!("{}, given to {}", daemon.text("/fs"), daemon.text("/host"));
            (title, vec![("evicted", Track::Evicted), ("sent", Track::Put)], of_guest(daemon))
        }
        _ => ("memory on NUMA nodes".to_owned(), vec![("moved", Track::Put)], of_targets(daemon)),
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

pub(super) fn lending(daemon: &Daemon) -> (String, Mood) {
    match daemon.text("/lender/pressure") {
        "shrink" => ("gives back".to_owned(), Mood::Warning),
        "hold" => ("does not grow".to_owned(), Mood::Warning),
        _ => ("lends".to_owned(), Mood::Well),
    }
}

/// A name of what follows, and words.
fn said(name: &str, words: Vec<Span<'static>>) -> Line<'static> {
    let mut line = Line::from(Span::styled(format!("{name:<10}"), FAINT));
    line.spans.extend(words);
    line
}

/// Parts of a line: those that are not as they should be stand out.
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

/// Warns if there is any of it.
fn none_wanted(point: Point, mood: Mood) -> Mood {
    if point.is_some_and(|point| point > 0.0) { mood } else { Mood::Well }
}

fn of_mount(daemon: &Daemon) -> Vec<Line<'static>> {
    let now = |name: &str| daemon.now(name, None);
    let rate = |name: &str| daemon.rate(name, None);
    let mut lines = Vec::new();
    for guest in daemon.list("/guests/list") {
        lines.push(guest_line(daemon, guest));
    }
    let lenders = daemon.list("/lenders");
    if !lenders.is_empty() {
        let heading = format!(
            "{:<26}{:<9}{:>8}{:>9}{:>8}{:>8}{:>10}",
            "LENDER", "STATE", "PING", "GET", "GOT/s", "PUT/s", "FREE"
        );
        lines.push(Line::styled(heading, HEAD));
        lines.extend(lenders.iter().map(|lender| lender_line(daemon, lender)));
    }
    let hedges = (rate("pumapool_mount_hedges_total"), rate("pumapool_mount_hedges_won_total"));
    lines.push(said(
        "policies",
        parts(vec![
            (daemon.text("/strategy").to_owned(), Mood::Well),
            (format!("filter {}/s", count(rate("pumapool_mount_evictions_sequential_total"))), Mood::Well),
            (format!("hedges {}/s, {}/s won", count(hedges.0), count(hedges.1)), Mood::Well),
            (format!("late after {}", seconds(now("pumapool_mount_get_late_seconds"))), Mood::Well),
        ]),
    ));
    let lent = now("pumapool_mount_lent_bytes");
    lines.push(said(
        "lent",
        parts(vec![
            (format!("{} of {} files", bytes(lent), count(now("pumapool_mount_lent_files"))), Mood::Well),
            (format!("catalog {}", bytes(now("pumapool_mount_catalog_bytes"))), Mood::Well),
            (format!("gets 95 % below {}", seconds(daemon.quantile("pumapool_mount_get_seconds", 0.95))), Mood::Well),
        ]),
    ));
    let (ring, bad) = (now("pumapool_mount_tap_ring_full_pages_total"), now("pumapool_mount_bad_pages_total"));
    let takeovers = now("pumapool_mount_takeovers_total");
    lines.push(said(
        "trouble",
        parts(vec![
            (
                format!("{} lost, ring full", count(ring)),
                none_wanted(rate("pumapool_mount_tap_ring_full_pages_total"), Mood::Warning),
            ),
            (format!("{} bad pages", count(bad)), none_wanted(bad, Mood::Bad)),
            (format!("{} takeovers", count(takeovers)), none_wanted(takeovers, Mood::Warning)),
        ]),
    ));
    lines.extend(pool_line(daemon));
    lines
}

fn lender_line(daemon: &Daemon, lender: &Value) -> Line<'static> {
    let text = |name: &str| lender[name].as_str().unwrap_or_default();
    let address = text("address");
    let of = Some(("lender", address));
    let mood = match text("state") {
        "used" => Mood::Well,
        "down" => Mood::Bad,
        _ => Mood::Warning,
    };
    let numbers = format!(
        "{:>8}{:>9}{:>8}{:>8}{:>10}",
        seconds(daemon.now("pumapool_link_ping_seconds", of)),
        seconds(daemon.now("pumapool_link_get_recent_seconds", of)),
        count(daemon.rate("pumapool_link_get_pages_total", of)),
        count(daemon.rate("pumapool_link_put_pages_total", of)),
        bytes(daemon.now("pumapool_link_free_bytes", of)),
    );
    let mut spans = vec![
        Span::raw(format!("{:<26}", shortened(address, 25))),
        Span::styled(format!("{:<9}", text("state")), mood.style()),
    ];
    match text("reason") {
        "" => spans.push(Span::raw(numbers)),
        reason => spans.push(Span::styled(format!("  {reason}"), mood.style())),
    }
    Line::from(spans)
}

fn guest_line(daemon: &Daemon, guest: &Value) -> Line<'static> {
    let image = guest["image"].as_str().unwrap_or_default();
    let of = Some(("image", image));
    let (state, mood) = match (guest["problem"].as_str(), guest["connected"] == true) {
        (Some(problem), _) => (problem.to_owned(), Mood::Bad),
        (None, true) => ("connected".to_owned(), Mood::Well),
        (None, false) => ("away".to_owned(), Mood::Warning),
    };
    said(
        "guest",
        parts(vec![
            (image.to_owned(), Mood::Well),
            (state, mood),
            (format!("{} placed", bytes(daemon.now("pumapool_host_placed_bytes", of))), Mood::Well),
            (format!("{}/s stored", count(daemon.rate("pumapool_host_stored_pages_total", of))), Mood::Well),
            (format!("{}/s read again", count(daemon.rate("pumapool_host_hit_pages_total", of))), Mood::Well),
        ]),
    )
}

fn of_lender(daemon: &Daemon) -> Vec<Line<'static>> {
    let now = |name: &str| daemon.now(name, None);
    let rate = |name: &str| count(daemon.rate(name, None));
    let (pressure, mood) = lending(daemon);
    let mut lines = vec![
        said(
            "memory",
            parts(vec![
                (
                    format!(
                        "{} of {} lent",
                        bytes(now("pumapool_lender_stored_bytes")),
                        bytes(now("pumapool_lender_capacity_bytes"))
                    ),
                    Mood::Well,
                ),
                (format!("may take {} more", bytes(now("pumapool_lender_headroom_bytes"))), Mood::Well),
                (format!("reserve {}", bytes(now("pumapool_lender_reserve_bytes"))), Mood::Well),
            ]),
        ),
        said(
            "reclaim",
            parts(vec![
                (pressure, mood),
                (format!("replaced {}/s", rate("pumapool_lender_replaced_pages_total")), Mood::Well),
                (format!("given back {}/s", rate("pumapool_lender_shrunk_pages_total")), Mood::Well),
                (format!("by the kernel {}/s", rate("pumapool_lender_reclaimed_pages_total")), Mood::Well),
            ]),
        ),
        said(
            "borrowers",
            parts(vec![
                (format!("{} connected", count(now("pumapool_lender_borrowers"))), Mood::Well),
                (format!("{} may come back", count(now("pumapool_lender_kept_sessions"))), Mood::Well),
                (
                    format!("{} keys refused", count(now("pumapool_lender_refused_keys_total"))),
                    none_wanted(now("pumapool_lender_refused_keys_total"), Mood::Warning),
                ),
            ]),
        ),
    ];
    for borrower in daemon.list("/lender/borrower_list") {
        let number = |name: &str| borrower[name].as_f64();
        let stored = number("stored_pages").map(|pages| pages * page::PAGE_SIZE as f64);
        let hits = number("hits").zip(number("gets")).filter(|(_, gets)| *gets > 0.0).map(|(hits, gets)| hits / gets);
        lines.push(said(
            "",
            parts(vec![
                (borrower["name"].as_str().unwrap_or_default().to_owned(), Mood::Well),
                (bytes(stored), Mood::Well),
                (format!("{} of {} gets hit", percent(hits), count(number("gets"))), Mood::Well),
            ]),
        ));
    }
    lines.extend(pool_line(daemon));
    lines
}

fn of_node(daemon: &Daemon) -> Vec<Line<'static>> {
    let (age, calm) =
        (daemon.now("pumapool_node_role_age_seconds", None), daemon.now("pumapool_node_calm_seconds", None));
    let changes = count(daemon.now("pumapool_node_role_changes_total", None));
    let mut lines = vec![
        said(
            "role",
            parts(vec![
                (format!("{} for {}", daemon.text("/role/role"), seconds(age)), Mood::Well),
                (daemon.text("/role/reason").to_owned(), Mood::Well),
            ]),
        ),
        said(
            "",
            parts(vec![
                (format!("wanted: {}", daemon.text("/role/wanted")), Mood::Well),
                (format!("{changes} changes"), Mood::Well),
                (format!("lends after {} of calm", seconds(calm)), Mood::Well),
            ]),
        ),
    ];
    for mount in daemon.list("/mounts") {
        let state = mount["state"].as_str().unwrap_or_default();
        let mood = if state.contains("borrow") { Mood::Well } else { Mood::Bad };
        let mountpoint = mount["mountpoint"].as_str().unwrap_or_default().to_owned();
        lines.push(said("mount", parts(vec![(mountpoint, Mood::Well), (state.to_owned(), mood)])));
    }
    lines
}

fn of_guest(daemon: &Daemon) -> Vec<Line<'static>> {
    let rate = |name: &str| count(daemon.rate(name, None));
    vec![said(
        "of those",
        parts(vec![
            (format!("stored {}/s", rate("pumapool_guest_stored_pages_total")), Mood::Well),
            (format!("no settled place {}/s", rate("pumapool_guest_unsettled_pages_total")), Mood::Well),
            (
                format!("lost, ring full {}/s", rate("pumapool_guest_ring_full_pages_total")),
                none_wanted(daemon.rate("pumapool_guest_ring_full_pages_total", None), Mood::Warning),
            ),
        ]),
    )]
}

fn of_targets(daemon: &Daemon) -> Vec<Line<'static>> {
    let line = |target: &Value| {
        let text = |name: &str| target[name].as_str().unwrap_or_default().to_owned();
        let who = text("who");
        let moved = count(daemon.rate("pumapool_numa_moved_pages_total", Some(("target", &who))));
        said(
            "target",
            parts(vec![
                (who, Mood::Well),
                (text("policy"), Mood::Well),
                (format!("{moved}/s moved"), Mood::Well),
                (text("state"), Mood::Well),
            ]),
        )
    };
    daemon.list("/targets").iter().map(line).collect()
}

fn pool_line(daemon: &Daemon) -> Option<Line<'static>> {
    let (live, dead) = (daemon.now("pumapool_pool_live_nodes", None)?, daemon.now("pumapool_pool_dead_nodes", None));
    let lenders = daemon.list("/pool/members").len();
    Some(said(
        "pool",
        parts(vec![
            (format!("{} nodes beside this one", count(Some(live))), Mood::Well),
            (format!("{} gone", count(dead)), none_wanted(dead, Mood::Warning)),
            (format!("{lenders} lenders"), Mood::Well),
        ]),
    ))
}
