//! The rules of docs/design/consistency.md that this crate keeps, each with a switch that breaks
//! it.
//!
//! A rule whose removal no test detects is not tested. So builds with debug assertions, and only
//! those, can break one rule in the current thread. The simulation shows that it detects each
//! broken rule. In every other build [`keeps`] is a constant, and the compiler removes the
//! switches.

macro_rules! rules {
    ($($name:ident = $number:literal: $meaning:literal,)*) => {
        /// A rule, numbered as in docs/design/consistency.md.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Rule { $(#[doc = $meaning] $name = $number,)* }

        impl Rule {
            /// All rules.
            pub const ALL: &[Rule] = &[$(Rule::$name,)*];

            /// The text of the rule.
            pub fn meaning(self) -> &'static str {
                match self { $(Rule::$name => $meaning,)* }
            }
        }
    };
}

rules! {
    Checksum = 1: "bytes from a lender are used only if their checksum over bytes, identity and version verifies",
    Version = 2: "a version is never given out twice",
    Invalidate = 3: "a change makes its pages absent before it is applied",
    Active = 4: "while a change is active, the borrower ignores events of its pages",
    Taint = 5: "after a buffered write, the borrower ignores events from before the position read at its end, before its answer",
    Quarantine = 7: "after any other change, the borrower ignores events of its pages until a READ of the page arrives",
    Failure = 8: "a change that failed, or did something else than announced, counts as any other change",
    Clear = 9: "a READ clears the quarantine at its arrival, and taints with the position at its arrival",
    Wait = 10: "a READ waits for active changes of its pages",
    Repeat = 11: "a READ is repeated if a change of its pages began or ended in between",
    Older = 12: "a buffered write clears only quarantines older than its beginning",
    Whole = 13: "a buffered write clears quarantines only of pages that it covers whole",
    End = 14: "a change that moves the end of the file covers everything from the page of the lower end",
    Gap = 15: "a write that begins behind an unaligned end quarantines the gap",
    Size = 16: "an answer ends at the file's size",
    Stamp = 17: "a file whose stamp is not the recorded one was changed externally: all is invalidated and quarantined",
    Drop = 19: "after an external change, no open keeps the kernel's cache until it has been dropped",
    Overtaken = 20: "a buffered write that a READ has overtaken, or may have, counts as any other change, and its pages are dropped",
    Key = 21: "a file is identified by a key that repeats only after four thousand million files",
    Busy = 22: "the answer to a put makes the page present only if its entry still names that version",
    Cleared = 23: "a quarantine is not cleared by a READ that arrived before it began",
    Merge = 24: "merged ranges keep their hull, and the newest number or position",
    TakenOver = 25: "a new daemon uses no cached copy that it cannot prove",
    Tap = 27: "an event comes only from a clean, up-to-date page that reclaim has frozen (the tap's rule; here that of its model)",
    Order = 28: "a write(2) that begins after a buffered write of the same pages with a higher number counts as overtaken",
    Edge = 30: "the borrower ignores events of a page at the edge of a punched hole until the kernel has finished with it",
    Demoted = 31: "a page that a guest has evicted is used only if it has the hash of the backing file's page",
    Settled = 32: "data that is read under a provisional stamp is not lent, and is dropped at the next open",
    Zeroed = 33: "a page that writeback may have zeroed behind the end is quarantined, and dropped",
    Copied = 34: "the backing file system copies only whole pages, and to no file that a mapping may store to",
}

#[cfg(debug_assertions)]
std::thread_local! {
    static BROKEN: std::cell::Cell<Option<Rule>> = const { std::cell::Cell::new(None) };
}

/// Breaks this rule in the current thread from now on; None breaks no rule.
#[cfg(debug_assertions)]
pub fn break_rule(rule: Option<Rule>) {
    BROKEN.set(rule);
}

/// Returns whether the rule is kept. Only a test that breaks the rule gets false.
#[cfg(debug_assertions)]
pub fn keeps(rule: Rule) -> bool {
    BROKEN.get() != Some(rule)
}

/// Returns whether the rule is kept: always, in a build without debug assertions.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub const fn keeps(_rule: Rule) -> bool {
    true
}
