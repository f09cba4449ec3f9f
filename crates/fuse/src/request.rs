//! Decodes the bytes of a request to a typed operation.
//!
//! Every length is checked against the available bytes. If decoding fails, only that one request
//! gets an error. An unknown opcode becomes [`Operation::Unknown`], for which ENOSYS is the right
//! answer. Names are as the kernel sent them, in any encoding.

use crate::abi::{self, opcode};
use std::ffi::CStr;
use zerocopy::FromBytes;

/// A request that is shorter than its kind needs, or contradicts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request from the kernel is shorter than its kind needs, or contradicts itself")]
pub struct DecodeError;

/// One request.
#[derive(Debug)]
pub struct Request<'a> {
    /// The caller, and the node of the request.
    pub header: abi::InHeader,
    /// The requested operation.
    pub operation: Operation<'a>,
    /// A supplementary group that a creating request should be made with (FUSE_CREATE_SUPP_GROUP).
    pub supplementary_group: Option<u32>,
}

/// The requested operation. The fields are those of the kernel's structures, and the names and
/// bytes behind them.
#[derive(Debug)]
#[allow(missing_docs)] // One variant per opcode; the interface's own documentation explains each.
pub enum Operation<'a> {
    Lookup {
        name: &'a CStr,
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        nodes: Forgets<'a>,
    },
    Getattr(abi::GetattrIn),
    Setattr(abi::SetattrIn),
    Statx(abi::StatxIn),
    Readlink,
    Symlink {
        name: &'a CStr,
        target: &'a CStr,
    },
    Mknod {
        args: abi::MknodIn,
        name: &'a CStr,
    },
    Mkdir {
        args: abi::MkdirIn,
        name: &'a CStr,
    },
    Unlink {
        name: &'a CStr,
    },
    Rmdir {
        name: &'a CStr,
    },
    Rename {
        new_parent: u64,
        flags: u32,
        name: &'a CStr,
        new_name: &'a CStr,
    },
    Link {
        node: u64,
        new_name: &'a CStr,
    },
    Open(abi::OpenIn),
    Create {
        args: abi::CreateIn,
        name: &'a CStr,
    },
    Tmpfile {
        args: abi::CreateIn,
    },
    Read(abi::ReadIn),
    Write {
        args: abi::WriteIn,
        data: &'a [u8],
    },
    Statfs,
    Release(abi::ReleaseIn),
    Fsync(abi::FsyncIn),
    Setxattr {
        args: abi::SetxattrIn,
        name: &'a CStr,
        value: &'a [u8],
    },
    Getxattr {
        size: u32,
        name: &'a CStr,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a CStr,
    },
    Flush(abi::FlushIn),
    Init {
        args: abi::InitIn,
        flags2: u32,
    },
    Opendir(abi::OpenIn),
    Readdir(abi::ReadIn),
    Readdirplus(abi::ReadIn),
    Releasedir(abi::ReleaseIn),
    Fsyncdir(abi::FsyncIn),
    Access(abi::AccessIn),
    Interrupt(abi::InterruptIn),
    Destroy,
    Ioctl {
        args: abi::IoctlIn,
        data: &'a [u8],
    },
    Fallocate(abi::FallocateIn),
    Lseek(abi::LseekIn),
    CopyFileRange {
        args: abi::CopyFileRangeIn,
        wide: bool,
    },
    Syncfs,
    /// Locks, bmap, poll, DAX mappings, and opcodes that are newer than this crate.
    Unknown,
}

/// The nodes of a BATCH_FORGET.
#[derive(Clone, Copy, Debug)]
pub struct Forgets<'a>(&'a [u8]);

impl Iterator for Forgets<'_> {
    type Item = abi::ForgetOne;
    fn next(&mut self) -> Option<abi::ForgetOne> {
        let (one, rest) = abi::ForgetOne::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(one)
    }
}

/// The rest of a request; fields are taken from its front.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take<T: FromBytes>(&mut self) -> Result<T, DecodeError> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| DecodeError)?;
        self.0 = rest;
        Ok(value)
    }

    fn name(&mut self) -> Result<&'a CStr, DecodeError> {
        let name = CStr::from_bytes_until_nul(self.0).map_err(|_| DecodeError)?;
        self.0 = &self.0[name.count_bytes() + 1..];
        Ok(name)
    }

    fn bytes(&mut self, len: u32) -> Result<&'a [u8], DecodeError> {
        let (bytes, rest) = self.0.split_at_checked(len as usize).ok_or(DecodeError)?;
        self.0 = rest;
        Ok(bytes)
    }
}

/// Decodes the header of a request, if it is complete.
pub fn header(bytes: &[u8]) -> Result<abi::InHeader, DecodeError> {
    abi::InHeader::read_from_prefix(bytes).map(|(header, _)| header).map_err(|_| DecodeError)
}

impl<'a> Request<'a> {
    /// Returns the kernel's number of the request, which is the same when the request is sent
    /// again. Numbers grow in the order in which requests are queued.
    pub fn number(&self) -> u64 {
        self.header.unique & !abi::UNIQUE_RESEND
    }

