//! `pumapool generate`: man pages, shell completions and references, made from the code itself, so
//! that they say what it does.

mod options;

use crate::cli::exit;
use crate::cli::generate::{Options, What};
use crate::metrics::reference;
use anyhow::{Context, Result};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// Runs the command; `root` is what clap knows of all commands, not built.
pub fn run(options: &Options, root: &clap::Command) -> Result<ExitCode> {
    let mut root = root.clone();
    match &options.what {
        What::Man { folder } => {
            root = root.disable_help_subcommand(true);
            root.build();
            pages(&root, folder)?;
        }
        What::Options => {
            root.build();
            std::io::stdout().write_all(options::markdown(&root).as_bytes())?;
        }
        What::Metrics => std::io::stdout().write_all(reference::markdown().as_bytes())?,
        What::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut root, "pumapool", &mut script);
            std::io::stdout().write_all(&script)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The page of a command, and those of its subcommands: pumapool.1, pumapool-numa.1,
/// pumapool-numa-list.1 …
fn pages(command: &clap::Command, folder: &Path) -> Result<()> {
    let man = Man::new(command.clone()).manual("Puma");
    let mut page = Vec::new();
    man.render(&mut page)?;
    let mut rest = Roff::default();
    rest.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in exit::CODES {
        rest.control("TP", []).text([bold(code)]).text([roman(meaning)]);
    }
    rest.control("SH", ["SEE ALSO"])
        .text([roman("The pages of docs/, in /usr/share/doc/pumapool where the package is installed.")]);
    rest.to_writer(&mut page)?;
    let path = folder.join(man.get_filename());
    std::fs::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    command.get_subcommands().filter(|inner| !inner.is_hide_set()).try_for_each(|inner| pages(inner, folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_exit_codes() {
        let scratch = testbed::Scratch::new("generate").unwrap();
        let root = <crate::cli::Cli as clap::CommandFactory>::command();
        run(&Options { what: What::Man { folder: scratch.path().to_owned() } }, &root).unwrap();
        for name in
            ["pumapool", "pumapool-mount", "pumapool-host-cache-guest", "pumapool-numa-list", "pumapool-config-check"]
        {
            let page = std::fs::read_to_string(scratch.path().join(format!("{name}.1"))).unwrap();
            assert!(page.contains("EXIT STATUS") && page.contains("SYNOPSIS"), "{name}: {page}");
        }
        assert!(!scratch.path().join("pumapool-generate.1").exists(), "it is for packagers");
    }

    #[test]
    fn the_documentation_has_the_same_exit_codes() {
        let page = include_str!("../../../../../docs/user/packaging.md");
        for (code, meaning) in exit::CODES {
            assert!(
                page.contains(&format!("| {code} | {meaning} |")),
                "docs/user/packaging.md lacks {code}: {meaning}"
            );
        }
    }
}
