//! `--config FILE`: the options of a daemon in a file (TOML), and `pumapool config check`.
//!
//! The file is turned into arguments ([`file`]), which stand beside those of the command line. On
//! SIGHUP it is read again, and what can change while the daemon runs does.
//!
//! A daemon that takes a mount over goes on with the text that its keeper has ([`TEXT`]): a file
//! that was broken meanwhile must not end a mount.

pub mod file;

use crate::{Cli, exit, keeper, log};
use anyhow::{Context, Result, anyhow, bail};
use clap::error::ErrorKind as Kind;
use clap::{ArgMatches, CommandFactory, FromArgMatches};
use file::{ConfigFile, Said};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

/// What a keeper has its daemon go on with, instead of what is in the file now.
pub const TEXT: &str = "PUMAPOOL_CONFIG_TEXT";

/// Bytes of a configuration file at the most: it has to fit into a variable of the environment, of
/// which Linux allows 128 KiB.
const CONFIG_BYTES_MAX: u64 = 64 << 10;

/// Options of `config`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Say whether a configuration file is good.
    Check(CheckOptions),
}

/// Options of `config check`.
#[derive(clap::Args)]
pub struct CheckOptions {
    /// The file.
    file: PathBuf,

    /// What it is for, such as `lend` or `host-cache guest` [default: what the file says by
    /// `command = "lend"`].
    #[arg(long, value_name = "COMMAND")]
    command: Option<String>,
}

/// What this process was started with.
struct Began {
    /// The command line, as one of `pumapool`.
    given: Vec<OsString>,
    file: Option<PathBuf>,
    /// The options that it began with.
    first: ArgMatches,
    now: Mutex<Now>,
}

/// What may change.
struct Now {
    matches: ArgMatches,
    text: Option<String>,
}

static BEGAN: OnceLock<Began> = OnceLock::new();

/// What of a daemon's options can change while it runs.
pub struct Changeable {
    /// The options' names.
    names: &'static [&'static str],
    /// Takes them over.
    apply: Box<dyn Fn(&crate::Command) + Send + Sync>,
}

impl Changeable {
    /// Those of that name, which `apply` takes over.
    pub fn new(names: &'static [&'static str], apply: impl Fn(&crate::Command) + Send + Sync + 'static) -> Changeable {
        Changeable { names, apply: Box::new(apply) }
    }

    /// Nothing but the log level.
    pub fn nothing() -> Changeable {
        Changeable::new(&[], |_| {})
    }
}

/// The options of this process: those that were given, and those of the file that these name. What
/// is wrong is one line if there is a file, or for mount(8); else the process ends here, with that
/// line.
pub fn begin(given: Vec<OsString>, for_mount: bool) -> Result<Cli> {
    let root = Cli::built();
    let path = file::named(&given).map(std::path::absolute).transpose().context("--config")?;
    let kept = std::env::var(TEXT).ok().filter(|_| std::env::var_os(keeper::INHERITED).is_some());
    let text = match (&path, kept) {
        (Some(_), Some(text)) => Some(text),
        (Some(path), None) => Some(read(path)?),
        (None, _) => None,
    };
    let arguments = match (&path, &text) {
        (Some(path), Some(text)) => file::expand(&root, &given, &ConfigFile { path, text })?,
        _ => given.clone(),
    };
    let wrong = |error: clap::Error| match (&path, error.kind()) {
        (_, Kind::DisplayHelp | Kind::DisplayVersion | Kind::DisplayHelpOnMissingArgumentOrSubcommand) => error.exit(),
        (Some(path), _) => one_line(&error).context(format!("with {}", path.display())),
        (None, _) if for_mount => one_line(&error),
        (None, _) => {
            let help = format!("{} --help", commands(&root, &given).join(" "));
            crate::complain(&anyhow!("{}; `{help}` says more", one_line(&error)));
            std::process::exit(exit::USAGE.into())
        }
    };
    let matches = Cli::command().try_get_matches_from(arguments).map_err(wrong)?;
    let cli = Cli::from_arg_matches(&matches).map_err(wrong)?;
    let now = Mutex::new(Now { matches: matches.clone(), text });
    let _ = BEGAN.set(Began { given, file: path, first: matches, now });
    Ok(cli)
}

/// The command line of this process, with which it starts itself again.
pub fn given() -> &'static [OsString] {
    BEGAN.get().map_or(&[], |began| &began.given)
}

/// The configuration file.
pub fn path() -> Option<&'static Path> {
    BEGAN.get()?.file.as_deref()
}

/// The text of the configuration file that is in use.
pub fn text() -> Option<String> {
    BEGAN.get()?.now.lock().text.clone()
}

/// Reads the configuration again, and takes over what can change. What is wrong, and what cannot
/// change, is said in the log.
pub fn reload(changeable: &Changeable) {
    let Some(began) = BEGAN.get() else { return };
    let Some(path) = &began.file else {
        return tracing::info!("SIGHUP: there is no configuration to read again; name one by --config");
    };
    if let Err(error) = read(path).and_then(|text| began.reload(path, text, changeable)) {
        let is_denied =
            error.downcast_ref::<std::io::Error>().map(std::io::Error::kind) == Some(ErrorKind::PermissionDenied);
        let next = match is_denied {
            true => {
                "; a lender may open no file but the one that it began with (except in a folder that is called pumapool): write into that one, or restart it"
            }
            false => "",
        };
        tracing::error!("the configuration stays as it was: {error:#}{next}");
    }
}

