//! Draws the screen of `top`, for a terminal of any size: the list of daemons, and the history
//! lines and text of the selected one ([`super::details`]).

use crate::commands::{
    top::details::{Details, FAINT, HEAD, Mood, details, lending},
    top::numbers::{bytes, count, percent, shortened},
    top::state::{Daemon, Point, State, Track},
};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Sparkline};
use report::{Daemon as Report, LinkState, Mount};
use std::time::Duration;

/// The user's choices.
#[derive(Default)]
pub struct Screen {
    /// The selected daemon, as an index of the list.
    pub selected: usize,
    /// Time between two updates.
    pub interval: Duration,
    /// Whether updates are paused.
    pub is_paused: bool,
    /// Whether the help is shown.
    pub shows_help: bool,
    /// Whether the user is not root, and sees only their own daemons.
    pub is_user: bool,
}

const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);
const GRAPH: Style = Style::new().fg(Color::Cyan);

/// From here on, columns are left out, the least important first.
const WIDTHS: [u16; 2] = [76, 58];
/// Of a history line: what it is, and how much it is now.
const TRACK_TEXT: usize = 17;
const TRACK_NUMBER: usize = 10;
/// Lines of the screen that a history line may take.
const TALL_MAX: usize = 3;

/// Draws the whole screen.
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
    // The list gets a third of the screen, or the lines that the details leave free.
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
        let count = state.daemons.iter().filter(|daemon| daemon.status.kind() == kind).count();
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
        lines.extend(["", "You see only your own daemons. Use sudo to see root's."].map(Line::raw));
    }
    lines
}

/// Columns of the list after the name: heading and content.
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
        // The whole line of the selected daemon is highlighted.
        let line = Line::from(vec![Span::raw(row), Span::styled(format!("{how:<width$}"), mood.style())]);
        lines.push(if at == chosen { line.style(CHOSEN) } else { line });
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// The name of a daemon in the list.
fn word(daemon: &Daemon) -> &'static str {
    match &daemon.status {
        Report::Join(_) => "node",
        Report::Mount(mount) if mount.guests.is_some() => "host",
        status => status.kind(),
    }
}

/// The state of a daemon, in two words.
fn standing(daemon: &Daemon) -> (String, Mood) {
    if daemon.missed > 0 {
        return ("no answer".to_owned(), Mood::Bad);
    }
    match &daemon.status {
        Report::Mount(mount) => mount_standing(mount),
        Report::Lend(lend) => lending(&lend.lender),
        Report::Join(join) => (format!("{}s", join.role.role), Mood::Well),
        Report::Guest(guest) if guest.connected => ("connected".to_owned(), Mood::Well),
        Report::Guest(_) => ("no host".to_owned(), Mood::Bad),
        Report::Numa(numa) => (format!("{} targets", numa.targets.len()), Mood::Well),
        Report::Unknown => ("of a newer version".to_owned(), Mood::Warning),
    }
}

fn mount_standing(mount: &Mount) -> (String, Mood) {
    if let Some(guests) = &mount.guests {
        let connected = guests.list.iter().filter(|guest| guest.connected).count();
        let mood = if connected < guests.list.len() { Mood::Warning } else { Mood::Well };
        return (format!("{connected} of {} guests", guests.list.len()), mood);
    }
    let lenders = &mount.lenders;
    let used = lenders.iter().filter(|link| link.state == LinkState::Used).count();
    match (used, lenders.len()) {
        _ if !mount.borrowing => ("node lends".to_owned(), Mood::Well),
        (_, 0) => ("no lender".to_owned(), Mood::Warning),
        (0, _) if lenders.iter().any(|link| link.state == LinkState::Bypassed) => {
            ("lenders too slow".to_owned(), Mood::Warning)
        }
        (0, all) => (format!("0 of {all} lenders"), Mood::Bad),
        (used, all) => (format!("{used} of {all} lenders"), if used < all { Mood::Warning } else { Mood::Well }),
    }
}

