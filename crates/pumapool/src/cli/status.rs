//! The options of `pumapool status`.

/// Options of `status`.
#[derive(clap::Args)]
pub struct Options {
    /// Print everything as one JSON object: {"mounts": […], "lenders": […], "nodes": […], "guests":
    /// […], "numa": […], "silent": […]}. Nodes are machines that have joined a pool, guests are
    /// file systems whose evictions go to this machine's host. The list numa has daemons that place
    /// memory on NUMA nodes, silent has daemons that do not answer.
    #[arg(long)]
    pub json: bool,

    /// For each mount that distinguishes control groups (`mount --cgroup`), show the use of each
    /// group.
    #[arg(long, conflicts_with = "json")]
    pub by_cgroup: bool,
}
