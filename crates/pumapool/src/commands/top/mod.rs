//! `pumapool top`: what the daemons of this machine do, live.
//!
//! A thread asks the daemons, so that the screen answers keys also while one of them does not
//! answer. [`state`] makes rates and histories of what they say, [`view`] draws them; the terminal
//! is only touched here, and left as it was found, however this ends.

mod details;
mod numbers;
mod state;
mod view;

use crate::cli::exit;
use crate::daemon::control;
use anyhow::{Context, Result, bail};
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::{DefaultTerminal, Terminal};
use report::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use state::State;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};
use view::Screen;

/// How often keys and signals are looked for: as soon as nobody notices a delay.
const KEYS: Duration = Duration::from_millis(50);
/// How long it may take to end on a signal.
const END_LIMIT: Duration = Duration::from_secs(1);
/// How long it may then take to restore the terminal, before it ends without.
const RESTORE_LIMIT: Duration = Duration::from_millis(500);
/// Times between two looks that + and - go through, in seconds.
const INTERVALS: [f64; 7] = [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0];
/// Of --once, where there is no terminal.
const SIZE: (u16, u16) = (80, 24);

/// When daemons were asked, and what they said.
type Look = (Instant, Vec<Status>);

/// Options of `top`.
#[derive(clap::Args)]
pub struct Options {
    /// Time between two looks, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,

    /// Look twice, print what there is to see as text, and end.
    #[arg(long)]
    once: bool,

    /// Of --once: how large that is [default: as the terminal, or 80x24].
    #[arg(long, value_name = "COLUMNSxLINES", requires = "once", value_parser = size)]
    size: Option<(u16, u16)>,
}

impl Options {
    /// Whether it has the terminal for itself: then nothing is logged to it.
    pub fn takes_terminal(&self) -> bool {
        !self.once
    }
}

fn interval(text: &str) -> Result<f64, String> {
    let range = INTERVALS[0]..=INTERVALS[INTERVALS.len() - 1];
    let seconds = text.parse().ok().filter(|seconds| range.contains(seconds));
    seconds.ok_or_else(|| format!("write a number from {} to {}", range.start(), range.end()))
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let range = 1..=1000;
    let parsed = text.split_once('x').and_then(|(columns, lines)| Some((columns.parse().ok()?, lines.parse().ok()?)));
    let fits = |(columns, lines): &(u16, u16)| range.contains(columns) && range.contains(lines);
    parsed.filter(fits).ok_or_else(|| "write two numbers up to 1000, such as 80x24".to_owned())
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let screen = Screen {
        interval: Duration::from_secs_f64(options.interval),
        is_user: !rustix::process::geteuid().is_root(),
        ..Screen::default()
    };
    if options.once {
        return once(options, &screen);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!(
            "this is no terminal; `pumapool top --once` prints what there is to see, `pumapool status --json` all of it"
        );
    }
    let stop = Arc::new(AtomicBool::new(false));
    let signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM]).context("cannot listen for signals")?;
    let for_signals = stop.clone();
    let thread = std::thread::Builder::new().name("puma-signals".into());
    thread.spawn(move || end_on(signals, &for_signals)).context("cannot start a thread")?;
    let (ask, looks) = looks()?;
    // From here on, a panic restores the terminal before it is told.
    let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore()).context("cannot take the terminal")?;
    let ended = live(terminal, screen, &stop, &ask, &looks);
    ratatui::restore();
    // The last one who looks need not be waited for.
    ended.map(|()| ExitCode::SUCCESS)
}

/// Has it end on a signal, and ends it if it does not, or on a second one: of a terminal that is
/// gone, the library reads for ever, and one that takes nothing more is written to for ever.
fn end_on(mut signals: Signals, stop: &AtomicBool) {
    for signal in signals.forever() {
        let end = move || {
            restore_in_time();
            std::process::exit(exit::SIGNALLED + signal);
        };
        if stop.swap(true, Relaxed) {
            end();
        }
        let later = move || {
            std::thread::sleep(END_LIMIT);
            end();
        };
        if std::thread::Builder::new().name("puma-end".into()).spawn(later).is_err() {
            end();
        }
    }
}

