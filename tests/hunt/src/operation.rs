//! The operations, and the modes in which they are tried.

use std::fmt;
use std::str::FromStr;

/// The write mode of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WriteMode {
    /// `--write through`.
    Through,
    /// `--write back`.
    Back,
}

impl WriteMode {
    /// The option's value.
    pub fn name(self) -> &'static str {
        match self {
            WriteMode::Through => "through",
            WriteMode::Back => "back",
        }
    }
}

impl FromStr for WriteMode {
    type Err = String;

    fn from_str(name: &str) -> Result<WriteMode, String> {
        let found = [WriteMode::Through, WriteMode::Back].into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| format!("there is no {name:?}; choose from through, back"))
    }
}

/// The modes in which an operation is tried by default.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    Always,
    /// Not with `--write through`, where it finds a limit of the kernel, or a fault that is not
    /// mended yet.
    Back,
    /// Only on request.
    Never,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident, $name:literal, $weight:literal, $tried:ident;)*) => {
        /// The operation of a process.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation {
            $($(#[$doc])* $operation,)*
        }

        impl Operation {
            /// All operations.
            pub const ALL: &[Operation] = &[$(Operation::$operation,)*];
            /// The number of operations.
            pub const COUNT: usize = Operation::ALL.len();

            /// Its name in options and reports.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$operation => $name,)* }
            }

            /// The relative frequency of the operation.
            pub fn weight(self) -> u32 {
                match self { $(Operation::$operation => $weight,)* }
            }

            fn tried(self) -> Tried {
                match self { $(Operation::$operation => Tried::$tried,)* }
            }
        }
    };
}

operations! {
    /// read(2) of some blocks.
    Read, "read", 300, Always;
    /// Loads from a mapping.
    Load, "load", 120, Always;
    /// A direct read.
    ReadDirect, "read-direct", 40, Always;
    /// A whole file is read in order.
    Scan, "scan", 25, Always;
    /// The size of a file is checked.
    Stat, "stat", 30, Always;
    /// write(2) of some blocks.
    Write, "write", 140, Always;
    /// Stores into a mapping: whole pages and parts of pages.
    Store, "store", 140, Always;
    /// A direct write.
    Direct, "direct", 25, Always;
    /// A write with O_APPEND. Not beside stores of the same page with `--write through`.
    Append, "append", 50, Always;
    /// An append at any end, to a file that mappings store into. (With `--write through` the kernel
    /// loses bytes of it, also in the backing file, and the ledger cannot predict which:
    /// docs/design/limits.md, L7.)
    AppendBesideStore, "append-beside-store", 25, Back;
    /// The file is cut, or made longer by ftruncate.
    Truncate, "truncate", 25, Always;
    /// A write behind the end, which leaves a hole.
    Extend, "extend", 15, Always;
    /// A hole is punched, while no process stores into its pages.
    Punch, "punch", 15, Always;
    /// A range is zeroed, while no process stores into its pages.
    Zero, "zero", 10, Always;
    /// copy_file_range, while no process stores into the pages that it copies to.
    Copy, "copy", 20, Always;
    /// copy_file_range into parts of pages, while others store into the other parts.
    CopyBesideStore, "copy-beside-store", 20, Always;
    /// A new file is renamed over the name.
    RenameOver, "rename-over", 8, Always;
    /// The name is unlinked and created again.
    Recreate, "recreate", 6, Always;
    /// A second name is made, checked and unlinked.
    Link, "link", 15, Always;
    /// fsync, fdatasync, msync or sync_file_range.
    Sync, "sync", 30, Always;
    /// The kernel is asked to evict the file, or a part.
    Evict, "evict", 30, Always;
    /// After fsync, the backing file is compared.
    Below, "below", 5, Always;
    /// Some blocks are written in the backing file.
    OutsideWrite, "outside-write", 10, Always;
    /// Some blocks are written in the backing file past its cache.
    OutsideDirect, "outside-direct", 5, Always;
    /// Stores into a mapping of the backing file.
    OutsideStore, "outside-store", 5, Always;
    /// Another file is renamed over the backing file.
    OutsideRename, "outside-rename", 4, Always;
    /// The backing file is unlinked and created again.
    OutsideRecreate, "outside-recreate", 4, Always;
    /// The backing file is cut. If other processes open it at the same moment, the kernel may not
    /// learn the new end until one more open.
    OutsideCut, "outside-cut", 4, Never;
    /// The backing file grows; then it is opened through the mount, and its new end is mapped, or
    /// read.
    OutsideGrow, "outside-grow", 6, Always;
    /// The backing file is written in several calls, while others open and read it.
    OutsideSlow, "outside-slow", 6, Always;
}

impl Operation {
    /// The one with that number in [`Operation::ALL`].
    pub fn from_index(index: usize) -> Operation {
        Operation::ALL[index % Operation::COUNT]
    }

    /// Whether it is tried by default.
    pub fn by_default(self, mode: WriteMode) -> bool {
        match self.tried() {
            Tried::Always => true,
            Tried::Back => mode == WriteMode::Back,
            Tried::Never => false,
        }
    }

    /// Whether it takes microseconds, so that many of them race within a moment.
    pub fn is_quick(self) -> bool {
        use Operation::*;
        !self.is_outside() && !matches!(self, Scan | Below | RenameOver | Recreate)
    }

    /// Whether it changes the backing file without going through the mount.
    pub fn is_outside(self) -> bool {
        use Operation::*;
        matches!(
            self,
            OutsideWrite
                | OutsideDirect
                | OutsideStore
                | OutsideRename
                | OutsideRecreate
                | OutsideCut
                | OutsideGrow
                | OutsideSlow
        )
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(name: &str) -> Result<Operation, String> {
        let found = Operation::ALL.iter().find(|operation| operation.name() == name);
        let names = || Operation::ALL.iter().map(|operation| operation.name()).collect::<Vec<_>>().join(", ");
        found.copied().ok_or_else(|| format!("there is no {name:?}; choose from {}", names()))
    }
}

/// The operations of a run, by the mode and the options.
///
/// # Errors
/// Fails if nothing is left.
pub fn enabled(mode: WriteMode, with: &[Operation], without: &[Operation]) -> Result<Vec<Operation>, String> {
    let wanted = |operation: &Operation| {
        (operation.by_default(mode) || with.contains(operation)) && !without.contains(operation)
    };
    let enabled: Vec<Operation> = Operation::ALL.iter().copied().filter(wanted).collect();
    if enabled.is_empty() { Err("no operation is left: leave out fewer".to_owned()) } else { Ok(enabled) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_operations() {
        for (index, operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(operation.name().parse(), Ok(*operation));
            assert_eq!(Operation::from_index(index), *operation);
            assert_eq!(*operation as usize, index);
        }
        assert!("stores".parse::<Operation>().unwrap_err().contains("load, read-direct"));
    }

    #[test]
    fn options_add_and_take_away() {
        let through = enabled(WriteMode::Through, &[], &[]).unwrap();
        assert!(through.contains(&Operation::Read) && !through.contains(&Operation::AppendBesideStore));
        assert!(!enabled(WriteMode::Back, &[], &[]).unwrap().contains(&Operation::OutsideCut));
        let back = enabled(WriteMode::Back, &[Operation::OutsideCut], &[Operation::Read]).unwrap();
        assert!(back.contains(&Operation::OutsideCut));
        assert!(back.contains(&Operation::AppendBesideStore) && !back.contains(&Operation::Read));
        assert!(enabled(WriteMode::Back, &[], Operation::ALL).is_err());
    }
}
