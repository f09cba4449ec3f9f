//! A mount's part in its pool: the key, the lenders, and gossip.
//!
//! At a first start, a missing part ends the command with one line. A successor serves a mount that
//! is in use. Without the key or gossip it serves from the backing directory, reports the reason
//! once in the log and always in the status, and tries again every [`RETRY_INTERVAL`].
//!
//! A mount must never end or wait because of its pool.

use crate::cli;
use crate::daemon::{lenders::Lenders, pool, security};
use ::discovery::Gossip;
use anyhow::Result;
use borrower::{Borrower, LenderAddress};
use parking_lot::Mutex;
use rustix::rand::{GetRandomFlags, getrandom};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use wire::address::Address;
use wire::key::{KEY_BYTES, PoolKey};
use wire::secure::Security;

/// Time between two attempts of a successor. Seldom enough to cost nothing, and soon enough for an
/// administrator who has just put a key back.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// A mount's part in its pool.
pub struct Membership {
    /// The lenders that were named.
    named: Vec<Address>,
    pool: cli::pool::Options,
    security: cli::security::Options,
    /// The lender of this node.
    except: Option<Address>,
    takes_over: bool,
    /// The security of its connections. Without the key this is a random key, so that no lender can
    /// be used.
    begins_with: Security,
    /// Whether the pool's key could be read, or none is needed.
    has_key: OnceLock<()>,
    gossip: OnceLock<Arc<Gossip>>,
    /// Why the pool, or a part of it, is not used.
    problem: Mutex<Option<String>>,
}

impl Membership {
    /// Reads the key and begins to gossip.
    ///
    /// # Errors
    /// Fails if this fails at a first start; a successor tries again ([`Membership::follow`]). Also
    /// fails if the kernel has no random bytes.
    pub fn begin(
        named: &[Address],
        pool: &cli::pool::Options,
        mut security: cli::security::Options,
        except: Option<Address>,
        takes_over: bool,
    ) -> Result<Membership> {
        // The daemon leaves its folder; neither the addresses nor the key's file must.
        let absolute = |address: &Address| match address.clone().absolute() {
            Err(error) if !takes_over => Err(error),
            found => Ok(found.unwrap_or_else(|_| address.clone())),
        };
        let named: Vec<Address> = named.iter().map(absolute).collect::<Result<_, _>>()?;
        let absolute = security::make_absolute(&mut security);
        if !takes_over {
            absolute?;
        }
        let mut nobodys = [0; KEY_BYTES];
        getrandom(&mut nobodys, GetRandomFlags::empty())?;
        let begins_with = Security::Keyed(PoolKey::new(nobodys));
        let mut membership = Membership {
            named,
            pool: pool.clone(),
            security,
            except,
            takes_over,
            begins_with,
            has_key: OnceLock::new(),
            gossip: OnceLock::new(),
            problem: Mutex::default(),
        };
        match membership.key() {
            Ok(found) => {
                membership.join(found.clone()).or_else(|error| membership.note(error))?;
                membership.begins_with = found;
                let _ = membership.has_key.set(());
            }
            Err(error) => membership.note(error)?,
        }
        Ok(membership)
    }

    /// The security with which a borrower's connections begin ([`Borrower::set_security`] follows).
    pub fn security(&self) -> Security {
        self.begins_with.clone()
    }

    /// The lenders that a borrower begins with.
    pub fn lenders(&self) -> Vec<LenderAddress> {
        if self.has_key.get().is_some() { Lenders::at_first(&self.named) } else { Vec::new() }
    }

    /// Whether there are to be lenders, now or later.
    pub fn expects_lenders(&self) -> bool {
        !self.named.is_empty() || self.pool.is_wanted()
    }

    /// Whether there is anything to be kept secret from anybody, and how: for the status.
    pub fn security_name(&self) -> Option<&'static str> {
        self.expects_lenders().then(|| security::name(&self.begins_with))
    }

    /// Gossip, if there is some.
    pub fn gossip(&self) -> Option<&Arc<Gossip>> {
        self.gossip.get()
    }

    /// Why the pool, or a part of it, is not used.
    pub fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// Starts to send all changes to the borrower, which began with [`Membership::lenders`], and
    /// repeats the failed steps.
    pub fn follow(self: &Arc<Self>, borrower: &Arc<Borrower>) {
        let lenders = self.has_key.get().map(|()| self.follow_lenders(borrower));
        if self.problem.lock().is_none() {
            return;
        }
        let (membership, borrower) = (self.clone(), Arc::downgrade(borrower));
        let thread = std::thread::Builder::new().name("puma-pool".into());
        if let Err(error) = thread.spawn(move || membership.keep_trying(&borrower, lenders)) {
            tracing::error!("cannot start a thread to try the pool again: {error}; `pumapool upgrade` tries it, too");
        }
    }

    fn follow_lenders(&self, borrower: &Arc<Borrower>) -> Arc<Lenders> {
        let lenders = Lenders::follow(borrower, &self.named);
        self.gossip.get().into_iter().for_each(|gossip| pool::follow(gossip, &lenders, self.except.clone()));
        lenders
    }

    fn keep_trying(&self, borrower: &Weak<Borrower>, mut lenders: Option<Arc<Lenders>>) {
        loop {
            std::thread::sleep(RETRY_INTERVAL);
            let Some(borrower) = borrower.upgrade() else { return };
            match self.try_again(&borrower, &mut lenders) {
                Ok(()) => {
                    *self.problem.lock() = None;
                    return tracing::info!("the pool is used again");
                }
                Err(error) => drop(self.note(error)),
            }
        }
    }

    fn try_again(&self, borrower: &Arc<Borrower>, lenders: &mut Option<Arc<Lenders>>) -> Result<()> {
        let key = self.key()?;
        if self.has_key.get().is_none() {
            borrower.set_security(key.clone());
            let _ = self.has_key.set(());
        }
        let joined = self.join(key);
        if lenders.is_none() {
            borrower.set_lenders(&self.lenders());
            *lenders = Some(self.follow_lenders(borrower));
        } else if let (Ok(()), Some(gossip), Some(lenders)) = (&joined, self.gossip.get(), lenders.as_ref()) {
            pool::follow(gossip, lenders, self.except.clone());
        }
        joined
    }

    fn key(&self) -> Result<Security> {
        let networks: Vec<_> = self.named.iter().cloned().chain(self.pool.network()).collect();
        security::of(&self.security, &networks)
    }

    /// Begins to gossip, if this is requested and not done yet.
    fn join(&self, security: Security) -> Result<()> {
        if self.gossip.get().is_none()
            && let Some(gossip) = pool::join(&self.pool, security)?
        {
            let _ = self.gossip.set(gossip);
        }
        Ok(())
    }

    /// At a first start the caller reports the error. Later, a new error is logged.
    fn note(&self, error: anyhow::Error) -> Result<()> {
        if !self.takes_over {
            return Err(error);
        }
        let text = format!("{error:#}");
        let mut problem = self.problem.lock();
        if problem.as_ref() != Some(&text) {
            tracing::error!("{text}; the mount is served without it, and the daemon tries again");
            *problem = Some(text);
        }
        Ok(())
    }
}