/// Restores the terminal, if that can be: who writes to one that takes nothing more has the lock
/// that it takes.
fn restore_in_time() {
    let (done, is_done) = sync_channel(1);
    let restore = move || {
        // Without the last step the cursor stays hidden: the terminal that it was hidden by is not
        // dropped.
        ratatui::restore();
        let _ = execute!(std::io::stdout(), Show);
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("puma-restore".into()).spawn(restore).is_ok() {
        let _ = is_done.recv_timeout(RESTORE_LIMIT);
    }
}

/// Two looks, and what is to be seen then.
fn once(options: &Options, screen: &Screen) -> Result<ExitCode> {
    let mut state = State::default();
    let begun = Instant::now();
    state.take(control::look_at_all(), Duration::ZERO);
    if !state.daemons.is_empty() {
        std::thread::sleep(screen.interval);
        state.take(control::look_at_all(), begun.elapsed());
    }
    let is_terminal = std::io::stdout().is_terminal();
    let found = is_terminal.then(ratatui::crossterm::terminal::size).and_then(std::io::Result::ok);
    let (columns, lines) = options.size.or(found).unwrap_or(SIZE);
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).context("cannot draw")?;
    terminal.draw(|frame| view::draw(frame, &state, screen)).context("cannot draw")?;
    let printed = std::io::stdout().write_all(text(terminal.backend().buffer()).as_bytes());
    crate::commands::status::seen_enough(printed)?;
    Ok(ExitCode::SUCCESS)
}

/// What is on a screen, without colours, and without spaces at the ends of lines.
fn text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    buffer.content.chunks(width).map(|cells| line(cells).trim_end().to_owned() + "\n").collect()
}

/// Starts the thread that asks the daemons, each time that it is told to; it answers with when, and
/// what they say.
fn looks() -> Result<(SyncSender<()>, Receiver<Look>)> {
    let (ask, asked) = sync_channel::<()>(1);
    let (answer, looks) = sync_channel(1);
    let work = move || {
        for () in asked {
            let look = (Instant::now(), control::look_at_all());
            if answer.send(look).is_err() {
                break;
            }
        }
    };
    std::thread::Builder::new().name("puma-looks".into()).spawn(work).context("cannot start a thread")?;
    Ok((ask, looks))
}

/// Shows it until somebody has seen enough.
fn live(
    mut terminal: DefaultTerminal,
    mut screen: Screen,
    stop: &AtomicBool,
    ask: &SyncSender<()>,
    looks: &Receiver<Look>,
) -> Result<()> {
    let mut state = State::default();
    let (mut asked, mut taken): (Option<Instant>, Option<Instant>) = (None, None);
    let (mut waits, mut changed) = (false, true);
    while !stop.load(Relaxed) {
        if !waits && !screen.is_paused && asked.is_none_or(|asked| asked.elapsed() >= screen.interval) {
            waits = ask.try_send(()).is_ok();
            asked = Some(Instant::now());
        }
        match looks.try_recv() {
            Ok((when, statuses)) => {
                let elapsed = taken.replace(when).map_or(Duration::ZERO, |before| when - before);
                state.take(statuses, elapsed);
                (waits, changed) = (false, true);
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => bail!("the daemons are not asked any more"),
        }
        if std::mem::take(&mut changed) {
            terminal.draw(|frame| view::draw(frame, &state, &screen)).context("cannot draw")?;
        }
        let found = wait_for_keys();
        if found.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Ok(()); // The terminal is gone.
        }
        let has_event = event::poll(Duration::ZERO).context("cannot read keys")?;
        if !has_event && !found.is_empty() {
            // A key that comes with a change of the terminal's size is told by the library with the
            // next one.
            std::thread::sleep(KEYS);
        }
        if has_event {
            match event::read().context("cannot read keys")? {
                Event::Key(key)
                    if key.kind == KeyEventKind::Press && pressed(key, &mut screen, state.daemons.len()) =>
                {
                    return Ok(());
                }
                _ => {}
            }
            changed = true; // Also when the terminal has another size.
        }
    }
    Ok(())
}

