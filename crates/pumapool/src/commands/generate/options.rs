//! docs/user/options.md: every command and its options, written from what clap knows of them.

use crate::cli::{lend, mount};
use crate::config::file;
use clap::{Arg, Command};
use std::fmt::Write;

const HEAD: &str = "# Options
<!-- Written by `pumapool generate options`, from the commands' own declarations: change those. -->

Every command with all its options, as `--help` has them. [The commands](usage.md) says what they are for.

An option of a daemon can be in a configuration file (`--config FILE`, TOML) by its name without the dashes; what stands before the options has the
key that is named with it. [Packages, systemd, fstab, containers](packaging.md) has an example. What is said to change on SIGHUP is taken over from the file
while the daemon runs.

Sizes are in bytes, or with `KiB`, `MiB`, `GiB` or `TiB`. Addresses are `HOST:PORT`, `[IPV6]:PORT`, `unix:PATH` or `vsock:CID:PORT`.
";

/// The page; `root` is built.
pub fn markdown(root: &Command) -> String {
    let mut text = String::from(HEAD);
    let everywhere: Vec<&Arg> = root.get_arguments().filter(|argument| argument.is_global_set()).collect();
    text.push_str("\n## All commands\n\n");
    for argument in &everywhere {
        add_option(&mut text, root, argument, false);
    }
    for command in root.get_subcommands() {
        add_command(&mut text, command, &everywhere);
    }
    text
}

/// A command and those below it, unless it is hidden or clap's own.
fn add_command(text: &mut String, command: &Command, everywhere: &[&Arg]) {
    if command.is_hide_set() || command.get_name() == "help" {
        return;
    }
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let _infallible = write!(text, "\n## {name}\n{}\n\n", sentence(&about));
    let of_files: Vec<&Arg> = file::options(command).collect();
    for argument in command.get_arguments() {
        let is_elsewhere = everywhere.iter().any(|other| other.get_id() == argument.get_id());
        if !argument.is_hide_set() && !is_elsewhere && !["help", "version"].contains(&argument.get_id().as_str()) {
            let is_of_files = of_files.iter().any(|other| other.get_id() == argument.get_id());
            add_option(text, command, argument, is_of_files);
        }
    }
    command.get_subcommands().for_each(|inner| add_command(text, inner, everywhere));
}

fn add_option(text: &mut String, command: &Command, argument: &Arg, is_of_files: bool) {
    let values: Vec<String> = argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let value = if argument.get_action().takes_values() { values.join(" ") } else { String::new() };
    let written = match argument.get_long() {
        Some(long) if value.is_empty() => format!("--{long}"),
        Some(long) => format!("--{long} {value}"),
        None => value,
    };
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut says = vec![sentence(&help)];
    let possible: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|possible| argument.get_action().takes_values() && !possible.is_hide_set())
        .map(|possible| match possible.get_help() {
            Some(help) => format!("`{}` ({help})", possible.get_name()),
            None => format!("`{}`", possible.get_name()),
        })
        .collect();
    if !possible.is_empty() {
        says.push(format!("One of {}.", possible.join(", ")));
    }
    let defaults: Vec<_> = argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && argument.get_action().takes_values() {
        says.push(format!("Default: `{}`.", defaults.join(" ")));
    }
    if argument.is_required_set() && !argument.is_positional() {
        says.push("Must be given.".to_owned());
    }
    if is_of_files && argument.is_positional() {
        says.push(format!("In a file: `{}`.", file::key(argument)));
    }
    let is_log = argument.get_id() == "log";
    if is_log || changeable(command.get_name()).contains(&file::key(argument)) {
        says.push(format!("Changes on SIGHUP{}.", if is_log { ", in daemons" } else { "" }));
    }
    let _infallible = writeln!(text, "- `{written}`: {}", says.join(" "));
}

/// Which of a daemon's options change while it runs.
fn changeable(command: &str) -> &'static [&'static str] {
    match command {
        "lend" | "join" => &lend::CHANGEABLE,
        "mount" => &mount::CHANGEABLE,
        _ => &[],
    }
}

/// On one line, with the period that clap takes off.
fn sentence(help: &str) -> String {
    let line = help.split_whitespace().collect::<Vec<_>>().join(" ");
    // Words in capitals between < and > would be taken for HTML.
    let line = line.replace('<', "&lt;");
    if line.ends_with(['.', ':', '?']) || line.is_empty() { line } else { format!("{line}.") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;

    #[test]
    fn the_committed_page_is_what_the_code_says() {
        let root = Cli::built();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/user/options.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(&root),
            "docs/user/options.md is old: pumapool generate options > docs/user/options.md"
        );
    }
}
