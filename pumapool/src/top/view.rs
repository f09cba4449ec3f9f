//! What `top` shows: from its state to lines, and from there to the terminal, of whatever size.

use crate::size;
use crate::top::state::{Daemon, Point, State, Track};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Sparkline};
use serde_json::Value;
use std::time::Duration;

/// What is chosen on the screen.
#[derive(Default)]
pub struct Screen {
    /// Which daemon, as a place in the list.
    pub selected: usize,
    /// Time between two looks.
    pub interval: Duration,
    /// No looks are taken.
    pub is_paused: bool,
    /// The help is shown.
    pub shows_help: bool,
    /// Only the daemons of an ordinary user are seen.
    pub is_user: bool,
}

/// How things stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    Warning,
    Bad,
}

impl Mood {
    fn style(self) -> Style {
        match self {
            Mood::Well => Style::new().fg(Color::Green),
            Mood::Warning => Style::new().fg(Color::Yellow),
            Mood::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        }
    }
}

const FAINT: Style = Style::new().fg(Color::DarkGray);
const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);
const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);
const GRAPH: Style = Style::new().fg(Color::Cyan);

/// From here on, columns are left out, the least important first.
const WIDTHS: [u16; 2] = [76, 58];
/// Of a history line: what it is, and how much it is now.
const TRACK_TEXT: usize = 17;
const TRACK_NUMBER: usize = 10;
/// Lines of the screen that a history line may take.
const TALL_MAX: usize = 3;

/// Draws all of it.
pub fn draw(frame: &mut Frame<'_>, state: &State, screen: &Screen) {
    let area = frame.area();
    let [top, rest, bottom] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)]).areas(area);
    frame.render_widget(title(state, screen), top);
    frame.render_widget(keys(area.width), bottom);
    let Some(chosen) = state.daemons.get(screen.selected.min(state.daemons.len().saturating_sub(1))) else {
        frame.render_widget(Paragraph::new(nobody(state, screen)), rest);
        return;
    };
    // The list may have a third of the screen, or what the chosen one leaves.
    let details = details(chosen);
    let wanted = details.tracks.len() + details.lines.len() + 1;
    let listed = usize::from(rest.height).saturating_sub(wanted + 1).max(usize::from(rest.height) / 3);
    let listed = listed.min(state.daemons.len()).max(1) as u16 + 1;
    let [list, detail] = Layout::vertical([Constraint::Length(listed), Constraint::Fill(1)]).areas(rest);
    draw_list(frame, list, state, screen);
    draw_details(frame, detail, chosen, &details);
    if screen.shows_help {
        draw_help(frame, area);
    }
}

fn title(state: &State, screen: &Screen) -> Line<'static> {
    let count = |kind: &str, one: &str, many: &str| {
        let count = state.daemons.iter().filter(|daemon| daemon.kind() == kind).count();
        (count > 0).then(|| format!("{count} {}", if count == 1 { one } else { many }))
    };
    let counts: Vec<_> = [
        count("join", "node", "nodes"),
        count("mount", "mount", "mounts"),
        count("lend", "lender", "lenders"),
        count("guest", "guest", "guests"),
        count("numa", "numa", "numa"),
    ]
    .into_iter()
    .flatten()
    .collect();
    let pace = match screen.is_paused {
        true => Span::styled("PAUSED", Mood::Warning.style()),
        false => Span::styled(format!("every {} s", screen.interval.as_secs_f64()), FAINT),
    };
    Line::from(vec![Span::styled("pumapool top  ", HEAD), pace, Span::raw(format!("  {}", counts.join(", ")))])
}

fn keys(width: u16) -> Line<'static> {
    let keys = if width < 60 {
        "q quit  ↑↓ choose  p pause  ? help"
    } else {
        "q quit   ↑ ↓ tab choose   p pause   + - interval   ? help"
    };
    Line::styled(keys, FAINT)
}

