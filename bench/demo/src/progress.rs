//! Progress: bars on a terminal, a line from time to time elsewhere. Never on standard output,
//! which is for the results.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Time between two lines about the same task without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// A task that takes a while.
pub struct Bar {
    title: String,
    total: u64,
    bar: Option<ProgressBar>,
    said: Cell<Instant>,
}

impl Bar {
    /// Shows the task from now on.
    pub fn new(title: impl Into<String>, total: u64) -> Bar {
        let title = title.into();
        let bar = std::io::stderr().is_terminal().then(|| {
            let template = "{prefix:<28} {wide_bar} {percent:>3} %  {msg:<20}";
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            // If indicatif rejects the template, only the looks suffer.
            let bar = match ProgressStyle::with_template(template) {
                Ok(style) => bar.with_style(style.progress_chars("━╸ ")),
                Err(_) => bar,
            };
            bar.with_prefix(title.clone()).with_finish(ProgressFinish::Abandon)
        });
        if bar.is_none() {
            eprintln!("{title} ...");
        }
        Bar { title, total, bar, said: Cell::new(Instant::now()) }
    }

    /// So much is done.
    pub fn set(&self, done: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(done.min(self.total)),
            None if self.said.get().elapsed() >= LINE_EVERY => {
                self.said.set(Instant::now());
                let percent = done.min(self.total) * 100 / self.total.max(1);
                eprintln!("{} ... {percent} %", self.title);
            }
            None => {}
        }
    }

    /// A remark, shown after the bar.
    pub fn remark(&self, remark: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(remark);
        }
    }

    /// The task is done, with that result.
    pub fn done(self, result: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.total);
                bar.finish_with_message(result.to_owned());
            }
            None => eprintln!("{}: {result}", self.title),
        }
    }
}