/// The text of the configuration that is in use, as a file in memory.
pub fn text_in_memory() -> Result<OwnedFd> {
    let made = memfd_create("puma-config", MemfdFlags::CLOEXEC).context("cannot pass the configuration on")?;
    let file = File::from(made);
    file.write_all_at(text().unwrap_or_default().as_bytes(), 0).context("cannot pass the configuration on")?;
    Ok(file.into())
}

/// For a keeper, whose daemon has found this configuration good: successors begin with it.
pub fn accept(file: &File) {
    let Some((began, path)) = BEGAN.get().and_then(|began| Some((began, began.file.as_ref()?))) else { return };
    let mut bytes = vec![0; CONFIG_BYTES_MAX as usize];
    let Ok(length) = file.read_at(&mut bytes, 0) else { return };
    let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
    // One that this keeper does not understand is for a newer daemon.
    if let Ok((_, cli)) = began.parse(path, &text) {
        let _ = log::set(&cli.log);
    }
    began.now.lock().text = Some(text);
}

impl Began {
    /// What the command line and that text say together.
    fn parse(&self, path: &Path, text: &str) -> Result<(ArgMatches, Cli)> {
        let root = Cli::built();
        let matches = parse(&file::expand(&root, &self.given, &ConfigFile { path, text })?)?;
        let cli = Cli::from_arg_matches(&matches).map_err(|error| one_line(&error))?;
        Ok((matches, cli))
    }

    fn reload(&self, path: &Path, text: String, changeable: &Changeable) -> Result<()> {
        let root = Cli::built();
        let said = Said::of(&root, &self.given);
        let (matches, cli) = self.parse(path, &text)?;
        let mut now = self.now.lock();
        let (first, before, after) = (leaf(&self.first), leaf(&now.matches), leaf(&matches));
        let (mut changed, mut has_new_log) = (Vec::new(), false);
        for argument in file::options(said.command) {
            let (id, name) = (argument.get_id().as_str(), file::key(argument));
            if name == "log" {
                has_new_log = values(before, id) != values(after, id);
            } else if !changeable.names.contains(&name) {
                if values(first, id) != values(after, id) {
                    tracing::warn!("{name} cannot change while this runs: it stays {}", described(first, id));
                }
            } else if values(before, id) != values(after, id) {
                changed.push(format!("{name} is {} now", described(after, id)));
            }
        }
        if has_new_log {
            log::set(&cli.log)?;
            changed.push(format!("log is {} now", cli.log));
        }
        (changeable.apply)(&cli.command);
        (now.matches, now.text) = (matches, Some(text));
        let changed = if changed.is_empty() { "nothing has changed".to_owned() } else { changed.join(", ") };
        tracing::info!("{} was read again: {changed}", path.display());
        Ok(())
    }
}

/// Options that clap has something to say of, in one line.
fn parse(arguments: &[OsString]) -> Result<ArgMatches> {
    Cli::command().try_get_matches_from(arguments).map_err(|error| one_line(&error))
}

/// The subcommands that a command line names, as far as there are such.
fn commands(root: &clap::Command, given: &[OsString]) -> Vec<String> {
    let (mut command, mut names) = (root, vec![root.get_name().to_owned()]);
    for argument in given.iter().skip(1).filter_map(|argument| argument.to_str()) {
        let Some(found) = command.find_subcommand(argument) else { continue };
        (command, names) = (found, [names, vec![argument.to_owned()]].concat());
    }
    names
}

fn one_line(error: &clap::Error) -> anyhow::Error {
    let said = error.to_string();
    let said = said.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    anyhow::anyhow!("{}", said.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Of the innermost subcommand.
fn leaf(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, matches)| leaf(matches))
}

/// An option's values as they were written.
fn values(matches: &ArgMatches, id: &str) -> Vec<OsString> {
    matches.get_raw(id).into_iter().flatten().map(OsString::from).collect()
}

fn described(matches: &ArgMatches, id: &str) -> String {
    let values: Vec<_> = values(matches, id).iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if values.is_empty() { "as it is without it".to_owned() } else { values.join(" ") }
}

fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    let attempt = || format!("cannot read the configuration {}, is that its name", path.display());
    let file = File::open(path).with_context(attempt)?;
    let read = file.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text);
    let bytes = read.with_context(attempt)?;
    if bytes as u64 > CONFIG_BYTES_MAX {
        bail!("{} is longer than the {CONFIG_BYTES_MAX} bytes that a configuration may have", path.display());
    }
    Ok(text)
}

/// Runs `config`.
pub fn run(options: &Options) -> Result<ExitCode> {
    let What::Check(CheckOptions { file: path, command }) = &options.what;
    let text = read(path)?;
    let config = ConfigFile { path, text: &text };
    let Some(command) = command.clone().map(Ok).or_else(|| config.command().transpose()).transpose()? else {
        bail!("{}: say what it is for, by a line command = \"lend\", or by --command", path.display());
    };
    let root = Cli::built();
    config.require_daemon(&root, &command)?;
    let given: Vec<OsString> = ["pumapool"].into_iter().chain(command.split_whitespace()).map(OsString::from).collect();
    let arguments = file::expand(&root, &given, &config)?;
    parse(&arguments).with_context(|| format!("{}", path.display()))?;
    writeln!(std::io::stdout(), "{} is good for `pumapool {command}`", path.display())?;
    Ok(ExitCode::SUCCESS)
}
