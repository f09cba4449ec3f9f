//! The pre-authentication limiter: few connections at once may be without a handshake, and they
//! never keep others out.

use crate::address::Stream;
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The unauthenticated connections of one listener.
pub struct PreAuthenticationLimiter {
    max: usize,
    /// Oldest first.
    all: Mutex<Vec<One>>,
}

struct One {
    stream: Arc<Stream>,
    /// It was shut down, and its thread has not ended yet.
    is_leaving: bool,
}

/// A connection's place at the limiter, until it is dropped.
pub struct UnauthenticatedPlace<'a> {
    limiter: &'a PreAuthenticationLimiter,
    stream: Arc<Stream>,
}

impl PreAuthenticationLimiter {
    /// For so many at once. As many more may be ending.
    pub const fn new(max: usize) -> PreAuthenticationLimiter {
        PreAuthenticationLimiter { max, all: Mutex::new(Vec::new()) }
    }

    /// Accepts a connection. If there are too many then, the oldest is shut down: a peer with a key
    /// ends its handshake in a few milliseconds, and a connection that is only held open makes
    /// room. `None`: too many have not ended yet.
    pub fn enter(&self, stream: &Arc<Stream>) -> Option<UnauthenticatedPlace<'_>> {
        let mut all = self.lock();
        let mut staying: Vec<&mut One> = all.iter_mut().filter(|one| !one.is_leaving).collect();
        if staying.len() >= self.max
            && let Some(oldest) = staying.first_mut()
        {
            oldest.is_leaving = true;
            let _ = oldest.stream.shutdown(Shutdown::Both);
        }
        if all.len() >= 2 * self.max {
            return None;
        }
        all.push(One { stream: Arc::clone(stream), is_leaving: false });
        Some(UnauthenticatedPlace { limiter: self, stream: Arc::clone(stream) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<One>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnauthenticatedPlace<'_> {
    fn drop(&mut self) {
        self.limiter.lock().retain(|one| !Arc::ptr_eq(&one.stream, &self.stream));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_peer_that_holds_all_places_shuts_nobody_out() {
        let limiter = PreAuthenticationLimiter::new(2);
        let pairs: Vec<(Arc<Stream>, UnixStream)> = (0..5)
            .map(|_| {
                let (near, far) = UnixStream::pair().unwrap();
                far.set_nonblocking(true).unwrap();
                (Arc::new(Stream::Unix(near)), far)
            })
            .collect();
        let is_shut_down = |nth: usize| matches!((&pairs[nth].1).read(&mut [0]), Ok(0));
        let enter = |nth: usize| limiter.enter(&pairs[nth].0);
        let (first, _second, third) = (enter(0), enter(1), enter(2));
        assert!(first.is_some() && third.is_some());
        assert!(is_shut_down(0) && !is_shut_down(1) && !is_shut_down(2));
        let fourth = enter(3);
        assert!(fourth.is_some() && is_shut_down(1) && !is_shut_down(2));
        // Two have not ended yet. One more is shut down nevertheless: the next attempt finds room.
        assert!(enter(4).is_none() && is_shut_down(2) && !is_shut_down(3));
        drop(first);
        assert!(enter(4).is_some());
        // A peer that has authenticated itself has left the limiter, and stays.
        drop((third, fourth));
        let _fifth = enter(4);
        assert!(!is_shut_down(3) && !is_shut_down(4));
    }
}
