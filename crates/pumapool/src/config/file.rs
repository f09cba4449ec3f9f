//! Turns a configuration file into arguments of the command. No I/O.
//!
//! Keys are the names of long options and of positional arguments. clap determines which exist,
//! which may be given several times, and which values they take. An option on the command line
//! replaces the one in the file.

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::ValueParser;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command};
use std::error::Error as _;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// Key of the command that the file is for.
const COMMAND: &str = "command";

/// Options that are of no use in a file.
const NOT_IN_FILES: [&str; 3] = ["config", "help", "version"];

/// A configuration file that was read.
#[derive(Clone, Copy)]
pub struct ConfigFile<'a> {
    /// The path, for messages.
    pub path: &'a Path,
    /// The content.
    pub text: &'a str,
}

impl<'a> ConfigFile<'a> {
    /// An error at this place in the text.
    fn error(&self, at: &Range<usize>, problem: impl std::fmt::Display) -> anyhow::Error {
        let before = self.text.as_bytes().get(..at.start).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        anyhow!("{}:{line}: {problem}", self.path.display())
    }

    fn table(&self) -> Result<DeTable<'a>> {
        let parsed = DeTable::parse(self.text).map_err(|error| {
            let at = error.span().unwrap_or_default();
            let problem = error.message().replace('\n', ", ");
            match self.text.get(at.clone()) {
                Some(key) if problem == "duplicate key" => {
                    self.error(&at, format!("{key}: it is there already; a list has several values"))
                }
                _ => self.error(&at, problem),
            }
        })?;
        Ok(parsed.into_inner())
    }

    /// Fails if no configuration file can be for this command.
    pub fn require_daemon(&self, root: &Command, command: &str) -> Result<()> {
        let daemons = daemons(root, "");
        if daemons.iter().any(|name| name == command) {
            return Ok(());
        }
        let problem = format!("{command:?} is not a daemon; write {}", daemons.join(", "));
        let table = self.table()?;
        let line = table.iter().find(|(key, value)| {
            key.get_ref() == COMMAND && matches!(value.get_ref(), DeValue::String(name) if name == command)
        });
        match line {
            Some((_, value)) => Err(self.error(&value.span(), format!("command: {problem}"))),
            None => bail!("--command: {problem}"),
        }
    }

    /// The command that the file names, if it names one.
    pub fn command(&self) -> Result<Option<String>> {
        let table = self.table()?;
        let Some((_, value)) = table.iter().find(|(key, _)| key.get_ref() == COMMAND) else { return Ok(None) };
        match value.get_ref() {
            DeValue::String(name) => Ok(Some(name.clone().into_owned())),
            _ => Err(self.error(&value.span(), "command: write a string, such as \"lend\"")),
        }
    }
}

/// The parts of a command line.
pub struct Said<'a> {
    /// The innermost subcommand.
    pub command: &'a Command,
    /// The name of the command, such as "host-cache guest".
    name: String,
    /// Index of the first argument after the name.
    at: usize,
    /// The long options that are given.
    options: Vec<String>,
    /// Number of positional arguments that are given.
    positionals: usize,
}

impl<'a> Said<'a> {
    /// Parses the command line; `root` is clap's built command.
    pub fn of(root: &'a Command, given: &[OsString]) -> Said<'a> {
        let mut said = Said { command: root, name: String::new(), at: 1, options: Vec::new(), positionals: 0 };
        let mut next = 1;
        while let Some(word) = given.get(next) {
            let word = word.to_string_lossy();
            next += 1;
            if word == "--" {
                said.positionals += given.len() - next;
                break;
            }
            if let Some(option) = word.strip_prefix("--") {
                let (name, has_value) = option.split_once('=').map_or((option, false), |(name, _)| (name, true));
                let found = said.command.get_arguments().find(|argument| argument.get_long() == Some(name));
                next += usize::from(found.is_some_and(|found| found.get_action().takes_values()) && !has_value);
                said.options.push(name.to_owned());
            } else if let Some(found) = said.command.find_subcommand(&*word).filter(|_| said.positionals == 0) {
                said.name = if said.name.is_empty() { word.into_owned() } else { format!("{} {word}", said.name) };
                (said.command, said.at) = (found, next);
            } else if !word.starts_with('-') {
                said.positionals += 1;
            }
        }
        said
    }
}

/// The file that a command line names.
pub fn named(given: &[OsString]) -> Option<&OsStr> {
    let mut words = given.iter().skip(1).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(OsString::as_os_str);
        }
        if let Some(file) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
            return Some(OsStr::new(file));
        }
    }
    None
}

/// The arguments that a file for the command may have. None if the command is not a daemon.
pub fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_daemon = command.get_arguments().any(|argument| argument.get_id() == "foreground");
    command.get_arguments().filter(move |argument| {
        is_daemon && !argument.is_hide_set() && !NOT_IN_FILES.contains(&argument.get_id().as_str())
    })
}

