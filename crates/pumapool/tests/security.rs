//! The pool's key, through the command: where it is wanted, what it keeps out, and that listeners
//! see no byte of a page.

mod setup;

use report::LinkState;
use setup::{Lender, Mount, PATIENCE, can_run, pumapool, write_pages};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use testbed::{Process, Scratch, wait_until};
use wire::{Header, Kind, WireKey};
use zerocopy::{FromBytes, IntoBytes};

const PAGES: usize = 50;

/// The command fails with one line on standard error, in which each of `words` occurs.
fn refuses(arguments: &[&str], words: &[&str]) {
    let output = pumapool(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} was accepted");
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("pumapool: ")).collect();
    assert_eq!(lines.len(), 1, "{arguments:?} said: {said}");
    for word in words {
        assert!(lines[0].contains(word), "{arguments:?} said {:?}, without {word:?}", lines[0]);
    }
}

/// Debian's `nobody`.
const OTHER_USER: u32 = 65_534;

/// Without a key the kernel's word is what tells a lender from whoever may listen at a socket in
/// the file system.
#[test]
fn another_users_lender_gets_nothing_without_a_key() {
    let test = "another_users_lender_gets_nothing_without_a_key";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let shared = scratch.directory("shared").unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&shared, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let program = shared.join("program");
    fs::copy(setup::PUMAPOOL, &program).unwrap();
    let lend = |program: &Path, name: &str, user: u32| {
        let address = format!("unix:{}", shared.join(name).display());
        let mut command = Command::new(program);
        command.args(["lend", "--foreground", "--capacity", "1MiB", "--listen", &address]);
        command.env("XDG_RUNTIME_DIR", &shared).env_remove("PUMAPOOL_KEY_FILE").uid(user).gid(user);
        let mut lender = Process::spawn(command, &[]).unwrap();
        lender.wait_for_line("READY", PATIENCE).unwrap();
        (lender, address)
    };
    let (_theirs, their_address) = lend(&program, "theirs", OTHER_USER);
    let (_ours, our_address) = lend(Path::new(setup::PUMAPOOL), "ours", 0);
    let mut command = Command::new(setup::PUMAPOOL);
    command.args(["mount", "--foreground"]).args([&source, &at]).args(["--lender", &their_address]);
    command.args(["--lender", &our_address]).env_remove("PUMAPOOL_KEY_FILE");
    let mut mount = Process::spawn(command, &[]).unwrap();
    mount.wait_for_line("READY", PATIENCE).unwrap();
    let lenders = || testbed::ask_daemon::<report::Mount>(mount.pid(), PATIENCE).unwrap().lenders;
    let of = |address: &str| lenders().into_iter().find(|lender| lender.address == address).unwrap();
    assert!(wait_until(PATIENCE, || of(&our_address).state == LinkState::Used), "{:?}", lenders());
    let refused = || of(&their_address).reason;
    let is_told = || refused().contains(&format!("user {OTHER_USER} listens")) && refused().contains("--key");
    assert!(wait_until(PATIENCE, is_told), "{:?}", lenders());
}

#[test]
fn a_key_is_made_and_wanted() {
    let scratch = Scratch::new("a_key_is_made_and_wanted").unwrap();
    let file = scratch.path().join("pool.key");
    let path = file.to_str().unwrap();
    let output = pumapool(&["key", "new", path]);
    assert!(output.status.success(), "{output:?}");
    let digits = fs::read_to_string(&file).unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(String::from_utf8_lossy(&said).contains("--key") && digits.trim().len() == 64);
    assert!(!String::from_utf8_lossy(&said).contains(&digits[..8]), "the key itself is never shown");
    refuses(&["key", "new", path], &["never overwritten"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), digits);

    let lend = |options: &[&str], words: &[&str]| {
        let listen = ["lend", "--listen", "127.0.0.1:0", "--capacity", "1MiB", "--foreground"];
        refuses(&[&listen, options].concat(), words);
    };
    lend(&[], &["pumapool key new", "--trust-network"]);
    lend(&["--key", path, "--trust-network"], &["choose one"]);
    lend(&["--key", scratch.path().join("nothing").to_str().unwrap()], &["nothing", "pumapool key new"]);
    lend(&["--key", scratch.path().to_str().unwrap()], &["no regular file"]);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    lend(&["--key", path], &["chmod 600", "0640"]);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&file, &digits[1..]).unwrap();
    lend(&["--key", path], &["64 hexadecimal digits"]);
    let source = scratch.directory("source").unwrap();
    refuses(&["mount", source.to_str().unwrap(), "--lender", "127.0.0.1:1"], &["pumapool key new", "--trust-network"]);
}

