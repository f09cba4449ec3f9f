//! The operations that the kernel asks for: one file for each group of them.
//!
//! - `dispatch`: which function answers which operation
//! - `names`: lookup, create, tmpfile, mknod, mkdir, symlink, link, unlink, rmdir, rename, readlink
//! - `attributes`: getattr, statx, setattr, statfs, ioctl; `xattr`: extended ones
//! - `data`: open, write, flush, fsync, release; `reads`: read; `space`: fallocate, lseek,
//!   copy_file_range
//! - `directories`: opendir, readdir, readdirplus, fsyncdir; `readdirplus`: which tasks get
//!   attributes with their listings
//! - `closed`: every operation on a mount point that is not crossed into
//!
//! Several of them need:
//! - `change`: announcing a change to the borrower
//! - `credentials`: acting as the caller
//! - `access_time`: access times of what is read from a cache
//! - `classes`: which share of its user a request counts to

mod access_time;
mod attributes;
mod change;
pub(crate) mod classes;
mod closed;
pub(crate) mod credentials;
pub(crate) mod data;
pub(crate) mod directories;
mod dispatch;
mod names;
pub(crate) mod readdirplus;
mod reads;
mod space;
pub(crate) mod xattr;
