//! Which page goes first.
//!
//! Each owner's pages form a list; a policy says where a page stands in it, and which one leaves it. Which *owner* loses
//! a page is not the policy's business but a matter of fairness, see [`super::Store`].

use super::list::List;
use super::record::Record;

/// A way to order the pages of an owner.
pub trait Policy: Send {
    /// The name by which it is chosen.
    fn name(&self) -> &'static str;

    /// A page came that is in no list yet.
    fn inserted(&self, list: &mut List, records: &mut [Record], slot: u32) {
        list.push_newest(records, slot);
    }

    /// A page of the list was returned by a get, and stays.
    fn used(&self, list: &mut List, records: &mut [Record], slot: u32);

    /// The page to give up.
    fn victim(&self, list: &List) -> Option<u32> {
        list.oldest()
    }
}

/// The page that was not asked for since the longest time goes first, as in the kernel's own lists.
pub struct Lru;

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn used(&self, list: &mut List, records: &mut [Record], slot: u32) {
        list.unlink(records, slot);
        list.push_newest(records, slot);
    }
}

/// The page that came first goes first. Gets change nothing.
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn used(&self, _list: &mut List, _records: &mut [Record], _slot: u32) {}
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyName {
    /// [`Lru`].
    #[default]
    Lru,
    /// [`Fifo`].
    Fifo,
}

impl PolicyName {
    /// The policy of this name.
    pub fn policy(self) -> Box<dyn Policy> {
        match self {
            PolicyName::Lru => Box::new(Lru),
            PolicyName::Fifo => Box::new(Fifo),
        }
    }
}

impl std::str::FromStr for PolicyName {
    type Err = String;

    fn from_str(text: &str) -> Result<PolicyName, String> {
        match text {
            "lru" => Ok(PolicyName::Lru),
            "fifo" => Ok(PolicyName::Fifo),
            _ => Err(format!("there is no replacement policy {text:?}; choose lru or fifo")),
        }
    }
}