/// Waits for a key, or a moment. What there is of the terminal then.
fn wait_for_keys() -> PollFlags {
    let stdin = std::io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    let limit = Timespec { tv_sec: 0, tv_nsec: KEYS.subsec_nanos().into() };
    // A signal that comes in between is no trouble.
    let _ = poll(&mut fds, Some(&limit));
    fds[0].revents()
}

/// What a key does. True: it ends.
fn pressed(key: KeyEvent, screen: &mut Screen, daemons: usize) -> bool {
    let last = daemons.saturating_sub(1);
    screen.selected = screen.selected.min(last);
    let ends = key.modifiers.contains(KeyModifiers::CONTROL) && matches!(key.code, KeyCode::Char('c' | 'd'));
    if std::mem::take(&mut screen.shows_help) {
        return ends;
    }
    match key.code {
        _ if ends => return true,
        KeyCode::Char('q') | KeyCode::Esc => return true,
        KeyCode::Down | KeyCode::Right | KeyCode::Char('j') => screen.selected = (screen.selected + 1).min(last),
        KeyCode::Up | KeyCode::Left | KeyCode::Char('k') => screen.selected = screen.selected.saturating_sub(1),
        KeyCode::Tab => screen.selected = if screen.selected == last { 0 } else { screen.selected + 1 },
        KeyCode::BackTab => screen.selected = screen.selected.checked_sub(1).unwrap_or(last),
        KeyCode::Home => screen.selected = 0,
        KeyCode::End => screen.selected = last,
        KeyCode::Char('p' | ' ') => screen.is_paused = !screen.is_paused,
        KeyCode::Char('+' | '=') => screen.interval = stepped(screen.interval, true),
        KeyCode::Char('-') => screen.interval = stepped(screen.interval, false),
        KeyCode::Char('?' | 'h') => screen.shows_help = true,
        _ => {}
    }
    false
}

/// The next interval, a shorter one if it is to look more often.
fn stepped(interval: Duration, more_often: bool) -> Duration {
    let seconds = interval.as_secs_f64();
    let next = if more_often {
        INTERVALS.iter().rev().find(|next| **next < seconds)
    } else {
        INTERVALS.iter().find(|next| **next > seconds)
    };
    next.map_or(interval, |next| Duration::from_secs_f64(*next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_what_the_help_says() {
        let mut screen = Screen { interval: Duration::from_secs(1), ..Screen::default() };
        let press = |code: KeyCode, screen: &mut Screen| pressed(KeyEvent::from(code), screen, 3);
        for (code, selected) in [
            (KeyCode::Down, 1),
            (KeyCode::Tab, 2),
            (KeyCode::Down, 2),
            (KeyCode::Tab, 0),
            (KeyCode::BackTab, 2),
            (KeyCode::Up, 1),
        ] {
            assert!(!press(code, &mut screen));
            assert_eq!(screen.selected, selected);
        }
        press(KeyCode::Char('p'), &mut screen);
        press(KeyCode::Char('+'), &mut screen);
        assert!(screen.is_paused && screen.interval == Duration::from_millis(500));
        press(KeyCode::Char('-'), &mut screen);
        press(KeyCode::Char('-'), &mut screen);
        assert_eq!(screen.interval, Duration::from_secs(2));
        press(KeyCode::Char('?'), &mut screen);
        assert!(screen.shows_help);
        assert!(!press(KeyCode::Char('q'), &mut screen), "it closes the help");
        assert!(!screen.shows_help);
        assert!(press(KeyCode::Char('q'), &mut screen) && press(KeyCode::Esc, &mut screen));
        assert!(pressed(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), &mut screen, 0));
        // The daemons have gone meanwhile.
        assert!(!pressed(KeyEvent::from(KeyCode::Tab), &mut screen, 0) && screen.selected == 0);
    }

    #[test]
    fn options_are_read() {
        assert_eq!((size("80x24"), interval("0.5")), (Ok((80, 24)), Ok(0.5)));
        for text in ["", "80", "0x5", "80x2000", "x"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert!(["0", "-1", "1e9", "NaN", "x"].iter().all(|text| interval(text).is_err()));
    }
}
