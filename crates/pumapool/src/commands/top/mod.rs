//! `pumapool top`: shows the daemons of this machine live.
//!
//! A thread asks the daemons, so that the screen reacts to keys while a daemon does not answer.
//! [`state`] computes rates and histories from the answers, and [`view`] draws them. Only this
//! module uses the terminal, and it restores the terminal on every exit.

mod details;
mod numbers;
mod state;
mod view;

use crate::cli::exit;
use crate::cli::top::{INTERVALS, Options};
use crate::commands::status;
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

/// Time between two checks for keys and signals: too short to notice.
const KEYS: Duration = Duration::from_millis(50);
/// Time limit for an orderly end after a signal.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for restoring the terminal after [`END_LIMIT`]. Then the process ends without it.
const RESTORE_LIMIT: Duration = Duration::from_millis(500);
/// Size of the screen of --once without a terminal: columns and lines.
const SIZE: (u16, u16) = (80, 24);

/// The answers of the daemons, and when they were complete.
type Look = (Instant, Vec<Status>);

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
            "this is no terminal; use `pumapool top --once` for one screen as text, or `pumapool status --json` for everything"
        );
    }
    let stop = Arc::new(AtomicBool::new(false));
    let signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM]).context("cannot listen for signals")?;
    let for_signals = stop.clone();
    let thread = std::thread::Builder::new().name("puma-signals".into());
    thread.spawn(move || end_on(signals, &for_signals)).context("cannot start a thread")?;
    let (ask, looks) = looks()?;
    // From here on, a panic restores the terminal before its message is printed.
    let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore()).context("cannot take the terminal")?;
    let ended = live(terminal, screen, &stop, &ask, &looks);
    ratatui::restore();
    // The thread that asks the daemons is left behind: it may wait for an answer.
    ended.map(|()| ExitCode::SUCCESS)
}

/// Sets `stop` on a signal. Ends the process if it still runs after [`END_LIMIT`], or on a second
/// signal. This is necessary because the library reads for ever from a terminal that is gone, and
/// writes for ever to a terminal that accepts nothing.
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

/// Restores the terminal, or gives up after [`RESTORE_LIMIT`]. A thread that writes to a terminal
/// which accepts nothing holds the lock that restoring needs.
fn restore_in_time() {
    let (done, is_done) = sync_channel(1);
    let restore = move || {
        // The last step shows the cursor again. Otherwise it would stay hidden, because the
        // terminal object that hid it is not dropped.
        ratatui::restore();
        let _ = execute!(std::io::stdout(), Show);
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("puma-restore".into()).spawn(restore).is_ok() {
        let _ = is_done.recv_timeout(RESTORE_LIMIT);
    }
}

/// Asks the daemons twice, and prints one screen.
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
    status::seen_enough(printed)?;
    Ok(ExitCode::SUCCESS)
}

/// The text of a screen, without colours, and without spaces at the ends of lines.
fn text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    buffer.content.chunks(width).map(|cells| line(cells).trim_end().to_owned() + "\n").collect()
}

/// Starts the thread that asks the daemons. Each message to the returned sender starts one round,
/// and the returned receiver gets its answers.
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

/// Shows the screen until the user quits, `stop` is set or the terminal is gone.
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
            Err(TryRecvError::Disconnected) => bail!("the thread that asks the daemons has ended"),
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
            // If a key arrives together with a change of the terminal's size, the library returns
            // the key only with the next event.
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
            changed = true; // also if the size of the terminal changed
        }
    }
    Ok(())
}

/// Waits for a key for at most [`KEYS`]. Returns the events of the terminal.
fn wait_for_keys() -> PollFlags {
    let stdin = std::io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    let limit = Timespec { tv_sec: 0, tv_nsec: KEYS.subsec_nanos().into() };
    // If a signal interrupts the wait, the caller just tries again.
    let _ = poll(&mut fds, Some(&limit));
    fds[0].revents()
}

/// Applies a key. Returns whether the program ends.
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

/// The next shorter interval of [`INTERVALS`] if `more_often`, otherwise the next longer one. The
/// ends of the list are kept.
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
        // The daemons have ended meanwhile.
        assert!(!pressed(KeyEvent::from(KeyCode::Tab), &mut screen, 0) && screen.selected == 0);
    }
}
