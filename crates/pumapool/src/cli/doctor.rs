//! The options of `pumapool doctor`.

/// Options of `doctor`.
#[derive(clap::Args)]
pub struct Options {
    /// Print JSON: a list of {"what", "works", "finding", "advice"}.
    #[arg(long)]
    pub json: bool,
}
