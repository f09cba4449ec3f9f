//! The lender under test: the real one, or the byzantine one at the same address.
//!
//! All processes are started from the thread that owns this value: the kernel ends them with that
//! thread.

use crate::network::Network;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use testbed::{Failure, Group, MemoryHog, Process, Puma};

use rustix::process::Signal;

/// Its maximum of lent memory.
pub const CAPACITY_BYTES: u64 = 64 << 20;
/// Its memory cgroup: lent memory, reserve, and its own needs.
pub const GROUP_BYTES: u64 = 112 << 20;
/// Memory that another process fills when the lender is squeezed: the lent pages have to be given
/// back.
const HOG_BYTES: u64 = 72 << 20;
/// The port of the lender in a network namespace, which contains no other process.
const PORT: u16 = 7000;

/// The address of the lender.
pub enum Place {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of this machine that the kernel chooses.
    Tcp,
    /// In a namespace of its own.
    Network(Rc<Network>),
}

/// The program at the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// `pumapool lend`.
    Lender,
    /// Our own byzantine lender, with the seed of its lies.
    Byzantine(u64),
}

/// The lender, or the byzantine one in its place, or nothing.
pub struct Lender {
    puma: Puma,
    place: Place,
    address: String,
    // In this order: processes before their group.
    memory_hog: Option<MemoryHog>,
    process: Option<Process>,
    who: Who,
    group: Group,
    log: String,
}

impl Lender {
    /// Starts the real lender.
    pub fn start(puma: &Puma, place: Place, log: &str) -> Result<Lender, Failure> {
        let address = match &place {
            Place::Unix(path) => format!("unix:{}", path.display()),
            Place::Tcp => "127.0.0.1:0".to_owned(),
            Place::Network(network) => format!("{}:{PORT}", network.host()),
        };
        let group = Group::create("chaos-lender", Some(GROUP_BYTES), None)?;
        let mut lender = Lender {
            puma: puma.clone(),
            place,
            address,
            memory_hog: None,
            process: None,
            who: Who::Lender,
            group,
            log: log.to_owned(),
        };
        lender.run(Who::Lender)?;
        Ok(lender)
    }

    /// The address for `--lender`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The present program.
    pub fn who(&self) -> Who {
        self.who
    }

    /// The process of the real lender, if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().filter(|_| self.who == Who::Lender).map(Process::pid)
    }

    /// Starts the program in the place of the present one, which is killed.
    pub fn run(&mut self, who: Who) -> Result<(), Failure> {
        self.kill()?;
        let program = match who {
            Who::Lender => self.puma.pumapool.clone(),
            Who::Byzantine(_) => std::env::current_exe().map_err(Failure::attempted("finding this program"))?,
        };
        let mut command = match &self.place {
            Place::Network(network) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net={}", network.path().display())).arg(program);
                command
            }
            Place::Unix(_) | Place::Tcp => Command::new(program),
        };
        match who {
            Who::Lender => {
                command.args(["lend", "--foreground", "--capacity", &CAPACITY_BYTES.to_string(), "--reserve", "8MiB"]);
                // The byzantine lender has no key: no peer with a key would lie in so many ways.
                command.arg("--trust-network").env_remove("PUMAPOOL_KEY_FILE");
            }
            Who::Byzantine(seed) => {
                command.args(["byzantine", "--seed", &seed.to_string()]);
            }
        }
        command.args(["--listen", &self.address]);
        let (process, said) = self.puma.start(command, &self.log, &[&self.group])?;
        if let (Place::Tcp, Some(port)) =
            (&self.place, said.rsplit(':').next().filter(|_| self.address.ends_with(":0")))
        {
            self.address = format!("127.0.0.1:{port}");
        }
        (self.process, self.who) = (Some(process), who);
        Ok(())
    }

    /// Ends it as a power failure would.
    pub fn kill(&mut self) -> Result<(), Failure> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        if let Place::Unix(path) = &self.place {
            // Unlike the real lender, the byzantine one replaces no socket.
            let _none = std::fs::remove_file(Path::new(path));
        }
        Ok(())
    }

    /// Starts the real lender again if it has ended by itself, which it may when its memory is
    /// taken. Returns whether it had.
    pub fn revive(&mut self) -> Result<bool, Failure> {
        let ended = match &mut self.process {
            Some(process) => process.wait(std::time::Duration::ZERO)?.is_some(),
            None => true,
        };
        if ended {
            self.run(Who::Lender)?;
        }
        Ok(ended)
    }

    /// Stops the process (SIGSTOP).
    pub fn stop(&mut self) -> Result<(), Failure> {
        self.process.as_mut().map_or(Ok(()), |process| process.signal(Signal::STOP))?;
        Ok(())
    }

    /// Continues the process (SIGCONT).
    pub fn go_on(&mut self) -> Result<(), Failure> {
        self.process.as_mut().map_or(Ok(()), |process| process.signal(Signal::CONT))?;
        Ok(())
    }

    /// Starts a process that takes its memory.
    pub fn start_hog(&mut self) -> Result<(), Failure> {
        self.memory_hog = Some(MemoryHog::start(HOG_BYTES, &[&self.group])?);
        Ok(())
    }

    /// Gives the memory back.
    pub fn release(&mut self) {
        self.memory_hog = None;
    }

    /// The network link to it, if it has one.
    pub fn network(&self) -> Option<Rc<Network>> {
        match &self.place {
            Place::Network(network) => Some(Rc::clone(network)),
            Place::Unix(_) | Place::Tcp => None,
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // A stopped process does not receive the signal to end.
        let _ended_already = self.go_on();
    }
}
