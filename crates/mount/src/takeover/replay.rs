//! Requests that the kernel sends again, because the daemon that had read them was killed before it
//! answered.
//!
//! Most of them can simply be repeated: reading, looking up, syncing, writing the same bytes to the
//! same place. Others cannot: removing a name twice is an error, and appending bytes twice is
//! wrong. For these the worker records an *intent* in the state memory before the operation, and
//! its result after it. So a repeated request is in one of three states:
//!
//! - never begun: it is applied normally;
//! - *done*: it gets the recorded answer;
//! - *begun*: the daemon died between the two. The state of the backing directory shows whether the
//!   operation was applied, and each operation defines how. The kernel holds the directory (or the
//!   file) locked until it has its answer, so only an external change can have changed it
//!   meanwhile.
//!
//! An intent is cleared when its request is answered, and survives any number of daemons until
//! then.

use crate::takeover::layout::Intent;
use crate::takeover::memory::{IntentSlot, Memory};
use fuse::{Errno, Request};
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

thread_local! {
    static SLOT: RefCell<Option<Rc<IntentSlot>>> = const { RefCell::new(None) };
}

/// Gives this thread a slot for its intents.
pub(crate) fn prepare_thread(memory: &Arc<Memory>) {
    let slot = memory.take_intent();
    if slot.is_none() {
        tracing::warn!(
            "no room for what a worker is about to do: if this daemon is killed now, a program may see an error"
        );
    }
    SLOT.set(slot.map(Rc::new));
}

/// The unanswered operations of previous daemons, by request number.
#[derive(Default)]
pub(crate) struct Replays {
    unanswered: Mutex<HashMap<u64, Unanswered>>,
}

struct Unanswered {
    intent: Intent,
    slots: Vec<IntentSlot>,
}

impl Replays {
    pub(crate) fn new(memory: &Arc<Memory>, intents: Vec<Intent>) -> Replays {
        let mut unanswered: HashMap<u64, Unanswered> = HashMap::new();
        for intent in intents {
            let slot = memory.intent_at(intent.slot);
            let known = unanswered.entry(intent.request).or_insert_with(|| Unanswered { intent, slots: Vec::new() });
            // A successor was killed, too, while it repeated the operation. The intent that is done
            // counts.
            if intent.done.is_some() {
                known.intent = intent;
            }
            known.slots.push(slot);
        }
        Replays { unanswered: Mutex::new(unanswered) }
    }

    /// Begins the handling of a request.
    pub(crate) fn attempt<'a>(&'a self, request: &Request<'_>) -> Attempt<'a> {
        let number = request.number();
        let earlier = match request.is_resent() {
            true => self.unanswered.lock().get(&number).map(|unanswered| unanswered.intent),
            false => None,
        };
        let is_resent = request.is_resent();
        let (opcode, uid) = (request.header.opcode, request.header.uid);
        Attempt { replays: self, number, opcode, uid, earlier, is_resent, slot: RefCell::new(None) }
    }
}

/// The handling of one request.
pub(crate) struct Attempt<'a> {
    replays: &'a Replays,
    number: u64,
    opcode: u32,
    uid: u32,
    earlier: Option<Intent>,
    is_resent: bool,
    /// The slot that this attempt has filled.
    slot: RefCell<Option<Rc<IntentSlot>>>,
}

impl Attempt<'_> {
    /// The kernel's number of the request.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The user of the request.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Whether an earlier attempt may have applied the request.
    pub(crate) fn is_resent(&self) -> bool {
        self.is_resent
    }

    /// The result of an earlier attempt that applied the request: an error, or a value (see
    /// [`Attempt::finish`]).
    pub(crate) fn done(&self) -> Option<Result<u64, Errno>> {
        let (errno, value) = self.earlier?.done?;
        Some(if errno == 0 { Ok(value) } else { Err(Errno::from_raw_os_error(errno)) })
    }

    /// The recorded subject, if an earlier attempt has begun and its progress is unknown.
    pub(crate) fn begun(&self) -> Option<u64> {
        self.earlier.filter(|intent| intent.done.is_none()).map(|intent| intent.subject)
    }

    /// Records that the request is about to be applied. `subject` shows later whether it was.
    pub(crate) fn begin(&self, subject: u64) {
        let slot = SLOT.with_borrow(Clone::clone);
        if let Some(slot) = &slot {
            // The first subject counts, because it was recorded before any change.
            slot.begin(self.number, self.opcode, self.begun().unwrap_or(subject));
        }
        *self.slot.borrow_mut() = slot;
    }

    /// Records the result; `value` is the part of a successful result that the answer needs.
    pub(crate) fn finish<T>(&self, result: Result<T, Errno>, value: impl FnOnce(&T) -> u64) -> Result<T, Errno> {
        if let Some(slot) = &*self.slot.borrow() {
            match &result {
                Ok(done) => slot.done(0, value(done)),
                Err(errno) => slot.done(errno.raw_os_error(), 0),
            }
        }
        result
    }

    /// Clears the intent: the request was answered, and is not sent again.
    pub(crate) fn answered(self) {
        if let Some(slot) = self.slot.take() {
            slot.clear();
        }
        if self.earlier.is_some()
            && let Some(unanswered) = self.replays.unanswered.lock().remove(&self.number)
        {
            unanswered.slots.iter().for_each(IntentSlot::clear);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fuse::abi;
    use zerocopy::IntoBytes;

    fn request(unique: u64) -> Vec<u8> {
        let len = size_of::<abi::InHeader>() as u32;
        abi::InHeader { len, opcode: abi::opcode::STATFS, unique, ..Default::default() }.as_bytes().to_vec()
    }

    #[test]
    fn an_intent_lasts_until_its_request_is_answered() {
        let memory = Arc::new(Memory::create().unwrap());
        memory.begin(&crate::takeover::memory::Header {
            minor: 0,
            capabilities: 0,
            write_back: false,
            root: true,
            own_device: 0,
            source: "/".as_ref(),
            mountpoint: "/".as_ref(),
        });
        let successor = || Memory::take_over(rustix::io::dup(memory.fd()).unwrap()).unwrap();
        let (plain, again) = (request(8), request(8 | abi::UNIQUE_RESEND));
        let replays = Replays::default();
        prepare_thread(&memory);
        let attempt = replays.attempt(&Request::decode(&plain, 0).unwrap());
        assert!(!attempt.is_resent() && attempt.done().is_none() && attempt.begun().is_none());
        attempt.begin(77);

        // Killed here; the successor begins it again, and is killed, too.
        let (second, state) = successor();
        let second = Arc::new(second);
        let replays = Replays::new(&second, state.intents);
        prepare_thread(&second);
        let attempt = replays.attempt(&Request::decode(&again, 0).unwrap());
        assert_eq!((attempt.begun(), attempt.done()), (Some(77), None));
        attempt.begin(1);
        attempt.finish(Ok(()), |()| 5).unwrap();

        let (third, state) = successor();
        assert_eq!(state.intents.len(), 2);
        let third = Arc::new(third);
        let replays = Replays::new(&third, state.intents);
        let attempt = replays.attempt(&Request::decode(&again, 0).unwrap());
        assert_eq!(attempt.done(), Some(Ok(5)));
        attempt.answered();
        assert_eq!(successor().1.intents, []);
    }
}
