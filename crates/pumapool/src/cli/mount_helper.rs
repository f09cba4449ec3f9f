//! `mount -t fuse.pumapool`, and lines of /etc/fstab: mount(8) calls `mount.fuse.pumapool`, a link
//! to this program; or it has `mount.fuse` call this program by its own name, with a path in front.
//! The call becomes the command line of `pumapool mount`. No I/O.
//!
//! Options of `pumapool mount` are passed on. Generic options are applied, ignored, or refused if
//! ignoring them would be wrong.

use ::mount::MountFlags;
use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Arg, ArgAction, Command};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The names under which this program is the helper.
const NAMES: [&str; 2] = ["mount.fuse.pumapool", "mount.pumapool"];

/// Options that are ignored: they are for mount(8), systemd or other readers of fstab, or always
/// apply to Puma's mounts. Access times are up to the backing file system.
const NOTHING_TO_US: [&str; 25] = [
    "allow_other",
    "async",
    "atime",
    "auto",
    "comment",
    "default_permissions",
    "defaults",
    "diratime",
    "group",
    "helper",
    "lazytime",
    "loud",
    "noatime",
    "noauto",
    "nodiratime",
    "nofail",
    "nolazytime",
    "norelatime",
    "nostrictatime",
    "nouser",
    "owner",
    "relatime",
    "silent",
    "user",
    "users",
];

/// Options that are refused, with the advice for each.
const REFUSED: [(&str, &str); 6] = [
    ("sync", "use --write through, which is the default, and fsync"),
    ("dirsync", "names are changed in the backing directory before the answer; use fsync"),
    ("strictatime", "the backing file system keeps times of access: mount that one with strictatime"),
    ("mand", "there are no mandatory locks"),
    ("nosymfollow", "a mount with FUSE cannot forbid it"),
    ("foreground", "mount(8) would wait for its end; use `pumapool mount`, or systemd's unit"),
];

/// Restrictions: the option, the opposite option, and the flag of the mount.
const FLAGS: [(&str, &str, MountFlags); 4] = [
    ("ro", "rw", MountFlags::RDONLY),
    ("nosuid", "suid", MountFlags::NOSUID),
    ("nodev", "dev", MountFlags::NODEV),
    ("noexec", "exec", MountFlags::NOEXEC),
];

/// A call by mount(8), interpreted.
#[derive(Debug, PartialEq)]
pub struct Wanted {
    /// The command line of `pumapool`.
    pub arguments: Vec<OsString>,
    /// Whether to check the call only (`-f`).
    pub fake: bool,
    /// If present, change the flags of an existing mount instead (`-o remount`).
    pub remount: Option<Remount>,
}

/// A change of the flags of a mount. Other options stay unchanged, even if mount(8) repeats those
/// of fstab.
#[derive(Debug, PartialEq)]
pub struct Remount {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Restrictions to set.
    pub forbids: MountFlags,
    /// Restrictions to remove.
    pub permits: MountFlags,
}

/// Whether the caller is mount(8), or its `mount.fuse`.
pub fn is_called(arguments: &[OsString]) -> bool {
    let name = arguments.first().and_then(|name| Path::new(name).file_name());
    let is_path = arguments.get(1).and_then(|word| word.to_str()).is_some_and(|word| word.starts_with('/'));
    is_path || name.is_some_and(|name| NAMES.iter().any(|ours| name == *ours))
}

