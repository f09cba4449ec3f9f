//! The kernel's requests to the mount.

use super::{Target, number};
use fuse::abi::{self, opcode};
use fuse::{Operation, Request};
use std::ffi::CStr;
use zerocopy::IntoBytes;

pub const REQUESTS: Target = Target {
    name: "fuse_requests",
    about: "the kernel's requests, under any capabilities",
    input_bytes_max: 1024,
    run: requests,
    seeds: request_seeds,
};

/// The first 8 bytes of an input are the capabilities.
fn requests(mut bytes: &[u8]) {
    let capabilities = number(&mut bytes, 8);
    let Ok(request) = Request::decode(bytes, capabilities) else { return };
    assert!(request.header.len as usize <= bytes.len());
    let inside = |part: &[u8]| {
        let (all, part) = (bytes.as_ptr_range(), part.as_ptr_range());
        assert!(all.start <= part.start && part.end <= all.end, "a piece of the request lies outside of it");
    };
    let name = |name: &CStr| inside(name.to_bytes_with_nul());
    match request.operation {
        Operation::BatchForget { nodes } => {
            assert!(nodes.count() <= bytes.len() / size_of::<abi::ForgetOne>());
        }
        Operation::Symlink { name: one, target: other } | Operation::Rename { name: one, new_name: other, .. } => {
            name(one);
            name(other);
        }
        Operation::Lookup { name: one }
        | Operation::Mknod { name: one, .. }
        | Operation::Mkdir { name: one, .. }
        | Operation::Unlink { name: one }
        | Operation::Rmdir { name: one }
        | Operation::Link { new_name: one, .. }
        | Operation::Create { name: one, .. }
        | Operation::Getxattr { name: one, .. }
        | Operation::Removexattr { name: one } => name(one),
        Operation::Setxattr { args, name: one, value } => {
            name(one);
            inside(value);
            assert_eq!(value.len(), args.size as usize);
        }
        Operation::Write { args, data } => {
            inside(data);
            assert_eq!(data.len(), args.size as usize);
        }
        Operation::Ioctl { args, data } => {
            inside(data);
            assert_eq!(data.len(), args.in_size as usize);
        }
        _ => {}
    }
}

/// Every opcode, with a body that is valid for most kinds.
fn request_seeds() -> Vec<Vec<u8>> {
    let mut extension = abi::ExtHeader { size: 16, typ: abi::EXT_GROUPS }.as_bytes().to_vec();
    extension.extend_from_slice([1u32, 4711].as_bytes());
    let write = abi::WriteIn { size: 3, ..Default::default() };
    let forgets = [abi::BatchForgetIn { count: 2, dummy: 0 }.as_bytes(), &[1; 32]].concat();
    let setxattr = [[3u32, 0].as_bytes(), b"user.a\0xyz"].concat();
    let mut seeds = Vec::new();
    for code in 0..=opcode::COPY_FILE_RANGE_64 + 1 {
        let body = match code {
            opcode::WRITE => [write.as_bytes(), b"abc"].concat(),
            opcode::BATCH_FORGET => forgets.clone(),
            opcode::SETXATTR => setxattr.clone(),
            opcode::LOOKUP | opcode::UNLINK | opcode::RMDIR | opcode::REMOVEXATTR => b"name\0".to_vec(),
            opcode::SYMLINK => b"name\0target\0".to_vec(),
            _ => [&[0; 64][..], b"name\0other\0"].concat(),
        };
        let extensions = if code.is_multiple_of(2) { &[][..] } else { &extension };
        let len = (size_of::<abi::InHeader>() + body.len() + extensions.len()) as u32;
        let total_extlen = (extensions.len() / 8) as u16;
        let header = abi::InHeader { len, opcode: code, total_extlen, ..Default::default() };
        let capabilities = if code.is_multiple_of(3) { u64::MAX } else { 0 };
        seeds.push([capabilities.as_bytes(), header.as_bytes(), &body, extensions].concat());
    }
    seeds
}
