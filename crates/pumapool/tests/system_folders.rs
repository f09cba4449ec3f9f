//! A wrong argument disables no machine: folders of the system and interfaces of the kernel are
//! refused. Tried only in namespaces of their own, where whatever is mounted is seen by nobody
//! else, and all that runs ends with the test.

mod setup;

use setup::{PUMAPOOL, can_run};
use std::process::{Command, Output};
use testbed::Scratch;

/// Has a shell run it where it can do no harm: with its own mounts and its own processes, which are
/// killed when it ends.
fn apart(scratch: &Scratch, script: &str) -> Output {
    let namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mut command = Command::new("unshare");
    command.args(namespaces).args(["timeout", "-s", "KILL", "60", "sh", "-c", script]);
    command.env("XDG_RUNTIME_DIR", scratch.path()).output().unwrap()
}

#[test]
fn folders_of_the_system_are_refused() {
    let test = "folders_of_the_system_are_refused";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (files, at) = (scratch.directory("files").unwrap(), scratch.directory("at").unwrap());
    std::os::unix::fs::symlink("/proc", scratch.path().join("link")).unwrap();
    let (files, at, link) =
        (files.to_str().unwrap(), at.to_str().unwrap(), format!("{}/link", scratch.path().display()));
    let needed = "the system, and the daemon of the mount, need what is there";
    let interface = "it is an interface of the kernel";
    let mut tries = vec![
        ("/proc".to_owned(), interface),
        ("/sys".to_owned(), interface),
        (link.clone(), interface),
        (format!("/proc {at}"), interface),
        (format!("/proc/self/fd {at}"), interface),
        (format!("{files} /proc"), needed),
        (format!("{files} {link}"), needed),
        (format!("{files} /proc/self"), needed),
        (format!("{files} /run"), needed),
        (format!("{files} /run/../dev/"), needed),
    ];
    let folders = ["/", "/dev", "/run", "/boot"].into_iter().filter(|folder| std::path::Path::new(folder).is_dir());
    tries.extend(folders.map(|folder| (folder.to_owned(), needed)));
    for (arguments, why) in tries {
        let script = format!(
            "there() {{ findmnt -rn -t fuse.pumapool -o TARGET; }}; before=$(there); {PUMAPOOL} mount {arguments} --fill read; code=$?; \
             [ \"$before\" = \"$(there)\" ] || there; exit $code"
        );
        let output = apart(&scratch, &script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(why), "{arguments}: {output:?}");
        assert_eq!((said.lines().count(), output.stdout.len()), (1, 0), "{arguments}: {output:?}");
    }
    // Below them there are good places.
    let script = format!(
        "set -e; mount -t tmpfs none /run; mkdir /run/files /run/at; echo x > /run/files/a; \
         {PUMAPOOL} mount /run/files /run/at --fill read; cat /run/at/a; {PUMAPOOL} umount /run/at"
    );
    let output = apart(&scratch, &script);
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains('x'), "{output:?}");
}