/// The commands that read configuration files, such as "lend" and "host-cache guest".
fn daemons(command: &Command, name: &str) -> Vec<String> {
    let mut found: Vec<_> = options(command).next().map(|_| name.to_owned()).into_iter().collect();
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        found.extend(daemons(inner, format!("{name} {}", inner.get_name()).trim_start()));
    }
    found
}

/// The key of an argument in a file.
pub fn key(argument: &Arg) -> &str {
    argument.get_long().unwrap_or(argument.get_id().as_str())
}

/// Returns the command line with the additions of the file. `root` is clap's built command.
pub fn expand(root: &Command, given: &[OsString], file: &ConfigFile<'_>) -> Result<Vec<OsString>> {
    let said = Said::of(root, given);
    if options(said.command).next().is_none() {
        match said.name.as_str() {
            "" => return Ok(given.to_vec()), // clap says that there is no command
            name => bail!("`pumapool {name}` is not a daemon and has no configuration: omit --config"),
        }
    }
    let table = file.table()?;
    let mut positionals: Vec<Option<(Range<usize>, String)>> = Vec::new();
    let mut added = Vec::new();
    // In the order of the file, so that the first error is reported.
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (name, value) in entries {
        let (at, name, wrong) = (name.span(), name.get_ref().as_ref(), value.span());
        if name == COMMAND {
            let wanted = file.command()?;
            if wanted.as_deref() != Some(said.name.as_str()) {
                let wanted = wanted.unwrap_or_default();
                return Err(file.error(
                    &wrong,
                    format!("command: this file is for `pumapool {wanted}`, not for `pumapool {}`", said.name),
                ));
            }
            continue;
        }
        let Some(argument) = options(said.command).find(|argument| key(argument) == name) else {
            let help = format!("`pumapool {} --help` lists its options", said.name);
            return Err(file.error(&at, format!("{name}: there is no such option; {help}")));
        };
        let values =
            values(argument, value.get_ref()).map_err(|problem| file.error(&wrong, format!("{name}: {problem}")))?;
        if let Some(index) = argument.get_index() {
            let value = values.into_iter().next().unwrap_or_default();
            if value.starts_with('-') {
                return Err(file.error(&wrong, format!("{name}: {value} looks like an option; write ./{value}")));
            }
            positionals.resize(positionals.len().max(index), None);
            positionals[index - 1] = Some((at, value));
        } else if !said.options.iter().any(|option| option == name) {
            let is_flag = !argument.get_action().takes_values();
            added.extend(
                values.into_iter().map(|value| {
                    OsString::from(if is_flag { format!("--{name}") } else { format!("--{name}={value}") })
                }),
            );
        }
    }
    let (before, after) = given.split_at(said.at);
    let mut arguments = [before, &added, after].concat();
    let mut rest = positionals.into_iter().skip(said.positionals);
    while let Some(positional) = rest.next() {
        match positional {
            Some((_, value)) => arguments.push(value.into()),
            None => {
                if let Some((at, _)) = rest.flatten().next() {
                    return Err(
                        file.error(&at, "the arguments before this one are missing, here and on the command line")
                    );
                }
                break;
            }
        }
    }
    Ok(arguments)
}

/// Converts a value of the file to values of the argument. For a flag that is on, the value has no
/// meaning.
fn values(argument: &Arg, value: &DeValue<'_>) -> Result<Vec<String>> {
    if !argument.get_action().takes_values() {
        return match value {
            DeValue::Boolean(true) => Ok(vec![String::new()]),
            DeValue::Boolean(false) => Ok(Vec::new()),
            _ => bail!("write true or false"),
        };
    }
    let several = matches!(argument.get_action(), ArgAction::Append);
    let texts = match value {
        DeValue::Array(list) if several => list.iter().map(|one| text(one.get_ref())).collect::<Option<Vec<_>>>(),
        value => text(value).map(|text| vec![text]),
    };
    let wanted = if several { "write a string, or a list of strings" } else { "write a string or a number" };
    let texts = texts.context(wanted)?;
    texts.iter().try_for_each(|text| try_value(argument.get_value_parser(), text))?;
    Ok(texts)
}

