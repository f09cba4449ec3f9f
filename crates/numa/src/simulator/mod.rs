//! A simulated NUMA machine: the thesis's machine, applications of the classes that it measured,
//! and the effect of each policy on them.
//!
//! Memory is a queue at each controller and each link: a late answer delays the next request, so
//! nothing exceeds its bandwidth. Threads stay on their processors, and applications ignore nodes.

mod application;
mod machine;
mod run;

pub use application::{Application, CLASSES, Class, Handing, Touch};
pub use machine::{Flow, Machine};
pub use run::{Outcome, Target, run};