fn draw_details(frame: &mut Frame<'_>, area: Rect, daemon: &Daemon, details: &Details) {
    let block = Block::new()
        .borders(Borders::TOP)
        .border_style(FAINT)
        .title(Span::styled(format!(" {} ", details.title), HEAD));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    // If there is too little room, half of it is for the text.
    let height = usize::from(inner.height);
    let tracks = details.tracks.len().min(height.saturating_sub(details.lines.len()).max(height / 2));
    // If there is more room, history lines are taller.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::state::tests::{at, look, mount};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use report::{
        Guest, GuestCounts, Guests, HostGuest, Join, Lend, Lender, LentTo, Member, NodeMount, NodeMountState, Numa,
        Pool, Pressure, Role, RoleName, RoleWanted, Target,
    };

    fn shown(width: u16, height: u16, state: &State, screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state, screen)).unwrap();
        crate::commands::top::text(terminal.backend().buffer())
    }

    fn all_kinds() -> State {
        let mut state = State::default();
        for reads in 1..30 {
            let image = HostGuest {
                image: "a.img".into(),
                connected: true,
                stored_pages: reads,
                hit_pages: 1,
                placed_pages: 9,
                ..HostGuest::default()
            };
            let host = Mount {
                mountpoint: "/a/rather/long/path/that/does/not/fit/into/any/column/of/any/table".into(),
                lenders: Vec::new(),
                guests: Some(Guests { listen: "unix:/x".into(), list: vec![image] }),
                ..mount(reads)
            };
            let lent_to =
                LentTo { name: "0a1b2c3d".into(), stored_pages: 1000, gets: 10, hits: 9, ..LentTo::default() };
            let lender = Lender {
                capacity_pages: 1 << 20,
                stored_pages: 1 << 18,
                available_bytes: 1 << 32,
                reserve_bytes: 1 << 28,
                pressure: Pressure::Hold,
                gets: reads * 100,
                hits: reads * 90,
                puts: reads * 20,
                shrunk: reads,
                reclaimed_by_kernel: reads,
                borrowers: 1,
                refused_keys: 1,
                borrower_list: vec![lent_to],
                ..Lender::default()
            };
            let members = vec![Member::default(), Member::default()];
            let pool = Pool { advertise: "x".into(), live_nodes: 3, dead_nodes: 1, members, ..Pool::default() };
            let role = Role {
                role: RoleName::Borrow,
                wanted: RoleWanted::Auto,
                reason: "its mounts evict".into(),
                since_ms: 5000,
                changes: 2,
                calm_ms: 30000,
                evicted_pages_per_second: 900,
            };
            let node_mount =
                NodeMount { mountpoint: "/srv".into(), state: NodeMountState::Borrows, sees_evictions: true };
            let join = Join {
                lend: Lend {
                    listen: "10.0.0.9:7000".into(),
                    lender: lender.clone(),
                    pool: Some(pool),
                    ..Lend::default()
                },
                role,
                mounts: vec![node_mount],
            };
            let lend = Lend { listen: "10.0.0.2:7070".into(), lender, ..Lend::default() };
            let counts = GuestCounts {
                evicted_pages: reads * 5,
                sent_pages: reads * 4,
                stored_pages: reads,
                ring_full_pages: reads,
                ..GuestCounts::default()
            };
            let guest = Guest { fs: "/mnt".into(), host: "vsock:2:7".into(), guest: counts, ..Guest::default() };
            let target = Target {
                who: "vm:x".into(),
                policy: "carrefour".into(),
                state: "followed".into(),
                samples: 5,
                moved_pages: reads,
                pid: None,
            };
            let numa = Numa { pid: 4, targets: vec![target], ..Numa::default() };
            let statuses = vec![
                at("m", Report::Mount(Box::new(mount(reads * 10)))),
                at("h", Report::Mount(Box::new(host))),
                at("j", Report::Join(Box::new(join))),
                at("l", Report::Lend(Box::new(lend))),
                at("g", Report::Guest(Box::new(guest))),
                at("n", Report::Numa(Box::new(numa))),
                at("s", Report::Unknown),
            ];
            state.take(statuses, Duration::from_secs(1));
        }
        state
    }

    #[test]
    fn everything_is_on_a_small_screen() {
        let mut state = State::default();
        for reads in 1..40 {
            state.take(look(reads * 100), Duration::from_secs(1));
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
                .position(|daemon| match (selected, &daemon.status) {
                    (0, Report::Join(_)) | (3, Report::Lend(_)) | (4, Report::Guest(_)) => true,
                    (1, Report::Mount(mount)) => mount.guests.is_some(),
                    (2, Report::Mount(mount)) => mount.guests.is_none(),
                    (5, Report::Numa(_)) | (6, Report::Unknown) => true,
                    _ => false,
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
        state.take(look(1), Duration::ZERO);
        assert!(shown(80, 24, &state, &screen).contains("look more often"));
    }
}
