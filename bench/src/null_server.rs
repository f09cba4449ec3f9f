//! The floors of a hit, in a process of their own, like the mount's daemon and the lender: a FUSE
//! server that only answers, and a TCP server likewise.
//!
//! The mount is made with the crate `fuse`, with as many workers, as large buffers, and the same
//! read-ahead window as a real mount. It has one file whose READs are answered with a constant
//! page. Only the number at the beginning of each page is filled in, so that the worker can check
//! its reads as usual.

use crate::world::{FILE, STAMP_BYTES};
use fuse::abi::{self, fopen, init};
use fuse::mounting::{self, Options};
use fuse::{Errno, Filesystem, Operation, Reply, Request, Session, Wish};
use page::PAGE_SIZE;
use rustix::mount::MountFlags;
use rustix::net::RecvFlags;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::{scope, spawn};
use testbed::{Failure, Process};

/// The subcommand; its arguments are the mountpoint and the length of the file in bytes.
pub const NAME: &str = "null-server";
/// Workers, as many as `pumapool mount` has by default.
const WORKERS: usize = 8;
/// As in the crate `mount`.
const READAHEAD_BYTES_MAX: u32 = 1 << 20;
const BACKGROUND_MAX: u16 = 64;
/// Time for which the kernel may cache all answers.
const VALID_SECONDS: u64 = 3600;
/// The file; 1 is the root.
const FILE_NODE: u64 = 2;
/// The filling byte of the constant page.
const FILLING: u8 = 0x5a;
/// Bytes that are sent at once if the client requests a stream.
const STREAM_BYTES: usize = 256 << 10;

/// The process, for the bench; its mount and its connections end with it.
pub struct NullServer<'a> {
    // Drop order: without the mount the process ends by itself.
    mounted: Mounted<'a>,
    _process: Process,
    /// The address of its TCP server.
    pub address: String,
}

struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _gone_already = mounting::unmount(self.0, true);
    }
}

impl<'a> NullServer<'a> {
    /// For a process that has printed READY.
    pub fn new(process: Process, at: &'a Path, address: String) -> NullServer<'a> {
        NullServer { mounted: Mounted(at), _process: process, address }
    }

    /// Its file.
    pub fn file(&self) -> std::path::PathBuf {
        self.mounted.0.join(FILE)
    }
}

/// Runs the process: prints READY and the address of its TCP server, and serves until the mount is
/// gone.
pub fn run(at: &Path, len_bytes: u64) -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let options = Options {
        fsname: "null".to_owned(),
        subtype: "puma-bench".to_owned(),
        allow_other: false,
        flags: MountFlags::empty(),
    };
    let device = mounting::mount(at, &options).map_err(Failure::attempted(format!("mounting {}", at.display())))?;
    let mounted = Mounted(at);
    let wish = Wish {
        capabilities: init::ASYNC_READ | init::BIG_WRITES | init::PARALLEL_DIROPS,
        readahead_bytes_max: READAHEAD_BYTES_MAX,
        background_max: BACKGROUND_MAX,
        time_granularity_ns: 1,
    };
    let session = Session::negotiate(device, wish)?;
    let null = Null { len_bytes };
    let mut workers = (0..WORKERS).map(|_| session.worker()).collect::<io::Result<Vec<_>>>()?;
    scope(|scope| {
        for worker in &mut workers {
            scope.spawn(|| worker.serve(&null));
        }
        widen_readahead(at)?;
        println!("READY {}", listener.local_addr()?);
        spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that disconnects ends its thread.
                spawn(move || drop(answer(stream)));
            }
        });
        Ok(())
    })
    .inspect_err(|_: &Failure| drop(mounted))
}

/// As the crate `mount` does: otherwise a large random read would come in pieces of 128 KiB.
fn widen_readahead(at: &Path) -> Result<(), Failure> {
    let device = std::fs::metadata(at)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    std::fs::write(&knob, (READAHEAD_BYTES_MAX / 1024).to_string())
        .map_err(Failure::attempted(format!("writing {knob}")))
}

struct Null {
    len_bytes: u64,
}

impl Null {
    fn attr(&self, node: u64) -> abi::Attr {
        let (mode, size) = if node == FILE_NODE { (0o100_644, self.len_bytes) } else { (0o40_755, 0) };
        abi::Attr {
            ino: node,
            size,
            blocks: size / 512,
            mode,
            nlink: 1,
            blksize: PAGE_SIZE as u32,
            ..abi::Attr::default()
        }
    }

