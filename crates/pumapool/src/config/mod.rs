//! The options of a process, from its command line, its environment and a file (`--config FILE`).
//!
//! The three are merged once ([`begin`]): the file is turned into arguments ([`file`]), and clap
//! parses these together with the command line. Some processes carry on the work of this one: the
//! one in the background, the daemons of a supervisor, the mounts of a node. They get the merged
//! options unchanged, as [`Settings`] in a file in memory ([`pass_on`], [`passed`]), and read
//! neither a command line nor a file.
//!
//! On SIGHUP the daemon reads the file again, merges it with its command line, and applies the
//! options that can change. It sends the new settings to its supervisor. The supervisor passes them
//! to a successor without reading them, because they may be those of a newer program.
//!
//! A supervisor of an older revision passes the command line and the text of the file ([`TEXT`])
//! instead. A file that has become invalid must not end a mount.

pub mod file;

use crate::cli::{Cli, exit, written};
use crate::log;
use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use clap::error::ErrorKind as Kind;
use file::{ConfigFile, Said};
use parking_lot::Mutex;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The descriptor of the [`Settings`] that another process of ours has passed to this one.
pub const SETTINGS: &str = "PUMAPOOL_SETTINGS";

/// The name of the file in memory that has the settings. It distinguishes this descriptor in a
/// grandchild that has inherited only the variable.
const SETTINGS_NAME: &str = "puma-settings";

/// Limit on the settings, in bytes: a configuration file with each byte escaped, and the options.
const SETTINGS_BYTES_MAX: usize = 1 << 20;

/// The inherited descriptors of a daemon that a supervisor has started
/// ([`crate::supervisor::daemon`]). Other processes do not have this variable.
pub const INHERITED: &str = "PUMAPOOL_KEPT";

/// The text of the configuration that a supervisor of an older revision passes to its daemon,
/// instead of the present content of the file.
pub const TEXT: &str = "PUMAPOOL_CONFIG_TEXT";

/// Limit on a configuration file, in bytes: it must fit into an environment variable, for which
/// Linux allows 128 KiB.
const CONFIG_BYTES_MAX: u64 = 64 << 10;

/// Merged options: the log filter and a command, independent of the list of commands.
#[derive(Clone, Serialize, Deserialize)]
struct Merged {
    /// The log filter (`--log`).
    log: String,
    /// The command with its options, by the names of their fields. Null if the command starts no
    /// process that carries on its work.
    command: Value,
}

impl Merged {
    /// The options to pass on to another process. A command that is not a daemon is never passed
    /// on.
    fn of(cli: &Cli) -> Merged {
        Merged { log: cli.log.clone(), command: serde_json::to_value(&cli.command).unwrap_or_default() }
    }

    /// The options that another process has passed on.
    ///
    /// # Errors
    /// Fails if the options are of another revision and cannot be parsed.
    fn parse(self, file: Option<PathBuf>) -> Result<Cli> {
        Ok(Cli { log: self.log, config: file, command: serde_json::from_value(self.command)? })
    }
}

/// The options of a process, merged, and what they were merged from.
///
/// Programs of different revisions pass them to each other. A field that is added later, here or in
/// the options of a command, needs a default for serde.
#[derive(Serialize, Deserialize)]
pub struct Settings {
    #[serde(flatten)]
    merged: Merged,
    /// The command line, as one of `pumapool`: on SIGHUP it is merged with the file again.
    given: Vec<OsString>,
    /// The configuration file.
    #[serde(with = "written::maybe_path")]
    file: Option<PathBuf>,
    /// The text of the file that was merged.
    text: Option<String>,
}

/// The options with which this process was started.
struct Began {
    /// The command line, as one of `pumapool`.
    given: Vec<OsString>,
    file: Option<PathBuf>,
    /// The options that it began with.
    first: Map<String, Value>,
    /// Whether it got them as [`Settings`].
    was_passed: bool,
    now: Mutex<Now>,
}

/// The options that may change.
struct Now {
    log: String,
    options: Map<String, Value>,
    text: Option<String>,
    /// The settings, in the form in which they are passed on. `None` if the command starts no
    /// process that carries on its work, or if they are of a daemon of another revision that this
    /// program cannot parse.
    settings: Option<Vec<u8>>,
}

