//! Processes and threads, as `/proc/PID` shows them (proc_pid(5)).

use std::fmt::Display;

/// The bit of a thread's flags that the kernel sets when the thread begins to end
/// (include/linux/sched.h).
const PF_EXITING: u64 = 4;

/// Whether the first thread of a process has ended, whatever other threads are left. `false` if
/// there is no such process.
pub fn is_dying(process: i32) -> bool {
    has_ended(&stat_of(process))
}

/// Whether a process is stopped, by a signal or by a debugger. `false` if there is no such process.
pub fn is_stopped(process: u32) -> bool {
    after_name(&stat_of(process)).is_some_and(|rest| rest.starts_with(['T', 't']))
}

/// Whether a thread has ended, or is releasing its resources: it runs no more of its program. If
/// it has files open on a FUSE mount, closing them may still wait for an answer. `stat` is the text
/// of its `/proc/PID/task/TID/stat`.
pub fn has_ended(stat: &str) -> bool {
    let Some(rest) = after_name(stat) else { return false };
    let flags = rest.split_whitespace().nth(6).and_then(|word| word.parse::<u64>().ok());
    rest.starts_with(['Z', 'X']) || flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

/// The processor time that a process has used, in user mode and in the kernel, in ticks of
/// `sysconf(_SC_CLK_TCK)`. `stat` is the text of its `/proc/PID/stat`. Numbers that are missing
/// count as 0.
pub fn processor_ticks(stat: &str) -> u64 {
    let fields = after_name(stat).unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).fold(0, u64::saturating_add)
}

/// The children of a process's first thread. Empty if there is no such process, or if the kernel
/// lacks CONFIG_PROC_CHILDREN.
pub fn children(process: u32) -> Vec<u32> {
    numbers(&text(format_args!("/proc/{process}/task/{process}/children")))
}

/// The supplementary groups of a thread. Empty if they cannot be read.
pub fn groups(thread: u32) -> Vec<u32> {
    let status = text(format_args!("/proc/{thread}/status"));
    numbers(status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default())
}

fn stat_of(process: impl Display) -> String {
    text(format_args!("/proc/{process}/stat"))
}

fn text(path: impl Display) -> String {
    std::fs::read_to_string(path.to_string()).unwrap_or_default()
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// The fields after the name, from the state on. The name may contain anything, also `) `.
fn after_name(stat: &str) -> Option<&str> {
    stat.rsplit_once(") ").map(|(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of a thread of that state and those flags, which has used 30 and 12 ticks.
    fn stat(state: char, flags: u64) -> String {
        format!("7 (a) R 9 9 (b) {state} 1 7 7 0 -1 {flags} 1 2 3 4 30 12 0 0 20 0 1 0 5 6\n")
    }

    #[test]
    fn a_state_stands_behind_the_name() {
        assert!(!has_ended(&stat('S', 0)) && !has_ended(&stat('T', 1 << 20)));
        assert!(has_ended(&stat('Z', 0)) && has_ended(&stat('X', 0)) && has_ended(&stat('R', PF_EXITING | 64)));
        for odd in ["", "7", "7 (a", "7 (a)", "7 (Z) ", "7 (a) R 1 2 3 4 5 x"] {
            assert!(!has_ended(odd), "{odd}");
        }
    }

    #[test]
    fn processor_time_is_of_both_modes() {
        assert_eq!(processor_ticks(&stat('R', 0)), 42);
        assert_eq!(processor_ticks(&format!("1 (a) R 1 2 3 4 5 6 7 8 9 10 {0} {0}", u64::MAX)), u64::MAX);
        assert_eq!((processor_ticks(""), processor_ticks("7 (a) R 1 2")), (0, 0));
    }

    #[test]
    fn a_stopped_child_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let signal = |signal| rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let pid = child.id();
        assert!(!is_stopped(pid) && !is_dying(pid as i32));
        signal(rustix::process::Signal::STOP);
        while !is_stopped(pid) {
            std::thread::yield_now();
        }
        signal(rustix::process::Signal::KILL);
        while !is_dying(pid as i32) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!is_dying(pid as i32) && !is_stopped(pid) && children(pid).is_empty() && groups(pid).is_empty());
    }

    #[test]
    fn this_process_can_be_read() {
        let mut own: Vec<u32> = rustix::process::getgroups().unwrap().into_iter().map(|group| group.as_raw()).collect();
        let mut groups = groups(std::process::id());
        own.sort_unstable();
        groups.sort_unstable();
        assert_eq!(groups, own);
    }
}
