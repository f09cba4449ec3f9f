//! A NUMA machine, simulated: that of the thesis, applications of the classes that it measured, and
//! what each policy makes of them.
//!
//! Memory is a queue at each controller and each link: what comes late is asked for later, so that
//! nothing carries more than it can. Threads stay on their processors, and applications know
//! nothing of nodes.

mod application;
mod machine;
mod run;

pub use application::{Application, CLASSES, Class, Handing, Touch};
pub use machine::{Flow, Machine};
pub use run::{Outcome, Target, run};