    /// Returns whether the request is sent again, because an earlier daemon has read it and not
    /// answered it. It may have been done already.
    pub fn is_resent(&self) -> bool {
        self.header.unique & abi::UNIQUE_RESEND != 0
    }

    /// Decodes bytes from the device; `capabilities` are those negotiated (see [`abi::init`]).
    pub fn decode(bytes: &'a [u8], capabilities: u64) -> Result<Request<'a>, DecodeError> {
        let header = header(bytes)?;
        let body = bytes.get(size_of::<abi::InHeader>()..header.len as usize).ok_or(DecodeError)?;
        let extensions_len = usize::from(header.total_extlen) * 8;
        let (body, extensions) = body.split_at_checked(body.len().wrapping_sub(extensions_len)).ok_or(DecodeError)?;
        let supplementary_group = supplementary_group(extensions)?;
        let operation = decode_operation(header.opcode, Cursor(body), capabilities)?;
        Ok(Request { header, operation, supplementary_group })
    }
}

fn decode_operation(code: u32, mut rest: Cursor<'_>, capabilities: u64) -> Result<Operation<'_>, DecodeError> {
    Ok(match code {
        opcode::LOOKUP => Operation::Lookup { name: rest.name()? },
        opcode::FORGET => Operation::Forget { lookups: rest.take::<abi::ForgetIn>()?.nlookup },
        opcode::BATCH_FORGET => {
            let args: abi::BatchForgetIn = rest.take()?;
            let len = args.count.checked_mul(size_of::<abi::ForgetOne>() as u32).ok_or(DecodeError)?;
            Operation::BatchForget { nodes: Forgets(rest.bytes(len)?) }
        }
        opcode::GETATTR => Operation::Getattr(rest.take()?),
        opcode::SETATTR => Operation::Setattr(rest.take()?),
        opcode::STATX => Operation::Statx(rest.take()?),
        opcode::READLINK => Operation::Readlink,
        opcode::SYMLINK => Operation::Symlink { name: rest.name()?, target: rest.name()? },
        opcode::MKNOD => Operation::Mknod { args: rest.take()?, name: rest.name()? },
        opcode::MKDIR => Operation::Mkdir { args: rest.take()?, name: rest.name()? },
        opcode::UNLINK => Operation::Unlink { name: rest.name()? },
        opcode::RMDIR => Operation::Rmdir { name: rest.name()? },
        opcode::RENAME => {
            let args: abi::RenameIn = rest.take()?;
            Operation::Rename { new_parent: args.newdir, flags: 0, name: rest.name()?, new_name: rest.name()? }
        }
        opcode::RENAME2 => {
            let args: abi::Rename2In = rest.take()?;
            Operation::Rename { new_parent: args.newdir, flags: args.flags, name: rest.name()?, new_name: rest.name()? }
        }
        opcode::LINK => {
            let args: abi::LinkIn = rest.take()?;
            Operation::Link { node: args.oldnodeid, new_name: rest.name()? }
        }
        opcode::OPEN => Operation::Open(rest.take()?),
        opcode::CREATE => Operation::Create { args: rest.take()?, name: rest.name()? },
        opcode::TMPFILE => Operation::Tmpfile { args: rest.take()? },
        opcode::READ => Operation::Read(rest.take()?),
        opcode::WRITE => {
            let args: abi::WriteIn = rest.take()?;
            Operation::Write { args, data: rest.bytes(args.size)? }
        }
        opcode::STATFS => Operation::Statfs,
        opcode::RELEASE => Operation::Release(rest.take()?),
        opcode::FSYNC => Operation::Fsync(rest.take()?),
        opcode::SETXATTR => {
            let args = if capabilities & abi::init::SETXATTR_EXT != 0 {
                rest.take()?
            } else {
                let [size, flags] = rest.take()?;
                abi::SetxattrIn { size, flags, ..Default::default() }
            };
            let name = rest.name()?;
            Operation::Setxattr { args, name, value: rest.bytes(args.size)? }
        }
        opcode::GETXATTR => Operation::Getxattr { size: rest.take::<abi::GetxattrIn>()?.size, name: rest.name()? },
        opcode::LISTXATTR => Operation::Listxattr { size: rest.take::<abi::GetxattrIn>()?.size },
        opcode::REMOVEXATTR => Operation::Removexattr { name: rest.name()? },
        opcode::FLUSH => Operation::Flush(rest.take()?),
        opcode::INIT => {
            let args: abi::InitIn = rest.take()?;
            // Kernels before 7.36 send no second word of flags.
            let flags2 = rest.take::<abi::InitInExt>().map_or(0, |ext| ext.flags2);
            Operation::Init { args, flags2 }
        }
        opcode::OPENDIR => Operation::Opendir(rest.take()?),
        opcode::READDIR => Operation::Readdir(rest.take()?),
        opcode::READDIRPLUS => Operation::Readdirplus(rest.take()?),
        opcode::RELEASEDIR => Operation::Releasedir(rest.take()?),
        opcode::FSYNCDIR => Operation::Fsyncdir(rest.take()?),
        opcode::ACCESS => Operation::Access(rest.take()?),
        opcode::INTERRUPT => Operation::Interrupt(rest.take()?),
        opcode::DESTROY => Operation::Destroy,
        opcode::IOCTL => {
            let args: abi::IoctlIn = rest.take()?;
            Operation::Ioctl { args, data: rest.bytes(args.in_size)? }
        }
        opcode::FALLOCATE => Operation::Fallocate(rest.take()?),
        opcode::LSEEK => Operation::Lseek(rest.take()?),
        opcode::COPY_FILE_RANGE => Operation::CopyFileRange { args: rest.take()?, wide: false },
        opcode::COPY_FILE_RANGE_64 => Operation::CopyFileRange { args: rest.take()?, wide: true },
        opcode::SYNCFS => Operation::Syncfs,
        _ => Operation::Unknown,
    })
}

/// Finds the group among the extensions. Skips security contexts, which we never negotiate, and
/// newer kinds.
fn supplementary_group(extensions: &[u8]) -> Result<Option<u32>, DecodeError> {
    let mut group = None;
    let mut rest = extensions;
    while !rest.is_empty() {
        let header = abi::ExtHeader::read_from_prefix(rest).map_err(|_| DecodeError)?.0;
        let size = header.size as usize;
        if size < size_of::<abi::ExtHeader>() || size > rest.len() {
            return Err(DecodeError);
        }
        if header.typ == abi::EXT_GROUPS {
            let mut body = Cursor(&rest[size_of::<abi::ExtHeader>()..size]);
            if body.take::<u32>()? > 0 {
                group = Some(body.take::<u32>()?);
            }
        }
        rest = &rest[size.next_multiple_of(8).min(rest.len())..];
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn request(code: u32, body: &[u8], extensions: &[u8]) -> Vec<u8> {
        let len = (size_of::<abi::InHeader>() + body.len() + extensions.len()) as u32;
        let total_extlen = (extensions.len() / 8) as u16;
        let header = abi::InHeader { len, opcode: code, total_extlen, ..Default::default() };
        [header.as_bytes(), body, extensions].concat()
    }

    #[test]
    fn names_need_not_be_utf8() {
        let bytes = request(opcode::LOOKUP, b"a\xff\x80b\0", &[]);
        let Operation::Lookup { name } = Request::decode(&bytes, 0).unwrap().operation else { panic!() };
        assert_eq!(name.to_bytes(), b"a\xff\x80b");
    }

    #[test]
    fn a_group_extension_is_found_behind_the_name() {
        let mut extension = abi::ExtHeader { size: 16, typ: abi::EXT_GROUPS }.as_bytes().to_vec();
        extension.extend_from_slice([1u32, 4711].as_bytes());
        let body = [abi::MkdirIn { mode: 0o755, umask: 0o22 }.as_bytes(), b"odd\0"].concat();
        let bytes = request(opcode::MKDIR, &body, &extension);
        let decoded = Request::decode(&bytes, 0).unwrap();
        assert_eq!(decoded.supplementary_group, Some(4711));
        let Operation::Mkdir { name, .. } = decoded.operation else { panic!() };
        assert_eq!(name, c"odd");
    }

    #[test]
    fn setxattr_is_short_unless_negotiated() {
        let short = [[3u32, 0].as_bytes(), b"user.a\0xyz"].concat();
        let bytes = request(opcode::SETXATTR, &short, &[]);
        let Operation::Setxattr { value, .. } = Request::decode(&bytes, 0).unwrap().operation else { panic!() };
        assert_eq!(value, b"xyz");
        assert!(Request::decode(&bytes, abi::init::SETXATTR_EXT).is_err());
    }

    /// Every opcode, cut off at every length and filled with hostile numbers, is decoded or fails;
    /// it never panics.
    #[test]
    fn no_bytes_panic() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for code in 0..70 {
            for len in 0..160usize {
                for fill in [0u8, 1, 0x41, 0xff] {
                    let mut body = vec![fill; len];
                    for byte in &mut body {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        if state >> 61 == 0 {
                            *byte = (state >> 32) as u8;
                        }
                    }
                    let mut bytes = request(code, &body, &[]);
                    for capabilities in [0, u64::MAX] {
                        if let Ok(Request { operation: Operation::BatchForget { nodes }, .. }) =
                            Request::decode(&bytes, capabilities)
                        {
                            assert!(nodes.count() <= len / 16);
                        }
                    }
                    bytes[36] = fill; // total_extlen
                    let _ = Request::decode(&bytes, 0);
                    bytes[0] = fill; // len
                    let _ = Request::decode(&bytes, 0);
                }
            }
        }
        assert_eq!(Request::decode(&[0; 39], 0).err(), Some(DecodeError));
    }
}