fn nobody(state: &State, screen: &Screen) -> Vec<Line<'static>> {
    if !state.has_looked {
        return vec![Line::raw(""), Line::raw("Asking the daemons …")];
    }
    let mut lines = vec![
        Line::raw(""),
        Line::raw("No daemon runs on this machine. Waiting for one:"),
        Line::raw(""),
        Line::raw("  pumapool lend     lends idle memory"),
        Line::raw("  pumapool mount    keeps a directory's pages there"),
    ];
    if screen.is_user {
        lines.extend(["", "Those of other users, as root's, are seen by them only."].map(Line::raw));
    }
    lines
}

/// Columns of the list behind the name: heading, and what is in it.
type Column = (&'static str, fn(&Daemon) -> String);
const COLUMNS: [Column; 4] = [
    ("HIT", |daemon| percent(daemon.last(Track::HitRatio))),
    ("PAGES/s", |daemon| count(daemon.last(Track::Asked))),
    ("PUT/s", |daemon| count(daemon.last(Track::Put))),
    ("LENT", |daemon| bytes(daemon.last(Track::Lent))),
];
const COLUMN_WIDTH: usize = 9;
const KIND_WIDTH: usize = 6;

fn draw_list(frame: &mut Frame<'_>, area: Rect, state: &State, screen: &Screen) {
    let width = usize::from(area.width);
    let columns = match area.width {
        width if width >= WIDTHS[0] => &COLUMNS[..],
        width if width >= WIDTHS[1] => &COLUMNS[..2],
        _ => &COLUMNS[..1],
    };
    let state_width = if area.width >= WIDTHS[1] { 19 } else { 12 };
    let name_width = width.saturating_sub(KIND_WIDTH + columns.len() * COLUMN_WIDTH + state_width + 2).max(8);
    let row = |kind: &str, name: &str, numbers: Vec<String>| {
        let mut text = format!("{kind:<KIND_WIDTH$}{:<name_width$}", shortened(name, name_width - 1));
        numbers.iter().for_each(|number| text.push_str(&format!("{number:>COLUMN_WIDTH$}")));
        text + "  "
    };
    let headings = columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
    let mut lines = vec![Line::styled(row("WHAT", "NAME", headings) + "STATE", HEAD)];
    let rows = usize::from(area.height).saturating_sub(1);
    let chosen = screen.selected.min(state.daemons.len().saturating_sub(1));
    let first = (chosen + 1).saturating_sub(rows);
    for (at, daemon) in state.daemons.iter().enumerate().skip(first).take(rows) {
        let numbers = columns.iter().map(|(_, of)| of(daemon)).collect();
        let (how, mood) = standing(daemon);
        let row = row(word(daemon), &daemon.name(), numbers);
        // The whole line shows which is chosen.
        let line = Line::from(vec![Span::raw(row), Span::styled(format!("{how:<width$}"), mood.style())]);
        lines.push(if at == chosen { line.style(CHOSEN) } else { line });
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// What it is called in the list.
fn word(daemon: &Daemon) -> &str {
    match daemon.kind() {
        "join" => "node",
        "mount" if daemon.has_guests() => "host",
        kind => kind,
    }
}

/// How a daemon stands, in two words.
fn standing(daemon: &Daemon) -> (String, Mood) {
    if daemon.missed > 0 {
        return ("no answer".to_owned(), Mood::Bad);
    }
    match daemon.kind() {
        "mount" if daemon.has_guests() => {
            let guests = daemon.list("/guests/list");
            let connected = guests.iter().filter(|guest| guest["connected"] == true).count();
            let mood = if connected < guests.len() { Mood::Warning } else { Mood::Well };
            (format!("{connected} of {} guests", guests.len()), mood)
        }
        "mount" => {
            let lenders = daemon.list("/lenders");
            let used = lenders.iter().filter(|lender| lender["state"] == "used").count();
            match (used, lenders.len()) {
                _ if daemon.status["borrowing"] == false => ("node lends".to_owned(), Mood::Well),
                (_, 0) => ("no lender".to_owned(), Mood::Warning),
                (0, _) if lenders.iter().any(|lender| lender["state"] == "shunned") => {
                    ("lenders too slow".to_owned(), Mood::Warning)
                }
                (0, all) => (format!("0 of {all} lenders"), Mood::Bad),
                (used, all) => {
                    (format!("{used} of {all} lenders"), if used < all { Mood::Warning } else { Mood::Well })
                }
            }
        }
        "lend" => lending(daemon),
        "join" => (format!("{}s", daemon.text("/role/role")), Mood::Well),
        "guest" if daemon.status["connected"] == true => ("connected".to_owned(), Mood::Well),
        "guest" => ("no host".to_owned(), Mood::Bad),
        _ => (format!("{} targets", daemon.list("/targets").len()), Mood::Well),
    }
}

fn lending(daemon: &Daemon) -> (String, Mood) {
    match daemon.text("/lender/pressure") {
        "shrink" => ("gives back".to_owned(), Mood::Warning),
        "hold" => ("does not grow".to_owned(), Mood::Warning),
        _ => ("lends".to_owned(), Mood::Well),
    }
}

/// What there is to say of one daemon.
struct Details {
    title: String,
    tracks: Vec<(&'static str, String, Track)>,
    lines: Vec<Line<'static>>,
}

fn details(daemon: &Daemon) -> Details {
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

fn draw_details(frame: &mut Frame<'_>, area: Rect, daemon: &Daemon, details: &Details) {
    let block = Block::new()
        .borders(Borders::TOP)
        .border_style(FAINT)
        .title(Span::styled(format!(" {} ", details.title), HEAD));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    // With too little room, half of it is for what is said in words.
    let height = usize::from(inner.height);
    let tracks = details.tracks.len().min(height.saturating_sub(details.lines.len()).max(height / 2));
    // Where there is room, lines are taller.
    let tall = (height.saturating_sub(details.lines.len()) / tracks.max(1)).clamp(1, TALL_MAX);
    let [graphs, words] =
        Layout::vertical([Constraint::Length((tracks * tall) as u16), Constraint::Fill(1)]).areas(inner);
    let rows = Layout::vertical(vec![Constraint::Length(tall as u16); tracks]).split(graphs);
    for (row, (name, amount, track)) in rows.iter().zip(&details.tracks) {
        let [text, graph] =
            Layout::horizontal([Constraint::Length((TRACK_TEXT + TRACK_NUMBER + 1) as u16), Constraint::Fill(1)])
                .areas(*row);
        frame.render_widget(Line::raw(format!("{name:<TRACK_TEXT$}{amount:>TRACK_NUMBER$} ")), text);
        draw_history(frame, graph, daemon, *track);
    }
    frame.render_widget(Paragraph::new(details.lines.clone()), words);
}

/// The newest point is at the right.
fn draw_history(frame: &mut Frame<'_>, area: Rect, daemon: &Daemon, track: Track) {
    /// As integers, which the library wants: parts of the highest.
    const SCALE: f64 = 1000.0;
    let width = usize::from(area.width);
    let mut points: Vec<Point> = daemon.history(track).rev().take(width).collect();
    points.resize(width, None);
    points.reverse();
    let highest = match track {
        Track::HitRatio => 1.0,
        _ => points.iter().flatten().copied().fold(0.0, f64::max),
    };
    let scaled = |point: Point| point.filter(|_| highest > 0.0).map(|point| (point / highest * SCALE) as u64);
    let data: Vec<Option<u64>> = points.into_iter().map(scaled).collect();
    frame.render_widget(Sparkline::default().data(data).max(SCALE as u64).style(GRAPH), area);
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

const HELP: &str = "q, Esc    quit
↑ ↓ Tab   choose a daemon (j and k, too)
p, Space  pause, and go on
+ -       look more often, less often
?, h      this; any key closes it

Lines go from the past to now, up to the
highest that is shown; the hit ratio's to 1.
PAGES/s   from the pool; of a lender: asked
PUT/s     sent to lenders, or moved";

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let (width, height) = (46.min(area.width), (HELP.lines().count() as u16 + 2).min(area.height));
    let place = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title(" keys ")), place);
}

/// The end of a name says most.
fn shortened(name: &str, width: usize) -> String {
    // What a terminal would take for a command is not for it.
    let clean: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let count = clean.chars().count();
    if count <= width {
        return clean;
    }
    let tail: String = clean.chars().skip(count + 1 - width.max(1)).collect();
    format!("…{tail}")
}

fn percent(point: Point) -> String {
    point.map_or("–".into(), |ratio| format!("{:.1} %", ratio * 100.0))
}

fn bytes(point: Point) -> String {
    point.map_or("–".into(), |bytes| size::display(bytes.max(0.0) as u64))
}

fn seconds(point: Point) -> String {
    match point {
        None => "–".into(),
        Some(seconds) if seconds.is_infinite() => "more".into(),
        Some(seconds) if seconds < 0.999_5e-3 => format!("{:.0} µs", seconds * 1e6),
        Some(seconds) if seconds < 0.999_5 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) if seconds < 100.0 => format!("{seconds:.1} s"),
        Some(seconds) => format!("{seconds:.0} s"),
    }
}

fn count(point: Point) -> String {
    match point {
        None => "–".into(),
        Some(number) if number < 9.95 && number.fract() != 0.0 => format!("{number:.1}"),
        Some(number) if number < 9_999.5 => format!("{number:.0}"),
        Some(number) if number < 999_950.0 => format!("{:.1}k", number / 1e3),
        Some(number) => format!("{:.1}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::state::tests::mount;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    fn shown(width: u16, height: u16, state: &State, screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state, screen)).unwrap();
        crate::top::text(terminal.backend().buffer())
    }

    fn all_kinds() -> State {
        let mut state = State::default();
        for reads in 1..30 {
            let mut joined = mount(reads);
            joined["mountpoint"] = "/a/rather/long/path/that/does/not/fit/into/any/column/of/any/table".into();
            joined["socket"] = "other".into();
            joined["lenders"] = json!([]);
            joined["guests"] = json!({"listen": "unix:/x", "list": [{"image": "a.img", "connected": true, "problem": null, "stored_pages": reads, "hit_pages": 1, "placed_pages": 9}]});
            let lender = json!({"capacity_pages": 1 << 20, "stored_pages": 1 << 18, "headroom_bytes": 1u64 << 32, "reserve_bytes": 1 << 28, "pressure": "hold",
                "gets": reads * 100, "hits": reads * 90, "puts": reads * 20, "replaced": 0, "shrunk": reads, "reclaimed_by_kernel": reads, "demanded_pages": 0,
                "borrowers": 1, "kept_sessions": 0, "refused_keys": 1,
                "borrower_list": [{"name": "0a1b2c3d", "stored_pages": 1000, "gets": 10, "hits": 9}]});
            let pool = json!({"advertise": "x", "live_nodes": 3, "dead_nodes": 1, "members": [{}, {}]});
            let join = json!({"kind": "join", "socket": "j", "pid": 1, "listen": "10.0.0.9:7000", "lender": lender, "pool": pool,
                "role": {"role": "borrow", "wanted": "auto", "reason": "its mounts evict", "since_ms": 5000, "changes": 2, "calm_ms": 30000, "evicted_pages_per_second": 900},
                "mounts": [{"mountpoint": "/srv", "state": "borrows", "sees_evictions": true}]});
            state.take(vec![
                mount(reads * 10), joined, join,
                json!({"kind": "lend", "socket": "l", "pid": 2, "listen": "10.0.0.2:7070", "lender": lender, "pool": null}),
                json!({"kind": "guest", "socket": "g", "pid": 3, "fs": "/mnt", "host": "vsock:2:7", "connected": false,
                    "guest": {"evicted_pages": reads * 5, "sent_pages": reads * 4, "stored_pages": reads, "unsettled_pages": 0, "ring_full_pages": reads}}),
                json!({"kind": "numa", "socket": "n", "pid": 4, "targets": [{"who": "vm:x", "policy": "carrefour", "state": "followed", "samples": 5, "moved_pages": reads}]}),
                json!({"kind": "something newer", "socket": "s"}),
            ], Duration::from_secs(1));
        }
        state
    }

    #[test]
    fn everything_is_on_a_small_screen() {
        let mut state = State::default();
        for reads in 1..40 {
            state.take(vec![mount(reads * 100)], Duration::from_secs(1));
        }
        let screen = Screen { interval: Duration::from_secs(1), ..Screen::default() };
        let text = shown(80, 24, &state, &screen);
        for wanted in [
            "pumapool top  every 1 s  1 mount",
            "/mnt/data",
            "75.0 %",
            "1 of 2 lenders",
            "/srv/data at /mnt/data",
            "from the pool",
            "300/s",
            "200 µs",
            "4.0 ms",
            "10.0.0.2:7070",
            "used",
            "120 µs",
            "180 µs",
            "slower than the disk",
            "exclusive",
            "late after 9.0 ms",
            "1 takeovers",
            "1.0 GiB of 3 files",
            "q quit",
            "█",
        ] {
            assert!(text.contains(wanted), "{wanted} is not in\n{text}");
        }
        let text = shown(40, 10, &state, &screen);
        for wanted in ["/mnt/data", "75.0 %", "hit ratio", "q quit", "10.0.0.2:7070"] {
            assert!(text.contains(wanted), "{wanted} is not in\n{text}");
        }
    }

    #[test]
    fn every_kind_at_every_size() {
        let state = all_kinds();
        assert_eq!(state.daemons.len(), 7);
        for (selected, wanted) in [
            (0, "its mounts evict"),
            (1, "a.img"),
            (2, "slower than the disk"),
            (3, "does not grow"),
            (4, "no settled place"),
            (5, "carrefour"),
            (6, "pumapool top"),
        ] {
            let selected = state
                .daemons
                .iter()
                .position(|daemon| match selected {
                    0 => daemon.kind() == "join",
                    1 => daemon.has_guests(),
                    2 => daemon.kind() == "mount" && !daemon.has_guests(),
                    3 => daemon.kind() == "lend",
                    4 => daemon.kind() == "guest",
                    5 => daemon.kind() == "numa",
                    _ => daemon.kind() == "something newer",
                })
                .unwrap();
            let mut screen = Screen { selected, interval: Duration::from_secs(1), ..Screen::default() };
            let text = shown(80, 24, &state, &screen);
            assert!(text.contains(wanted), "{wanted} is not in\n{text}");
            for (width, height) in [
                (1, 1),
                (1, 30),
                (300, 1),
                (2, 2),
                (5, 3),
                (20, 5),
                (33, 7),
                (40, 10),
                (57, 12),
                (75, 13),
                (80, 24),
                (600, 90),
            ] {
                screen.shows_help = !screen.shows_help;
                shown(width, height, &state, &screen);
            }
        }
    }

    #[test]
    fn nobody_and_paused() {
        let mut state = State::default();
        let mut screen = Screen { is_user: true, ..Screen::default() };
        assert!(shown(80, 24, &state, &screen).contains("Asking the daemons"));
        state.take(vec![], Duration::ZERO);
        screen.is_paused = true;
        let text = shown(80, 24, &state, &screen);
        assert!(text.contains("No daemon runs") && text.contains("PAUSED") && text.contains("root's"), "{text}");
        screen.shows_help = true;
        state.take(vec![mount(1)], Duration::ZERO);
        assert!(shown(80, 24, &state, &screen).contains("look more often"));
    }

    #[test]
    fn numbers_are_short() {
        for (number, wanted) in
            [(0.0, "0"), (0.25, "0.2"), (12.7, "13"), (9999.0, "9999"), (12_345.0, "12.3k"), (2e6, "2.0M")]
        {
            assert_eq!(count(Some(number)), wanted);
        }
        for (number, wanted) in [
            (0.0, "0 µs"),
            (182e-6, "182 µs"),
            (0.9996e-3, "1.0 ms"),
            (1.5, "1.5 s"),
            (1000.0, "1000 s"),
            (f64::INFINITY, "more"),
        ] {
            assert_eq!(seconds(Some(number)), wanted);
        }
        assert_eq!(shortened("/a/long/path", 6), "…/path");
        assert_eq!(shortened("a\x1b[2J", 9), "a?[2J");
    }
}