    fn read(&self, args: &abi::ReadIn, reply: Reply<'_>, scratch: &mut [u8]) -> Result<(), Errno> {
        let len = self.len_bytes.saturating_sub(args.offset).min(args.size.into()) as usize;
        let Some(answer) = scratch.get_mut(..len) else { return reply.error(Errno::INVAL) };
        for (page, content) in (args.offset / PAGE_SIZE as u64..).zip(answer.chunks_mut(PAGE_SIZE)) {
            // The content of the worker's buffer is constant once it was filled.
            if content[content.len() - 1] != FILLING {
                content.fill(FILLING);
            }
            content[..STAMP_BYTES].copy_from_slice(&page.to_le_bytes());
        }
        reply.data(answer)
    }
}

impl Filesystem for Null {
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]) {
        let node = request.header.nodeid;
        // If the kernel no longer takes an answer, nobody waits for it.
        let _taken = match &request.operation {
            Operation::Read(args) if node == FILE_NODE => self.read(args, reply, scratch),
            Operation::Lookup { name } if OsStr::from_bytes(name.to_bytes()) == FILE => reply.value(&abi::EntryOut {
                nodeid: FILE_NODE,
                entry_valid: VALID_SECONDS,
                attr_valid: VALID_SECONDS,
                attr: self.attr(FILE_NODE),
                ..abi::EntryOut::default()
            }),
            Operation::Lookup { .. } => reply.error(Errno::NOENT),
            Operation::Getattr(_) => reply.value(&abi::AttrOut {
                attr_valid: VALID_SECONDS,
                attr: self.attr(node),
                ..abi::AttrOut::default()
            }),
            Operation::Open(_) | Operation::Opendir(_) => {
                reply.value(&abi::OpenOut { open_flags: fopen::KEEP_CACHE, ..abi::OpenOut::default() })
            }
            Operation::Flush(_) | Operation::Fsync(_) | Operation::Release(_) | Operation::Releasedir(_) => reply.ok(),
            Operation::Forget { .. } | Operation::BatchForget { .. } | Operation::Interrupt(_) => {
                reply.none();
                Ok(())
            }
            _ => reply.error(Errno::NOSYS),
        };
    }
}

/// Serves one client. It sends the length of its requests, the length of the responses, and whether
/// to poll for requests (1), 4 bytes each. Requests without length are not waited for.
fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut words = [[0; 4]; 3];
    stream.read_exact(words.as_flattened_mut())?;
    let [request_bytes, answer_bytes, polls] = words.map(|bytes| u32::from_le_bytes(bytes) as usize);
    if request_bytes.max(answer_bytes) > STREAM_BYTES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (mut request, answer) = (vec![0; request_bytes], vec![FILLING; answer_bytes]);
    loop {
        receive(&mut stream, &mut request, polls != 0)?;
        stream.write_all(&answer)?;
    }
}

/// Receives as many bytes as there is room for. A thread that polls yields the processor at each
/// check, as the crate `locks` does.
pub fn receive(stream: &mut TcpStream, bytes: &mut [u8], polls: bool) -> io::Result<()> {
    if !polls {
        return stream.read_exact(bytes);
    }
    let mut received = 0;
    while received < bytes.len() {
        match rustix::net::recv(&*stream, &mut bytes[received..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((more, _)) => received += more,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => std::thread::yield_now(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Connects a client to that TCP server, with its parameters. If requests have no length, it is a
/// stream.
pub fn connect(address: &str, request_bytes: usize, answer_bytes: usize, polls: bool) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let words = [request_bytes as u32, answer_bytes as u32, polls.into()].map(u32::to_le_bytes);
    stream.write_all(words.as_flattened())?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tcp_server_answers_and_streams() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        spawn(move || listener.incoming().flatten().for_each(|stream| drop(spawn(move || drop(answer(stream))))));
        for polls in [false, true] {
            let mut asker = connect(&address, 32, 4096, polls).unwrap();
            for _ in 0..3 {
                let mut page = [0; 4096];
                asker.write_all(&[1; 32]).unwrap();
                receive(&mut asker, &mut page, polls).unwrap();
                assert_eq!(page, [FILLING; 4096]);
            }
        }
        let mut listening = connect(&address, 0, STREAM_BYTES, false).unwrap();
        listening.read_exact(&mut vec![0; 3 * STREAM_BYTES]).unwrap();
    }
}