fn text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.clone().into_owned()),
        DeValue::Integer(number) => Some(number.to_string()),
        DeValue::Float(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Checks whether the option accepts the value.
fn try_value(parser: &ValueParser, text: &str) -> Result<()> {
    let only = Arg::new("value").long("value").value_parser(parser.clone());
    let command = Command::new("value").no_binary_name(true).arg(only);
    let Err(error) = command.try_get_matches_from([format!("--value={text}")]) else { return Ok(()) };
    let reason = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) => source.to_string(),
        (None, Some(ContextValue::Strings(valid))) if !valid.is_empty() => format!("write one of {}", valid.join(", ")),
        _ => "the option does not take it".to_owned(),
    };
    bail!("{text:?}: {}", reason.replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(given: &str, text: &str) -> Result<String> {
        let root = crate::cli::Cli::built();
        let given: Vec<OsString> = given.split(' ').map(OsString::from).collect();
        let arguments = expand(&root, &given, &ConfigFile { path: Path::new("f.toml"), text })?;
        let arguments: Vec<_> = arguments.iter().map(|word| word.to_str().unwrap()).collect();
        Ok(arguments.join(" "))
    }

    #[test]
    fn a_file_becomes_arguments() {
        let file = "# what a mount needs\nsource = \"/srv\"\nmountpoint = \"/mnt\"\nlender = [\"a:1\", \"b:2\"]\nthreads = 4\nattribute-timeout = 0.5\nforeground = true\ntrust-network = false\nlog = \"debug\"\n";
        let all = "--lender=a:1 --lender=b:2 --threads=4 --attribute-timeout=0.5 --foreground --log=debug";
        assert_eq!(expanded("pumapool mount", file).unwrap(), format!("pumapool mount {all} /srv /mnt"));
        // The command line overrides the file, wherever the option is on it.
        assert_eq!(
            expanded("pumapool --log warn mount --lender=c:3 /data --config f.toml --threads 2", file).unwrap(),
            "pumapool --log warn mount --attribute-timeout=0.5 --foreground --lender=c:3 /data --config f.toml --threads 2 /mnt"
        );
        assert_eq!(
            expanded("pumapool lend", "command = \"lend\"\nlisten = \"unix:a\"").unwrap(),
            "pumapool lend --listen=unix:a"
        );
        assert_eq!(expanded("pumapool host-cache guest", "fs = \"/\"").unwrap(), "pumapool host-cache guest --fs=/");
        assert_eq!(expanded("pumapool lend", "").unwrap(), "pumapool lend");
    }

    #[test]
    fn what_is_wrong_is_told_by_line_and_key() {
        for (given, text, problem) in [
            ("pumapool lend", "reserve = 1\n\nrat = \"1GiB\"", "f.toml:3: rat: there is no such option"),
            ("pumapool lend", "listen = 5\nrate = \"1\"", "f.toml:1: listen: \"5\": "),
            ("pumapool lend", "\nrate = \"1\"", "f.toml:2: rate: \"1\": write at least 4.0 MiB a second"),
            ("pumapool lend", "rate = true", "f.toml:1: rate: write a string or a number"),
            ("pumapool lend", "grace = 1979-05-27", "f.toml:1: grace: write a string or a number"),
            ("pumapool lend", "foreground = \"yes\"", "f.toml:1: foreground: write true or false"),
            ("pumapool lend", "[lend]\nrate = 1", "f.toml:1: lend: there is no such option"),
            ("pumapool lend", "rate = ", "f.toml:1: "),
            ("pumapool lend", "rate = \"8MiB\"\nrate = \"9MiB\"", "f.toml:2: rate: it is there already"),
            (
                "pumapool lend",
                "command = \"mount\"",
                "f.toml:1: command: this file is for `pumapool mount`, not for `pumapool lend`",
            ),
            (
                "pumapool mount",
                "\nstrategy = \"most\"",
                "f.toml:2: strategy: \"most\": write one of exclusive, non-inclusive",
            ),
            ("pumapool mount", "threads = 0", "f.toml:1: threads: \"0\": 0 is not in 1..=256"),
            ("pumapool mount", "lender = [\"a:1\", [2]]", "f.toml:1: lender: write a string, or a list of strings"),
            ("pumapool mount", "source = \"-a\"", "f.toml:1: source: -a looks like an option"),
            (
                "pumapool mount",
                "threads = 1\nmountpoint = \"/mnt\"",
                "f.toml:2: the arguments before this one are missing",
            ),
            ("pumapool mount", "borrow = \"off\"", "f.toml:1: borrow: there is no such option"),
            ("pumapool mount", "config = \"x\"", "f.toml:1: config: there is no such option"),
            ("pumapool status", "json = true", "`pumapool status` is not a daemon"),
        ] {
            let error = format!("{:#}", expanded(given, text).unwrap_err());
            assert!(error.starts_with(problem) && !error.contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn the_file_is_found_on_the_command_line() {
        let named = |given: &str| {
            let given: Vec<OsString> = given.split(' ').map(OsString::from).collect();
            named(&given).map(|path| path.to_str().unwrap().to_owned())
        };
        assert_eq!(named("pumapool --config a lend").as_deref(), Some("a"));
        assert_eq!(named("pumapool lend --config=b").as_deref(), Some("b"));
        assert_eq!(named("pumapool numa run -- sh --config c"), None);
        assert_eq!(named("pumapool lend --config"), None);
    }
}
