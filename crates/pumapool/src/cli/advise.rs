//! The options of `pumapool advise`.

use crate::cli::{addresses, security, size};
use clap::ValueEnum;
use std::path::PathBuf;
use wire::address::Address;

/// Options of `advise`.
#[derive(clap::Args)]
pub struct Options {
    /// Directories or files to watch. The mount point of a file system stands for all of its files.
    #[arg(required_unless_present = "lend")]
    pub paths: Vec<PathBuf>,

    /// Instead, estimate how much memory this machine could lend.
    #[arg(long, conflicts_with_all = ["paths", "lender", "size", "picture"])]
    pub lend: bool,

    /// How long to watch, in seconds. Ctrl-C ends the watch earlier, and still prints the results.
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,

    /// Address of a lender, to measure its latency. Without this option a round trip of 150 µs is
    /// assumed.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    pub lender: Option<Address>,

    /// Size of a pool to estimate. May be given several times. Without this option the sizes are
    /// derived from the evictions.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Vec<u64>,

    /// Also draw the curve into this file: .svg or .png.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,

    /// Print the results as one JSON object.
    #[arg(long)]
    pub json: bool,

    /// How to observe reads; for tests.
    #[arg(long, hide = true, value_enum)]
    pub reads: Option<Reads>,

    #[command(flatten)]
    pub security: security::Options,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Reads {
    PageCache,
    SystemCalls,
}

impl From<Reads> for tap::ReadsSource {
    fn from(reads: Reads) -> tap::ReadsSource {
        match reads {
            Reads::PageCache => tap::ReadsSource::PageCache,
            Reads::SystemCalls => tap::ReadsSource::SystemCalls,
        }
    }
}