/// Interprets the call. `mount` is clap's built command `pumapool mount`.
pub fn wanted(mount: &Command, arguments: &[OsString]) -> Result<Wanted> {
    let (mut places, mut options) = (Vec::new(), Vec::new());
    let (mut fake, mut sloppy) = (false, false);
    let mut words = arguments.iter().skip(1);
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("-o") => {
                let list =
                    words.next().and_then(|list| list.to_str()).context("-o: write options after it, in UTF-8")?;
                options.extend(split(list));
            }
            Some("-t") => {
                let kind = words.next().context("-t: write a type after it")?;
                let is_ours = kind == "fuse.pumapool" || kind == "pumapool" || kind == "fuse";
                ensure!(is_ours, "-t {}: this is the helper for fuse.pumapool", kind.display());
            }
            Some("-N") => bail!("-N: a mount is made where its daemon runs; enter that namespace with nsenter"),
            Some(flags) if flags.starts_with('-') && flags.len() > 1 => {
                for flag in flags.chars().skip(1) {
                    match flag {
                        'f' => fake = true,
                        's' => sloppy = true,
                        'n' | 'v' => {} // there is no mtab of ours; and nothing more to say
                        flag => bail!("-{flag}: mount(8) has no such flag for its helpers"),
                    }
                }
            }
            _ => places.push(word.clone()),
        }
    }
    let usage = "write SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS], as mount(8) does; see `pumapool mount --help`";
    let [source, mountpoint] = places.try_into().ok().context(usage)?;
    let mut wanted: Vec<OsString> = ["pumapool", "mount"].map(OsString::from).into();
    let is_remount = options.iter().any(|option| option == "remount");
    let mut forbids = MountFlags::empty();
    for option in options {
        let (name, value) = option.split_once('=').map_or((option.as_str(), None), |(name, value)| (name, Some(value)));
        if let Some((forbid, _, flag)) = FLAGS.iter().find(|(forbid, permit, _)| name == *forbid || name == *permit) {
            forbids.set(*flag, name == *forbid);
        } else if REFUSED.iter().any(|(refused, _)| name == *refused) {
            return Err(refused(name));
        } else if let Some(argument) = ours(mount, name) {
            if !matches!(argument.get_action(), ArgAction::Append) {
                // The last one counts: the options of fstab precede those of mount(8)'s command
                // line.
                let flag = format!("--{name}");
                wanted.retain(|word| word.to_str().and_then(|word| word.split('=').next()) != Some(&flag));
            }
            match (argument.get_action().takes_values(), value) {
                (true, Some(value)) => wanted.push(format!("--{name}={value}").into()),
                (true, None) => bail!("-o {name}: write a value after it, {name}=VALUE"),
                (false, None) => wanted.push(format!("--{name}").into()),
                (false, Some(_)) => bail!("-o {name}: it takes no value"),
            }
        } else if !NOTHING_TO_US.contains(&name) && !name.starts_with(['_', 'x', 'X']) && !sloppy && !is_remount {
            bail!("-o {name}: there is no such option; `pumapool mount --help` lists them, without the --");
        }
    }
    let forbidden = FLAGS.iter().filter(|(_, _, flag)| forbids.contains(*flag));
    wanted.extend(forbidden.map(|(name, _, _)| format!("--forbid={name}").into()));
    // mount(8) omits permitting options such as `suid`. It passes all restrictions that are to
    // apply, including those in the mount table.
    let permits = FLAGS.iter().map(|(_, _, flag)| *flag).collect::<MountFlags>() - forbids;
    let remount = is_remount.then(|| Remount { mountpoint: mountpoint.clone().into(), forbids, permits });
    wanted.extend(["--".into(), source, mountpoint]);
    Ok(Wanted { arguments: wanted, fake, remount })
}

/// The error for an option that is refused.
pub fn refused(name: &str) -> anyhow::Error {
    let instead = REFUSED.iter().find(|(refused, _)| name == *refused).map_or("", |(_, instead)| *instead);
    anyhow!("-o {name} is not possible: {instead}")
}

/// The option of `pumapool mount` with this name.
fn ours<'a>(mount: &'a Command, name: &str) -> Option<&'a Arg> {
    let not_ours = ["help", "version", "forbid"];
    let mut all = mount.get_arguments().filter(|argument| !argument.is_hide_set());
    all.find(|argument| argument.get_long() == Some(name) && !not_ours.contains(&name))
}

