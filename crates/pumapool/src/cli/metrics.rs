//! The options of `pumapool metrics`.

use crate::cli::addresses;
use clap::ValueEnum;
use wire::address::Address;

/// Options of `metrics`.
#[derive(clap::Args)]
pub struct Options {
    /// Serve the page at http://ADDR/metrics until a signal arrives: HOST:PORT or unix:PATH.
    /// Everybody who can connect can read it.
    #[arg(long, value_name = "ADDR", value_parser = addresses::http)]
    pub listen: Option<Address>,

    /// Output format.
    #[arg(long, value_enum, default_value_t = Format::Text, conflicts_with = "listen")]
    pub format: Format,
}

/// How the page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Prometheus' own text format 0.0.4, which everything understands.
    Text,
    /// OpenMetrics 1.0.
    Openmetrics,
}
