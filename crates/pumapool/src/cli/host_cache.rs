//! The options of `pumapool host-cache`.

use crate::cli::{addresses, daemon, mount, security, size, written};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use wire::address::Address;

/// Options of `host-cache`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    #[command(subcommand)]
    pub side: Side,
}

#[derive(clap::Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// In a virtual machine: send the pages that this machine evicts to its host.
    Guest(GuestOptions),
    /// On the host: mount the images of virtual machines, and store pages that the guests evict in
    /// the page cache.
    Host(HostOptions),
}

/// Options of `host-cache guest`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct GuestOptions {
    /// Mountpoint of an ext4 or XFS file system, on a disk that the host serves.
    #[arg(long, value_name = "MOUNTPOINT")]
    #[serde(with = "written::path")]
    pub fs: PathBuf,

    /// Address at which the host listens: vsock:2:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    #[serde(with = "written::text")]
    pub to: Address,

    /// Tell the host which pages this machine has read, so that the host drops its copies.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub tell_reads: Switch,

    /// Memory for evicted pages that wait to be sent (a power of two).
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = mount::ring_bytes)]
    pub ring: usize,

    #[command(flatten)]
    #[serde(flatten)]
    pub security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

/// Options of `host-cache host`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct HostOptions {
    /// Directory of the images.
    #[arg(long, value_name = "DIR")]
    #[serde(with = "written::path")]
    pub images: PathBuf,

    /// Where to mount the directory. Virtual machines must open their disks there. Default: in
    /// place, over the directory itself.
    #[serde(with = "written::maybe_path")]
    pub mountpoint: Option<PathBuf>,

    /// Address at which guests connect: vsock:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::place)]
    #[serde(with = "written::text")]
    pub listen: Address,

    /// A raw image in DIR, and the key file of the guest that uses this image as its disk. The
    /// guest needs a copy of the key. May be given several times. A single guest needs no key if
    /// the address is unix:PATH, or with --trust-network.
    #[arg(long, value_name = "IMAGE[=KEYFILE]", required = true)]
    pub guest: Vec<GuestName>,

    /// Use no key: trust everybody who can connect to be the guest.
    #[arg(long)]
    pub trust_network: bool,

    /// How to put pages into the page cache.
    #[arg(long, value_enum, default_value_t = Mode::Clean)]
    pub mode: Mode,

    /// Keep the copies of pages that the guest has read. Without this option the host drops them.
    #[arg(long)]
    pub keep: bool,

    /// Limit for the evicted pages of one guest in the page cache. Default: as much as the kernel
    /// has room for.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(with = "written::maybe_size")]
    pub limit: Option<u64>,

    /// Memory for the catalog of the images' pages: 2 MiB for each GiB of pages.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse_catalog)]
    #[serde(with = "written::size")]
    pub catalog: u64,

    /// Threads that always serve the images. While all of them wait for the disk, the daemon starts
    /// more, up to 128.
    #[arg(long, default_value_t = mount::Policies::default().threads, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Store clean pages; nothing is written to the disk.
    Clean,
    /// Write the pages into the image again, as in the paper; for comparison.
    Write,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct GuestName {
    #[serde(with = "written::path")]
    pub image: PathBuf,
    #[serde(with = "written::maybe_path")]
    pub key: Option<PathBuf>,
}

impl std::str::FromStr for GuestName {
    type Err = String;

    fn from_str(text: &str) -> Result<GuestName, String> {
        let (image, key) = text.split_once('=').map_or((text, None), |(image, key)| (image, Some(key)));
        if image.is_empty() || key.is_some_and(str::is_empty) {
            return Err("write the image's name and its key file, such as disk.img=/etc/pumapool-keys/disk.key".into());
        }
        if Path::new(image).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            return Err(format!("{image:?} is not a path within the directory of images (--images)"));
        }
        Ok(GuestName { image: image.into(), key: key.map(PathBuf::from) })
    }
}