#[test]
fn a_relative_key_file_is_found_in_the_background() {
    let test = "a_relative_key_file_is_found_in_the_background";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::copy(setup::key_file(), scratch.path().join("pool.key")).unwrap();
    fs::set_permissions(scratch.path().join("pool.key"), fs::Permissions::from_mode(0o600)).unwrap();
    let lender = Lender::listen("127.0.0.1:0", "16MiB", &[]);
    let run = |arguments: &[&str]| {
        let output = Command::new(setup::PUMAPOOL).args(arguments).current_dir(scratch.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    run(&["mount", source.to_str().unwrap(), at.to_str().unwrap(), "--lender", &lender.address, "--key", "pool.key"]);
    // A daemon that takes over reads it again.
    let mount = || setup::mounts().into_iter().find(|mount| mount.mountpoint == at.to_str().unwrap());
    let is_up = || mount().is_some_and(|mount| mount.lender_is_up);
    assert!(wait_until(PATIENCE, is_up));
    assert_eq!(mount().unwrap().security.as_deref(), Some("key"));
    setup::kill(mount().unwrap().daemon_pid);
    let took_over = || mount().is_some_and(|mount| mount.mount.takeovers == 1 && mount.lender_is_up);
    let came = wait_until(PATIENCE, took_over);
    run(&["umount", at.to_str().unwrap()]);
    assert!(came, "no daemon took over with the key");
}

#[test]
fn a_mount_with_another_key_reads_from_below() {
    let test = "a_mount_with_another_key_reads_from_below";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), PAGES, 60);
    let other = scratch.path().join("other.key");
    wire::key::PoolKey::create(&other).unwrap();
    let lender = Lender::listen("127.0.0.1:0", "16MiB", &[]);
    for options in [["--key", other.to_str().unwrap()].as_slice(), &["--trust-network"]] {
        let before = lender.count(|of| of.refused_keys);
        let mut command = Command::new(setup::PUMAPOOL);
        command.arg("mount").args([&source, &at]).args(["--foreground", "--lender", &lender.address]).args(options);
        let mut process = testbed::Process::spawn(command, &[]).unwrap();
        process.wait_for_line("READY", PATIENCE).unwrap();
        let mount = Mount { process, path: at.clone() };
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        assert!(wait_until(PATIENCE, || lender.count(|of| of.refused_keys) > before));
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        assert_eq!((mount.count(|of| of.lender_connects), lender.count(|of| of.borrowers)), (0, 0));
    }
}