/// Splits at commas, but not between double quotes, which are removed. A character after a
/// backslash is taken literally.
fn split(list: &str) -> Vec<String> {
    let (mut all, mut one, mut is_quoted) = (Vec::new(), String::new(), false);
    let mut letters = list.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => is_quoted = !is_quoted,
            '\\' => one.extend(letters.next()),
            ',' if !is_quoted => all.push(std::mem::take(&mut one)),
            letter => one.push(letter),
        }
    }
    all.push(one);
    all.retain(|option| !option.is_empty());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<Wanted> {
        let root = crate::cli::Cli::built();
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        assert!(is_called(&arguments), "{line}");
        wanted(root.find_subcommand("mount").unwrap(), &arguments)
    }

    #[test]
    fn what_mount_says_becomes_a_command_line() {
        for (line, expected) in [
            ("/sbin/mount.fuse.pumapool /srv /mnt -o rw", "pumapool mount -- /srv /mnt"),
            ("mount.pumapool /srv /mnt", "pumapool mount -- /srv /mnt"),
            (
                "pumapool /srv /mnt -o rw,lender=a:1,lender=unix:/b,key=/k,trust-network,_netdev,x-systemd.automount,nofail",
                "pumapool mount --lender=a:1 --lender=unix:/b --key=/k --trust-network -- /srv /mnt",
            ),
            (
                "mount.fuse.pumapool /srv /mnt -n -o ro,nosuid,nodev -v -t fuse.pumapool -o dev,config=/c.toml,log=debug",
                "pumapool mount --config=/c.toml --log=debug --forbid=ro --forbid=nosuid -- /srv /mnt",
            ),
            (
                "mount.fuse.pumapool /srv /mnt -o gate-short=\"40000,1500\",gate-long=1500\\,1000,defaults",
                "pumapool mount --gate-short=40000,1500 --gate-long=1500,1000 -- /srv /mnt",
            ),
            (
                "mount.fuse.pumapool /srv /mnt -o threads=4,lender=a:1,trust-network,threads=8,trust-network,lender=b:1",
                "pumapool mount --lender=a:1 --threads=8 --trust-network --lender=b:1 -- /srv /mnt",
            ),
            ("mount.fuse.pumapool /srv /mnt -s -o nonsense,threads=4", "pumapool mount --threads=4 -- /srv /mnt"),
        ] {
            let wanted = asked(line).unwrap();
            let arguments: Vec<_> = wanted.arguments.iter().map(|word| word.to_str().unwrap()).collect();
            assert_eq!((arguments.join(" ").as_str(), wanted.fake), (expected, false), "{line}");
        }
        assert!(asked("mount.fuse.pumapool /srv /mnt -fv").unwrap().fake);
        // mount(8) repeats the options in the mount table.
        let remount =
            "/sbin/mount.fuse.pumapool /srv /mnt -o rw,nosuid,relatime,user_id=0,max_read=1048576,remount,ro,exec";
        let (forbids, permits) = (MountFlags::RDONLY | MountFlags::NOSUID, MountFlags::NODEV | MountFlags::NOEXEC);
        let expected = Remount { mountpoint: "/mnt".into(), forbids, permits };
        assert_eq!(asked(remount).unwrap().remount, Some(expected));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (line, problem) in [
            ("mount.fuse.pumapool /srv /mnt -o rw,nonsense=1", "-o nonsense: there is no such option"),
            ("mount.fuse.pumapool /srv /mnt -o remount,sync", "-o sync is not possible"),
            ("mount.fuse.pumapool /srv /mnt -o sync", "-o sync is not possible"),
            ("mount.fuse.pumapool /srv /mnt -o foreground", "-o foreground is not possible"),
            ("mount.fuse.pumapool /srv /mnt -o lender", "-o lender: write a value"),
            ("mount.fuse.pumapool /srv /mnt -o trust-network=1", "-o trust-network: it takes no value"),
            ("mount.fuse.pumapool /srv /mnt -o borrow=off", "-o borrow: there is no such option"),
            ("mount.fuse.pumapool /srv /mnt -N /proc/1/ns/mnt", "-N: "),
            ("mount.fuse.pumapool /srv /mnt -t nfs", "-t nfs: "),
            ("mount.fuse.pumapool /srv /mnt -q", "-q: "),
            ("mount.fuse.pumapool /srv", "write SOURCE MOUNTPOINT"),
        ] {
            let error = format!("{:#}", asked(line).unwrap_err());
            assert!(error.starts_with(problem) && !error.contains('\n'), "{line}: {error}");
        }
        assert!(!is_called(&["pumapool".into(), "mount".into(), "/srv".into()]));
    }
}
