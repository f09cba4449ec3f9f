//! The guests of a mount of images: virtual machines that send the pages that they evict
//! (`pumapool host-cache host`). The mount listens for them.

use anyhow::{Context, Result};
use hostcache::host;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use wire::address::Address;
use wire::listener::{Error, Listener};

/// Longest time that the predecessor may still listen after a takeover, and the time between two
/// attempts to listen in its place.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(5);
const TAKE_OVER_LOOK: Duration = Duration::from_millis(20);
/// Time between two later attempts of a successor to listen. Seldom enough to cost nothing, and
/// soon enough for an administrator who has just put a key back.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// The guests of a mount, and the listener for them.
pub struct Guests {
    /// Reads the guests' keys.
    config: Box<dyn Fn() -> Result<host::Config> + Send + Sync>,
    listen: Address,
    host: OnceLock<Arc<host::Host>>,
    /// Why no guest can connect, if so.
    problem: Mutex<Option<String>>,
    stopping: AtomicBool,
}

impl Guests {
    /// Guests that connect at this address. `config` reads their keys, again at each attempt to
    /// listen.
    pub fn new(listen: Address, config: impl Fn() -> Result<host::Config> + Send + Sync + 'static) -> Guests {
        Guests {
            config: Box::new(config),
            listen,
            host: OnceLock::new(),
            problem: Mutex::default(),
            stopping: AtomicBool::new(false),
        }
    }

    /// Starts to listen. A successor serves a mount in use even if this fails: it logs the reason,
    /// and tries again.
    ///
    /// # Errors
    /// Fails if listening fails at a first start.
    pub fn listen(self: &Arc<Self>, mount: &Arc<::mount::Mount>, takes_over: bool) -> Result<()> {
        let begun = Instant::now();
        loop {
            let Err(error) = self.try_to_listen(mount) else { return Ok(()) };
            let is_taken = error.downcast_ref().is_some_and(|error| matches!(error, Error::AddressInUse { .. }));
            if !takes_over {
                return Err(error);
            }
            // The predecessor may still listen.
            if !is_taken || begun.elapsed() > TAKE_OVER_LIMIT {
                self.note(&error);
                break;
            }
            std::thread::sleep(TAKE_OVER_LOOK);
        }
        let (guests, mount) = (self.clone(), Arc::downgrade(mount));
        let thread = std::thread::Builder::new().name("puma-guests".into());
        if let Err(error) = thread.spawn(move || guests.keep_trying(&mount)) {
            tracing::error!("cannot start a thread to try again: {error}; `pumapool upgrade` tries again");
        }
        Ok(())
    }

    fn keep_trying(&self, mount: &Weak<::mount::Mount>) {
        loop {
            std::thread::sleep(RETRY_INTERVAL);
            let Some(mount) = mount.upgrade().filter(|_| !self.stopping.load(Ordering::Relaxed)) else { return };
            match self.try_to_listen(&mount) {
                Ok(()) => {
                    *self.problem.lock() = None;
                    return tracing::info!("guests can connect at {}", self.listen);
                }
                Err(error) => self.note(&error),
            }
        }
    }

    fn note(&self, error: &anyhow::Error) {
        let text = format!("guests cannot connect: {error:#}");
        let mut problem = self.problem.lock();
        if problem.as_ref() != Some(&text) {
            tracing::error!("{text}; the images are served without them, and the daemon tries again");
            *problem = Some(text);
        }
    }

    fn try_to_listen(&self, mount: &Arc<::mount::Mount>) -> Result<()> {
        let config = (self.config)()?;
        let listener = Listener::bind(&self.listen)?;
        let (told, tell) = sync_channel(1);
        let mount = mount.clone();
        // Images are opened through the mount itself. The first thread must never do this, because
        // its death tells the supervisor that the daemon dies.
        let serve = move || {
            let host = host::Host::new(mount, config, listener).map(Arc::new);
            let serving = host.as_ref().ok().cloned();
            let _ = told.send(host);
            serving.iter().for_each(|host| host.run());
        };
        std::thread::Builder::new().name("puma-guests".into()).spawn(serve).context("cannot start a thread")?;
        let host = tell.recv().context("the images could not be opened")??;
        let _ = self.host.set(host);
        // If the stop was requested meanwhile, this host did not get it.
        if self.stopping.load(Ordering::SeqCst) {
            self.stop();
        }
        Ok(())
    }

    /// Stops listening. Afterwards no image is in use.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.host.get().into_iter().for_each(|host| host.stop());
    }

    /// The address and each guest, for the status.
    pub fn status(&self) -> report::Guests {
        let list = self.host.get().map(|host| host.status()).unwrap_or_default();
        let address = self.host.get().map_or(&self.listen, |host| host.address());
        report::Guests { listen: address.to_string(), list }
    }

    /// The reason why guests cannot connect, if so.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }
}