impl Now {
    fn new(settings: Settings) -> Now {
        let bytes = if settings.merged.command.is_null() { None } else { serde_json::to_vec(&settings).ok() };
        let Settings { merged: Merged { log, command }, text, .. } = settings;
        Now { log, options: options(command), text, settings: bytes }
    }
}

static BEGAN: OnceLock<Began> = OnceLock::new();

/// Applies options.
type Apply = Box<dyn Fn(&Map<String, Value>) -> Result<()> + Send + Sync>;

/// The options of a daemon that can change while it runs.
pub struct Changeable {
    /// The options' names.
    names: &'static [&'static str],
    /// Applies them, given all options of the command.
    apply: Apply,
}

impl Changeable {
    /// The options with these names, which `apply` applies. `T` is the type of the command's
    /// options, or of a part of them.
    pub fn new<T: DeserializeOwned>(
        names: &'static [&'static str],
        apply: impl Fn(T) + Send + Sync + 'static,
    ) -> Changeable {
        let apply = move |options: &Map<String, Value>| {
            apply(serde_json::from_value(options.clone().into()).context("its options cannot be taken over")?);
            Ok(())
        };
        Changeable { names, apply: Box::new(apply) }
    }

    /// Only the log level.
    pub fn nothing() -> Changeable {
        Changeable { names: &[], apply: Box::new(|_| Ok(())) }
    }
}

/// The options of this process: those of the command line, and those of the file that it names. An
/// error is returned as one line if there is a file, or for mount(8). Otherwise the process prints
/// the error and exits.
pub fn begin(given: Vec<OsString>, for_mount: bool) -> Result<Cli> {
    let root = Cli::built();
    let path = file::named(&given).map(std::path::absolute).transpose().context("--config")?;
    let kept = std::env::var(TEXT).ok().filter(|_| std::env::var_os(INHERITED).is_some());
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
            log::complain(&anyhow!("{}; `{help}` says more", one_line(&error)));
            std::process::exit(exit::USAGE.into())
        }
    };
    let cli = Cli::try_parse_from(arguments).map_err(wrong)?;
    begin_with(Settings { merged: Merged::of(&cli), given, file: path, text }, false);
    Ok(cli)
}

fn begin_with(settings: Settings, was_passed: bool) {
    let (given, file) = (settings.given.clone(), settings.file.clone());
    let now = Now::new(settings);
    let first = now.options.clone();
    let _ = BEGAN.set(Began { given, file, first, was_passed, now: Mutex::new(now) });
}

/// The options that another process of this program has passed to this one. Must be called first,
/// and once.
///
/// # Errors
/// Fails if they cannot be parsed: a program of another revision may have passed them.
pub fn passed() -> Result<Option<Cli>> {
    let Some(number) = std::env::var(SETTINGS).ok().and_then(|number| number.parse::<RawFd>().ok()) else {
        return Ok(None);
    };
    let link = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
    if !link.to_string_lossy().starts_with(&format!("/memfd:{SETTINGS_NAME}")) {
        return Ok(None);
    }
    // SAFETY: the process that has started this one has left this descriptor open for it, and
    // nothing else here knows it, as this is called once.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(number) });
    let no_sense = "the options that were passed on make no sense; are they of another revision? Start it again";
    let settings: Settings = serde_json::from_slice(&read_memory(&file)?).context(no_sense)?;
    let cli = settings.merged.clone().parse(settings.file.clone()).context(no_sense)?;
    begin_with(settings, true);
    Ok(Some(cli))
}

/// Creates a file in memory with these settings, which the started command inherits.
fn in_inherited_memory(settings: &[u8], command: &mut std::process::Command) -> Result<OwnedFd> {
    let fd = memfd_create(SETTINGS_NAME, MemfdFlags::empty()).context("cannot pass the options on")?;
    let file = File::from(fd);
    file.write_all_at(settings, 0).context("cannot pass the options on")?;
    command.env(SETTINGS, file.as_raw_fd().to_string());
    Ok(file.into())
}

/// Passes the options of this process to a command of this program. The command must be started
/// before the returned descriptor is dropped. Returns `None` if the command reads its own command
/// line.
pub fn pass_on(command: &mut std::process::Command) -> Result<Option<OwnedFd>> {
    command.env_remove(SETTINGS);
    let Some(began) = BEGAN.get() else { return Ok(None) };
    let now = began.now.lock();
    now.settings.as_deref().map(|settings| in_inherited_memory(settings, command)).transpose()
}

