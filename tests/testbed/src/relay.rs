//! A relay before a server: it forwards TCP connections, with an adjustable delay.
//!
//! It delays bytes and limits nothing: bytes that were sent together arrive together, later. It
//! ends with its guard, and its connections with it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// Pieces of a connection that may be in transit in each direction, of at most [`PIECE_BYTES`].
const PIECES_MAX: usize = 256;
const PIECE_BYTES: usize = 64 << 10;

#[derive(Default)]
struct Shared {
    delay_us: AtomicU64,
    stopping: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

/// The relay.
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Relay {
    /// Listens on loopback, and forwards to `target`, without delay at first.
    ///
    /// # Errors
    /// Fails if it cannot listen.
    pub fn start(target: SocketAddr) -> io::Result<Relay> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let (address, shared) = (listener.local_addr()?, Arc::<Shared>::default());
        let accepting = {
            let shared = shared.clone();
            spawn(move || {
                for near in listener.incoming().flatten() {
                    if shared.stopping.load(Ordering::Acquire) {
                        break;
                    }
                    // The target does not listen: the connection ends.
                    let _ = TcpStream::connect(target).and_then(|far| join(&shared, near, far));
                }
            })
        };
        Ok(Relay { address, shared, accepting: Some(accepting) })
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the delay of bytes in each direction.
    pub fn delay(&self, delay: Duration) {
        self.shared.delay_us.store(delay.as_micros() as u64, Ordering::Release);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        self.accepting.take().map(JoinHandle::join);
        self.cut();
    }
}

fn join(shared: &Arc<Shared>, near: TcpStream, far: TcpStream) -> io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let ends = [near.try_clone()?, far.try_clone()?];
    shared.streams.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).extend(ends);
    pump(shared.clone(), near.try_clone()?, far.try_clone()?);
    pump(shared.clone(), far, near);
    Ok(())
}

fn pump(shared: Arc<Shared>, mut from: TcpStream, to: TcpStream) {
    let (sender, receiver) = sync_channel(PIECES_MAX);
    spawn(move || deliver(&receiver, to));
    spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(bytes @ 1..) = from.read(&mut piece) {
            let due = Instant::now() + Duration::from_micros(shared.delay_us.load(Ordering::Acquire));
            if sender.send((due, piece[..bytes].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn deliver(receiver: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
    for (due, piece) in receiver {
        sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_whole_and_late() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::start(listener.local_addr().unwrap()).unwrap();
        let mut near = TcpStream::connect(relay.address()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let bytes: Vec<u8> = (0..300_000u32).map(|at| (at >> 3) as u8).collect();
        for delay_ms in [0, 20] {
            relay.delay(Duration::from_millis(delay_ms));
            let begun = Instant::now();
            let sent = bytes.clone();
            let mut writer = near.try_clone().unwrap();
            let sending = spawn(move || writer.write_all(&sent).unwrap());
            let mut received = vec![0; bytes.len()];
            far.read_exact(&mut received).unwrap();
            sending.join().unwrap();
            assert!(received == bytes && begun.elapsed() >= Duration::from_millis(delay_ms));
        }
        relay.cut();
        assert!(matches!(near.read(&mut [0; 8]), Ok(0) | Err(_)));
    }
}
