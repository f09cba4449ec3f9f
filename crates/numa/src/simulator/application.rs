//! Applications: the memory that their threads use, and which thread touches it first.

/// The thread that touches memory first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Each thread its own part, and an equal share of the shared part.
    Users,
    /// The first thread touches everything, when it reads or makes the input.
    First,
}

/// The fate of a thread's own part between two phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handing {
    /// It stays with the thread.
    Kept,
    /// A thread some nodes away continues with it, unchanged.
    Passed,
    /// It is freed, and such a thread gets it for new data.
    Freed,
}

/// A class of applications, by their use of memory.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// Its name.
    pub name: &'static str,
    /// The thread that touches memory first.
    pub touch: Touch,
    /// Share of the accesses to the shared part.
    pub shared: f64,
    /// The handing between two phases.
    pub handing: Handing,
}

/// The classes that cover the thesis's 29 programs.
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
    /// Its class.
    pub class: Class,
    /// Its memory.
    pub bytes: u64,
    /// Cycles between two accesses: few for an application that only uses memory.
    pub compute_cycles: f64,
    /// Accesses of a thread in flight.
    pub outstanding: f64,
    /// Accesses of each thread in total.
    pub accesses: f64,
    /// The number of phases. Each begins when all threads have ended the one before.
    pub phases: usize,
}
