//! Our own byzantine lender. It uses the real protocol, through the `wire` crate, so that it gets
//! as far as a real lender; then it lies: see [`lies`].
//!
//! It forges as well as any peer without the key of a borrower's checksums ([`page::ChecksumKey`]).
//!
//! Must never happen here: harm to any process except the borrower that connects. Threads,
//! memory and time are bounded.

mod lies;
mod replay_store;

pub use lies::MOODS;
use lies::{Answer, Byzantine};
use replay_store::ReplayStore;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use wire::Header;
use wire::address::{Address, Stream};
use zerocopy::{FromZeros, IntoBytes};

/// Connections at once, each with a thread.
const CONNECTIONS_MAX: usize = 64;

/// Pause between two bytes of an answer that is sent byte by byte.
const TRICKLE: Duration = Duration::from_millis(20);

/// Serves lies at `listen` until it is killed. Prints READY and the address.
pub fn run(listen: &Address, seed: u64) -> Result<(), String> {
    let replay_store = Arc::new(Mutex::new(ReplayStore::default()));
    let connections = Arc::new(AtomicUsize::new(0));
    let mut number = 0;
    let mut serve = |stream: Stream| {
        number += 1;
        if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
            connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let (replay_store, connections, byzantine) =
            (Arc::clone(&replay_store), Arc::clone(&connections), Byzantine::new(seed, number));
        std::thread::spawn(move || {
            // Any end of the connection is fine.
            let _ = serve(&stream, &replay_store, byzantine);
            let _ = stream.shutdown(Shutdown::Both);
            connections.fetch_sub(1, Ordering::Relaxed);
        });
    };
    let failed = |error: io::Error| format!("listening on {listen}: {error}");
    match listen {
        Address::Tcp { host, port } => {
            let listener = TcpListener::bind((host.as_str(), *port)).map_err(failed)?;
            ready(&Address::from(listener.local_addr().map_err(failed)?).to_string());
            loop {
                serve(Stream::Tcp(listener.accept().map_err(failed)?.0));
            }
        }
        Address::Unix(path) => {
            let listener = UnixListener::bind(path).map_err(failed)?;
            ready(&listen.to_string());
            loop {
                serve(Stream::Unix(listener.accept().map_err(failed)?.0));
            }
        }
        Address::Vsock { .. } => Err(failed(io::ErrorKind::Unsupported.into())),
    }
}

fn ready(address: &str) {
    let mut out = io::stdout().lock();
    // It continues even if nobody reads its output.
    let _ = writeln!(out, "READY lying on {address}").and_then(|()| out.flush());
}

/// Serves one connection, from its Hello to its end.
fn serve(stream: &Stream, replay_store: &Mutex<ReplayStore>, mut byzantine: Byzantine) -> io::Result<()> {
    stream.tune()?;
    loop {
        let mut header = Header::new_zeroed();
        (&*stream).read_exact(header.as_mut_bytes())?;
        let kind = header.validate().map_err(io::Error::other)?;
        let mut body = vec![0; header.body_bytes.get() as usize];
        (&*stream).read_exact(&mut body)?;
        let answers = {
            let mut replay_store = replay_store.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            byzantine.answer(&mut replay_store, kind, &header, &body)
        };
        for answer in answers {
            match answer {
                Answer::Bytes(bytes) => (&*stream).write_all(&bytes)?,
                Answer::Trickle(bytes) => {
                    for byte in bytes {
                        (&*stream).write_all(&[byte])?;
                        std::thread::sleep(TRICKLE);
                    }
                }
                Answer::Wait(time) => std::thread::sleep(time),
                Answer::Close => return Ok(()),
            }
        }
    }
}