/// Carries connections to a lender, and keeps all it carries.
struct Tap {
    address: String,
    heard: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Tap {
    fn to(lender: &Lender) -> Tap {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let heard = Arc::<Mutex<Vec<Vec<u8>>>>::default();
        let (for_thread, lender) = (heard.clone(), lender.address.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(&lender) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to, heard) = (from.try_clone().unwrap(), to.try_clone().unwrap(), for_thread.clone());
                    let place = {
                        let mut heard = heard.lock().unwrap();
                        heard.push(Vec::new());
                        heard.len() - 1
                    };
                    std::thread::spawn(move || carry(from, to, &heard, place));
                }
            }
        });
        Tap { address, heard }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, heard: &Mutex<Vec<Vec<u8>>>, place: usize) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        heard.lock().unwrap()[place].extend_from_slice(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Pieces of the file's pages that occur in what was heard.
fn shown(pages: &[u8], heard: &[Vec<u8>]) -> usize {
    let pieces: HashSet<&[u8]> = pages.chunks_exact(16).collect();
    heard.iter().flat_map(|bytes| bytes.windows(16)).filter(|window| pieces.contains(window)).count()
}

/// Has every page put at the lender, and read back from there at once, through `address`.
fn put_and_get(scratch: &Scratch, bytes: &[u8], address: &str, option: &[&str]) {
    let (source, at) = (scratch.path().join("source"), scratch.path().join("mount"));
    let mount = Mount::start(&source, &at, &[&["--lender", address, "--fill", "read"], option].concat());
    // A page for which a lender was too late is lent again by the read that missed it.
    let all_come_back = || {
        mount.wait_for("the puts", |status| status.puts_under_way == 0);
        let before = mount.count(|of| of.lender_pages);
        setup::evict(&at.join("file"));
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        mount.count(|of| of.lender_pages) == before + PAGES as u64
    };
    assert!(wait_until(PATIENCE, all_come_back), "{}", mount.status());
    assert_eq!(mount.count(|of| of.bad_pages), 0);
}

/// The names of pages in plain Put frames.
fn names(heard: &[Vec<u8>]) -> Vec<WireKey> {
    let mut names = Vec::new();
    for mut bytes in heard.iter().map(Vec::as_slice) {
        while let Ok((header, rest)) = Header::read_from_prefix(bytes) {
            let Some((body, behind)) = rest.split_at_checked(header.body_bytes.get() as usize) else { break };
            if header.validate() == Ok(Kind::Put) {
                let count = usize::from(header.items.get());
                let (items, _) = <[wire::PutItem]>::ref_from_prefix_with_elems(body, count).unwrap();
                names.extend(items.iter().map(|item| item.key));
            }
            bytes = behind;
        }
    }
    names
}

#[test]
fn who_listens_sees_no_byte_of_a_page_and_no_name() {
    let test = "who_listens_sees_no_byte_of_a_page_and_no_name";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    scratch.directory("mount").unwrap();
    let bytes = write_pages(&scratch.directory("source").unwrap().join("file"), PAGES, 61);
    // Without a key all is there to be seen: so this would find it.
    let lender = Lender::with("127.0.0.1:0", &["--capacity", "16MiB", "--trust-network"], &[]);
    let tap = Tap::to(&lender);
    put_and_get(&scratch, &bytes, &tap.address, &["--trust-network"]);
    let plain = tap.heard.lock().unwrap().clone();
    assert!(shown(&bytes, &plain) >= 2 * bytes.len() / 16, "the tap does not work");
    let names = names(&plain);
    assert!(names.len() >= PAGES, "{} names", names.len());

    let lender = Lender::with("127.0.0.1:0", &["--capacity", "16MiB"], &[]);
    let tap = Tap::to(&lender);
    put_and_get(&scratch, &bytes, &tap.address, &[]);
    let sealed = tap.heard.lock().unwrap().clone();
    let volume: usize = sealed.iter().map(Vec::len).sum();
    assert!(volume >= 2 * bytes.len(), "all went through the tap");
    assert_eq!(shown(&bytes, &sealed), 0);
    let names: HashSet<&[u8]> = names.iter().map(IntoBytes::as_bytes).chain([&wire::MAGIC[..]]).collect();
    for bytes in &sealed {
        assert!(!bytes.windows(16).any(|window| names.contains(window)), "a page's name in clear");
        assert!(!bytes.windows(8).any(|window| names.contains(window)), "a Hello in clear");
    }
}

#[test]
fn tshark_sees_no_byte_of_a_page() {
    let test = "tshark_sees_no_byte_of_a_page";
    if !can_run(test) {
        return;
    }
    if Command::new("tshark").arg("--version").output().is_err() {
        return testbed::skip(test, "tshark is missing; `make test-deps` installs it");
    }
    let scratch = Scratch::new(test).unwrap();
    scratch.directory("mount").unwrap();
    let bytes = write_pages(&scratch.directory("source").unwrap().join("file"), PAGES, 62);
    let lender = Lender::with("127.0.0.1:0", &["--capacity", "16MiB"], &[]);
    let port = lender.address.rsplit(':').next().unwrap();
    let seen = scratch.path().join("seen");
    let mut command = Command::new("tshark");
    command.args([
        "-l",
        "-n",
        "-i",
        "lo",
        "-B",
        "64",
        "-f",
        &format!("tcp port {port}"),
        "-T",
        "fields",
        "-e",
        "tcp.payload",
    ]);
    command.stdout(File::create(&seen).unwrap()).stderr(File::create(scratch.path().join("errors")).unwrap());
    let mut tshark = KilledOnDrop(command.spawn().unwrap());
    // Packets in the order in which they were sent: what is seen of the second knock is behind all
    // that came before it.
    let knock = |word: &str| {
        let hexadecimal: String = word.bytes().map(|byte| format!("{byte:02x}")).collect();
        let came = wait_until(PATIENCE, || {
            let _ = TcpStream::connect(&lender.address).and_then(|mut stream| stream.write_all(word.as_bytes()));
            fs::read_to_string(&seen).is_ok_and(|seen| seen.contains(&hexadecimal))
        });
        let errors = fs::read_to_string(scratch.path().join("errors")).unwrap_or_default();
        assert!(came, "tshark does not see {word:?}: {errors}");
    };
    knock("the capture begins, or should have");
    put_and_get(&scratch, &bytes, &lender.address, &[]);
    knock("the capture ends, and all is in it");
    let _ = (tshark.0.kill(), tshark.0.wait());
    let text = fs::read_to_string(&seen).unwrap();
    let digit = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
    let packets: Vec<Vec<u8>> = text
        .lines()
        .map(|line| {
            line.as_bytes().as_chunks::<2>().0.iter().map(|[high, low]| digit(*high) << 4 | digit(*low)).collect()
        })
        .collect();
    let volume: usize = packets.iter().map(Vec::len).sum();
    assert!(volume >= 2 * bytes.len(), "only {volume} bytes were captured");
    assert_eq!(shown(&bytes, &packets), 0);
}

struct KilledOnDrop(std::process::Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}