/// Makes a command of this program run the subcommand `name` with these options, in the manner of
/// [`pass_on`]. `given` is the equivalent command line.
pub fn pass(
    log: &str,
    (name, options): (&str, impl Serialize),
    given: Vec<OsString>,
    command: &mut std::process::Command,
) -> Result<OwnedFd> {
    let options = serde_json::to_value(options).context("cannot pass the options on")?;
    let merged = Merged { log: log.to_owned(), command: json!({ name: options }) };
    let settings = Settings { merged, given, file: None, text: None };
    in_inherited_memory(&serde_json::to_vec(&settings).context("cannot pass the options on")?, command)
}

/// The bytes of a file in memory.
fn read_memory(file: &File) -> Result<Vec<u8>> {
    let length = file.metadata().context("cannot read the options that were passed on")?.len();
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    anyhow::ensure!(length <= SETTINGS_BYTES_MAX, "the options that were passed on take {length} bytes");
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).context("cannot read the options that were passed on")?;
    Ok(bytes)
}

/// The command line of this process.
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

/// Reads the configuration again, and applies the options that can change. Logs errors, and options
/// that cannot change.
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
        tracing::error!("the configuration is unchanged: {error:#}{next}");
    }
}

/// The settings in use, as a file in memory for the supervisor. A supervisor of an older revision,
/// which has passed no settings, gets the text of the configuration.
pub fn in_memory() -> Result<OwnedFd> {
    let made = memfd_create("puma-config", MemfdFlags::CLOEXEC).context("cannot pass the configuration on")?;
    let file = File::from(made);
    if let Some(began) = BEGAN.get() {
        let now = began.now.lock();
        let settings = now.settings.as_deref().filter(|_| began.was_passed);
        let bytes = settings.unwrap_or_else(|| now.text.as_deref().unwrap_or_default().as_bytes());
        file.write_all_at(bytes, 0).context("cannot pass the configuration on")?;
    }
    Ok(file.into())
}

/// For a supervisor: stores the settings that its daemon has found valid, for successors. A daemon
/// of an older revision sends the text of its configuration.
pub fn accept(file: &File) {
    /// The part of settings that a supervisor reads. They may be those of a newer program.
    #[derive(Deserialize)]
    struct Known {
        log: String,
        text: Option<String>,
    }
    let (Some(began), Ok(bytes)) = (BEGAN.get(), read_memory(file)) else { return };
    let mut now = began.now.lock();
    if let Ok(Known { log, text }) = serde_json::from_slice(&bytes) {
        let _ = log::set(&log);
        (now.log, now.text, now.settings) = (log, text, Some(bytes));
        return;
    }
    let Some(path) = &began.file else { return };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    match began.parse(path, text.clone()) {
        Ok(settings) => {
            let _ = log::set(&settings.merged.log);
            *now = Now::new(settings);
        }
        // The daemon accepts this text, so its successors read the command line and this text.
        Err(_) => (now.text, now.settings) = (Some(text), None),
    }
}

impl Began {
    /// Merges the command line and this text.
    fn parse(&self, path: &Path, text: String) -> Result<Settings> {
        let root = Cli::built();
        let arguments = file::expand(&root, &self.given, &ConfigFile { path, text: &text })?;
        let cli = Cli::try_parse_from(&arguments).map_err(|error| one_line(&error))?;
        Ok(Settings { merged: Merged::of(&cli), given: self.given.clone(), file: self.file.clone(), text: Some(text) })
    }

    fn reload(&self, path: &Path, text: String, changeable: &Changeable) -> Result<()> {
        let root = Cli::built();
        let said = Said::of(&root, &self.given);
        let after = Now::new(self.parse(path, text)?);
        let mut now = self.now.lock();
        let mut changed = Vec::new();
        for argument in file::options(said.command) {
            let (id, name) = (argument.get_id().as_str(), file::key(argument));
            if !changeable.names.contains(&name) {
                if self.first.get(id) != after.options.get(id) {
                    tracing::warn!("{name} cannot change while this runs: it stays {}", described(&self.first, id));
                }
            } else if now.options.get(id) != after.options.get(id) {
                changed.push(format!("{name} is {} now", described(&after.options, id)));
            }
        }
        if now.log != after.log {
            log::set(&after.log)?;
            changed.push(format!("log is {} now", after.log));
        }
        (changeable.apply)(&after.options)?;
        *now = after;
        let changed = if changed.is_empty() { "nothing has changed".to_owned() } else { changed.join(", ") };
        tracing::info!("{} was read again: {changed}", path.display());
        Ok(())
    }
}

