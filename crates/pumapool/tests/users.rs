//! Without root: as an ordinary user through fusermount3, and as root of a user namespace. All that
//! can work works, and what cannot is said.

mod setup;

use setup::{PUMAPOOL, can_run};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;
use testbed::Scratch;

/// Debian's `nobody`: fusermount3 wants a user with a name.
const USER: u32 = 65_534;

/// A key is made, memory is lent, a directory is mounted, read twice, served by another program,
/// and unmounted. Running processes are ended in any case.
const SCRIPT: &str = r#"
set -eu
cd "$1"
pumapool=$2
export HOME=$1 XDG_RUNTIME_DIR=$1/run
trap 'for pid in $("$pumapool" status --json | grep -o "\"pid\":[0-9]*" | cut -d: -f2); do kill "$pid" 2>/dev/null || true; done' EXIT
until_true() {
	left=600
	until "$@"; do left=$((left - 1)); [ $left -gt 0 ] || { echo "in vain: $*"; exit 1; }; sleep 0.1; done
}
"$pumapool" key new key > /dev/null
"$pumapool" lend --listen unix:"$1"/lender.sock --capacity 64MiB --reserve 16MiB > /dev/null
"$pumapool" mount source mount --lender unix:"$1"/lender.sock --gate off --hedge off --filter off > /dev/null
up() { "$pumapool" status --json | grep -q '"lender_is_up":true'; }
until_true up
from_lender() {
	# `set -e` does not count in a condition.
	cmp source/file mount/file || exit 1
	dd if=mount/file iflag=nocache count=0 status=none
	! "$pumapool" status --json | grep -q '"lender_pages":0[,}]'
}
until_true from_lender
echo new > mount/new
cmp source/new mount/new
"$pumapool" upgrade mount > /dev/null
cmp source/file mount/file
"$pumapool" umount mount
# Empty or relative, the variable is as if it were not set.
mkdir tmp elsewhere
for runtime in "" run; do
	(
		cd elsewhere
		export TMPDIR="$1/tmp" XDG_RUNTIME_DIR="$runtime"
		"$pumapool" mount ../source ../mount > /dev/null
		[ -S "$(echo "$TMPDIR"/pumapool-*/mount-*.sock)" ] || { echo "no control folder: $(find "$1")"; exit 1; }
		[ -z "$(ls)" ] || { echo "a control folder in $PWD: $(find .)"; exit 1; }
		"$pumapool" umount ../mount
	)
done
if "$pumapool" status --json | grep -q '"kind":"mount"'; then echo "the mount is still there"; exit 1; fi
"$pumapool" doctor > doctor || true
grep -q 'mounts serve you alone' doctor
grep -q 'run as root .* to tap evictions\|CAP_BPF' doctor
echo ALL WELL
"#;

/// Runs the script as that user, behind what leads there. In a mount namespace of its own,
/// `/dev/fuse` is open to everybody, as udev has it.
fn run(test: &str, behind: &[&str]) {
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    for name in ["source", "mount", "run"] {
        scratch.directory(name).unwrap();
    }
    let path = scratch.path();
    let program = path.join("pumapool");
    fs::copy(PUMAPOOL, &program).unwrap();
    setup::write_pages(&path.join("source/file"), 512, 1);
    fs::write(path.join("script"), SCRIPT).unwrap();
    for name in ["", "source", "source/file", "mount", "run"] {
        chown(path.join(name), Some(USER), Some(USER)).unwrap();
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(path.join("run"), fs::Permissions::from_mode(0o700)).unwrap();
    let device =
        "mknod \"$0\"/fuse c 10 229 && chmod 666 \"$0\"/fuse && mount --bind \"$0\"/fuse /dev/fuse && exec \"$@\"";
    let (at, user) = (path.to_str().unwrap(), USER.to_string());
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", device, at]);
    command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups", "--"]);
    command.args(behind).args(["sh", &format!("{at}/script"), at, program.to_str().unwrap()]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("ALL WELL"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_ordinary_user_has_a_mount_by_fusermount() {
    let test = "an_ordinary_user_has_a_mount_by_fusermount";
    if setup::tool(test, "fusermount3").is_some() {
        run(test, &[]);
    }
}

#[test]
fn root_of_a_user_namespace_has_one_too() {
    run("root_of_a_user_namespace_has_one_too", &["unshare", "--user", "--map-root-user", "--mount"]);
}
