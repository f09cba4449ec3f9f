//! Applications: what their threads use, and who touches it first.

/// The thread that touches memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Each thread what it will use, and of what all share an equal part.
    Users,
    /// The first thread all, when it reads or makes the input.
    First,
}

/// What happens to a thread's own part between two phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handing {
    /// It stays the thread's.
    Kept,
    /// A thread some nodes away goes on with it, as it is.
    Passed,
    /// It is freed, and such a thread is given it for something new.
    Freed,
}

/// A class of applications, after what they do with memory.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// As it is called.
    pub name: &'static str,
    /// The thread that touches first.
    pub touch: Touch,
    /// Share of the accesses that go to what all threads use.
    pub shared: f64,
    /// Between two phases.
    pub handing: Handing,
}

/// Those that the thesis's 29 programs span.
pub const CLASSES: [Class; 6] = [
    Class { name: "thread-local", touch: Touch::Users, shared: 0.0, handing: Handing::Kept },
    Class { name: "one allocator", touch: Touch::First, shared: 0.0, handing: Handing::Kept },
    Class { name: "all shared", touch: Touch::First, shared: 1.0, handing: Handing::Kept },
    Class { name: "phases", touch: Touch::Users, shared: 0.0, handing: Handing::Passed },
    Class { name: "freed and reused", touch: Touch::Users, shared: 0.0, handing: Handing::Freed },
    Class { name: "mixed", touch: Touch::First, shared: 0.4, handing: Handing::Kept },
];

/// An application.
#[derive(Clone, Debug)]
pub struct Application {
    /// What it does.
    pub class: Class,
    /// Its memory.
    pub bytes: u64,
    /// Cycles between two accesses: few where memory is all it does.
    pub compute_cycles: f64,
    /// Accesses of a thread that are under way at once.
    pub outstanding: f64,
    /// Accesses of each thread in all.
    pub accesses: f64,
    /// In so many parts, each of which begins when all threads have ended the one before.
    pub phases: usize,
}