/// The existing subcommands that a command line names.
fn commands(root: &clap::Command, given: &[OsString]) -> Vec<String> {
    let (mut command, mut names) = (root, vec![root.get_name().to_owned()]);
    for argument in given.iter().skip(1).filter_map(|argument| argument.to_str()) {
        let Some(found) = command.find_subcommand(argument) else { continue };
        (command, names) = (found, [names, vec![argument.to_owned()]].concat());
    }
    names
}

/// The first line of what clap says.
pub fn one_line(error: &clap::Error) -> anyhow::Error {
    let said = error.to_string();
    let said = said.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    anyhow::anyhow!("{}", said.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The options of the innermost subcommand, by the names of their fields, which are clap's.
fn options(command: Value) -> Map<String, Value> {
    let mut value = command;
    loop {
        let Value::Object(mut map) = value else { return Map::new() };
        // The name of a subcommand, and what is in it.
        let inner = if map.len() == 1 { map.values_mut().next().filter(|inner| inner.is_object()) } else { None };
        match inner.map(Value::take) {
            Some(inner) => value = inner,
            None => return map,
        }
    }
}

/// An option's value, as a user writes it.
fn described(options: &Map<String, Value>, id: &str) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match options.get(id) {
        None | Some(Value::Null) => "as it is without it".to_owned(),
        Some(Value::Array(list)) if list.is_empty() => "as it is without it".to_owned(),
        Some(Value::Array(list)) => list.iter().map(text).collect::<Vec<_>>().join(" "),
        Some(value) => text(value),
    }
}

/// Reads a configuration file.
///
/// # Errors
/// Fails if it cannot be read, or is too long.
pub fn read(path: &Path) -> Result<String> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Each daemon with some of its options.
    const LINES: [&str; 6] = [
        "lend --listen 127.0.0.1:0 --capacity 64MiB --rate 8MiB --cpu 50 --pool a:1 --gossip 127.0.0.1:7",
        "mount /srv /mnt --lender unix:/a --cgroup db,quota=1MiB --forbid ro --gate-short 7,5 --ring 4MiB",
        "join --listen 127.0.0.1:0 --mount /a:/b --pool a:1 --role borrow --strategy non-inclusive",
        "host-cache guest --fs / --to vsock:2:7 --tell-reads off --metrics unix:/m",
        "host-cache host --images /i --listen unix:/l --guest a.img=/k --limit 3MiB --mode write",
        "numa daemon --target vm:x=round-4k --allow none --listen unix:/l --guest vm:y=/k",
    ];

    #[test]
    fn all_options_of_all_daemons_are_passed_on() {
        let root = Cli::built();
        for line in LINES {
            let given: Vec<OsString> = ["pumapool"].into_iter().chain(line.split(' ')).map(OsString::from).collect();
            let cli = Cli::try_parse_from(&given).unwrap();
            let before = options(Merged::of(&cli).command);
            let command = Said::of(&root, &given).command;
            for argument in file::options(command).filter(|argument| file::key(argument) != "log") {
                assert!(before.contains_key(argument.get_id().as_str()), "{line}: {argument} is not passed on");
            }
            let (file, text) = (Some("/c".into()), Some("x = 1".to_owned()));
            let settings = Settings { merged: Merged::of(&cli), given: given.clone(), file, text };
            let bytes = serde_json::to_vec(&settings).unwrap();
            let after: Settings = serde_json::from_slice(&bytes).unwrap();
            assert_eq!((after.given, after.text), (given, settings.text), "{line}");
            let cli = after.merged.parse(after.file).unwrap();
            assert_eq!(options(Merged::of(&cli).command), before, "{line}");
        }
    }

    #[test]
    fn options_are_described_as_they_are_written() {
        let cli = Cli::try_parse_from(format!("pumapool {}", LINES[0]).split(' ')).unwrap();
        let options = options(Merged::of(&cli).command);
        let all =
            ["rate", "reserve", "capacity", "cpu", "seeds", "key", "foreground"].map(|id| described(&options, id));
        assert_eq!(all, ["8MiB", "256MiB", "64MiB", "50", "a:1", "as it is without it", "false"]);
    }
}
