//! Metrics and `top` with real daemons: every number of theirs is declared, the page is what
//! Prometheus' own parsers take, it survives the daemon of a mount, and `top` leaves the terminal
//! as it was.

mod setup;

use report::Daemon;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::Signal;
use setup::{Lender, Mount, Node, PATIENCE, PUMAPOOL, can_run, evict, key_file, pumapool, write_pages};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Process, Scratch, ask_daemon, wait_until, wait_until_ok};

const PAGES: usize = 512;

/// How long Prometheus waits for a page, unless it is told otherwise.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);

/// As in crates/pumapool/src/metrics/server.rs.
const CONNECTIONS_MAX: usize = 16;

fn start(arguments: &[&str]) -> Process {
    let mut command = Command::new(PUMAPOOL);
    command.args(arguments).arg("--foreground");
    let mut process = Process::spawn(command, &[]).unwrap();
    process.wait_for_line("READY", PATIENCE).unwrap();
    process
}

fn status_of<T: report::Reported>(process: &Process) -> T {
    let ask = || ask_daemon(process.pid(), PATIENCE).map_err(|error| std::io::Error::other(error.to_string()));
    wait_until_ok(PATIENCE, ask).unwrap()
}

/// Asks over HTTP, and returns head and body.
fn ask(address: &str, request: &str) -> (String, String) {
    let mut answer = String::new();
    match address.strip_prefix("unix:") {
        Some(path) => exchange(UnixStream::connect(path).unwrap(), request, &mut answer),
        None => exchange(TcpStream::connect(address).unwrap(), request, &mut answer),
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{request:?}: {answer:?}"));
    (head.to_owned(), body.to_owned())
}

fn exchange(mut stream: impl Read + Write, request: &str, answer: &mut String) {
    stream.write_all(request.as_bytes()).unwrap();
    stream.read_to_string(answer).unwrap();
}

fn get(address: &str) -> String {
    let (head, body) = ask(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
    body
}

/// Asks until there is no more room in the queue. A daemon that has gone stays in it.
fn fill_queue(path: &str) {
    let (address, flags) = (SocketAddrUnix::new(path).unwrap(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let connect = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        rustix::net::connect(&socket, &address)
    };
    while connect().is_ok() {}
}

fn metrics_of(status: &report::Mount) -> String {
    status.metrics.clone().unwrap_or_else(|| panic!("no address in {status}"))
}

/// A line of a page.
fn value(page: &str, name: &str) -> f64 {
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")))
        .unwrap_or_else(|| panic!("no {name} in {page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Python with Prometheus' client library, if there is one.
fn python(test: &str) -> Option<&'static str> {
    let has_client = |python: &&str| {
        let import = Command::new(python).args(["-c", "import prometheus_client"]).stderr(Stdio::null()).status();
        import.is_ok_and(|status| status.success())
    };
    let found = ["python3", "/usr/bin/python3"].into_iter().find(has_client);
    if found.is_none() {
        testbed::skip(test, "no Python has prometheus_client; `make test-deps` installs it");
    }
    found
}

/// Runs a Python program with that on its standard input, and returns what it says.
fn run_python(python: &str, program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(python)
        .args(["-c", program])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

/// Every metric that is declared has a value on the page of daemons of all kinds.
#[test]
fn every_metric_has_a_value() {
    let test = "every_metric_has_a_value";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let folder = |name: &str| scratch.directory(name).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (source, at) = (folder("source"), folder("mount"));
    write_pages(&source.join("file"), PAGES, 1);
    let pool =
        ["--pool", "127.0.0.1:1", "--gossip", "127.0.0.1:0", "--cpu", "50", "--rate", "64MiB", "--capacity", "64MiB"];
    let lender = Lender::with("127.0.0.1:0", &pool, &[]);
    let seed = lender.status().pool.unwrap_or_default().advertise;
    let gossip = ["--lender", &lender.address, "--pool", &seed, "--gossip", "127.0.0.1:0"];
    let groups = ["--cgroup", "others,quota=64MiB,share=1"];
    let mount = Mount::start(&source, &at, &[&gossip[..], &groups].concat());
    mount.wait_for("the pool", |status| status.pool.as_ref().is_some_and(|pool| !pool.members.is_empty()));
    fs::read(at.join("file")).unwrap();
    let joined = format!("{}:{}", text(&folder("source2")), text(&folder("mount2")));
    let node = Node::start(&["--mount", &joined, "--pool", &seed, "--gossip", "127.0.0.1:0"]);
    node.wait_for("the pool", |status| status.lend.pool.as_ref().is_some_and(|pool| !pool.members.is_empty()));
    let (images, served, listen) =
        (folder("images"), folder("served"), format!("unix:{}", text(&scratch.path().join("host.sock"))));
    write_pages(&images.join("disk.img"), PAGES, 2);
    let guest = format!("disk.img={}", key_file());
    let host = start(&[
        "host-cache",
        "host",
        "--images",
        &text(&images),
        &text(&served),
        "--listen",
        &listen,
        "--guest",
        &guest,
    ]);
    let target = format!("pid:{}=none", std::process::id());
    let numa = start(&["numa", "daemon", "--target", &target]);
    let mut statuses = vec![
        Daemon::Mount(Box::new(mount.status())),
        Daemon::Lend(Box::new(lender.status())),
        Daemon::Join(Box::new(node.status())),
        Daemon::Mount(Box::new(status_of(&host))),
        Daemon::Numa(Box::new(status_of(&numa))),
    ];
    // Which disk this machine has is not the test's to choose.
    let has_disk = rustix::fs::major(fs::metadata("/").unwrap().dev()) != 0;
    let guest = has_disk.then(|| start(&["host-cache", "guest", "--fs", "/", "--to", &listen, "--key", key_file()]));
    match &guest {
        Some(guest) => statuses.push(Daemon::Guest(Box::new(status_of(guest)))),
        None => eprintln!("SKIPPED {test}, for guests: the root is on no disk of its own"),
    }

    let found: BTreeSet<&str> = report::read(&statuses).iter().map(|family| family.metric.name).collect();
    let sections = report::sections().iter().filter(|section| guest.is_some() || section.daemons != ["guest"]);
    let names = sections.flat_map(|section| section.metrics()).map(|metric| metric.name);
    // A metric without enough measurements has no value.
    let unmeasured = ["pumapool_link_get_recent_seconds", "pumapool_mount_backing_read_recent_seconds"];
    let missing: Vec<&str> = names.filter(|name| !found.contains(name) && !unmeasured.contains(name)).collect();
    assert!(missing.is_empty(), "no daemon has {missing:?}");

    // All of them on one page, as Prometheus' own library reads it in both formats.
    let Some(python) = python(test) else { return };
    let count = "import sys\nfrom prometheus_client.PARSER import text_string_to_metric_families as parse\n\
        families = list(parse(sys.stdin.read()))\n\
        print(len(families), sum(len(f.samples) for f in families), sum(f.documentation == '' or f.type == 'unknown' for f in families))";
    for (format, parser) in [("openmetrics", "openmetrics.parser"), ("text", "parser")] {
        let page = pumapool(&["metrics", "--format", format]).stdout;
        let page = String::from_utf8(page).unwrap();
        for own in [lender.address.as_str(), mount.path.to_str().unwrap()] {
            assert!(page.contains(own), "{own} is not in {page}");
        }
        let said = run_python(python, &count.replace("PARSER", parser), &[], &page);
        let numbers: Vec<usize> = said.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert!(numbers[0] > 100 && numbers[1] > numbers[0] && numbers[2] == 0, "{format}: {said}");
    }
}

/// The page of a mount is the supervisor's to hold: it is there as long as the mount is, whoever
/// serves it.
#[test]
fn the_page_survives_the_daemon() {
    let test = "the_page_survives_the_daemon";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), PAGES, 1);
    let socket = scratch.path().join("metrics.sock");
    let lender_page = format!("unix:{}", socket.display());
    let address = format!("unix:{}", scratch.path().join("lender.sock").display());
    let mut lender = Lender::with(&address, &["--capacity", "64MiB", "--metrics", &lender_page], &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--metrics", "127.0.0.1:0"]);
    let page = metrics_of(&mount.status());

    // The page has the values of the status. A page is made once a second.
    fs::read(at.join("file")).unwrap();
    mount.evict(&at.join("file"), PAGES as u64);
    fs::read(at.join("file")).unwrap();
    let agree = || {
        let (page, pages) = (get(&page), mount.count(|of| of.lender_pages));
        pages > 0
            && value(&page, "pumapool_mount_lender_pages_total") == pages as f64
            && value(&page, "pumapool_mount_get_seconds_count") > 0.0
            && value(&page, "pumapool_mount_backing_read_seconds_count") > 0.0
            && value(&get(&lender_page), "pumapool_lender_put_pages_total") == lender.count(|of| of.puts) as f64
    };
    assert!(wait_until(PATIENCE, agree), "{}", get(&page));

    // The rules of HTTP.
    let (head, body) = ask(&page, "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && body.is_empty(), "{head}");
    let accept = "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n";
    let (head, body) = ask(&page, accept);
    assert!(head.contains("application/openmetrics-text") && body.ends_with("# EOF\n"), "{head}");
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
        (&format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(100_000)), "431"),
    ] {
        let mut stream = TcpStream::connect(&page).unwrap();
        // It may have been answered, and ended, before all of it was sent.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = [0; 12];
        let _ = stream.read_exact(&mut answer);
        assert_eq!(
            String::from_utf8_lossy(&answer),
            format!("HTTP/1.1 {status}"),
            "{}",
            &request[..20.min(request.len())]
        );
    }

    // Those that say nothing keep nobody out, neither when there is a place left nor when there is
    // none.
    let idle: Vec<_> = (1..CONNECTIONS_MAX).map(|_| TcpStream::connect(&page).unwrap()).collect();
    get(&page);
    let more: Vec<_> = (0..120).map(|_| TcpStream::connect(&page).unwrap()).collect();
    let begun = Instant::now();
    get(&page);
    assert!(begun.elapsed() < SCRAPE_TIMEOUT, "{:?}", begun.elapsed());
    drop((idle, more));

    mount.kill_daemon();
    // Asked before the successor serves, it is answered by that one.
    assert_eq!(value(&get(&page), "pumapool_mount_takeovers_total"), 1.0);
    assert!(pumapool(&["upgrade", at.to_str().unwrap()]).status.success());
    assert!(wait_until(PATIENCE, || value(&get(&page), "pumapool_mount_takeovers_total") == 2.0));
    assert_eq!(metrics_of(&mount.status()), page);

    assert!(socket.exists());
    lender.process.stop(PATIENCE).unwrap();
    assert!(!socket.exists(), "a lender, which may remove hardly any file, removes this one");
    setup::umount(at.to_str().unwrap());
    assert!(wait_until(PATIENCE, || TcpStream::connect(&page).is_err()));
}

#[test]
fn all_daemons_are_served_on_one_page() {
    let scratch = Scratch::new("all_daemons").unwrap();
    let lender = Lender::start(scratch.path(), "1MiB", &[]);
    let serve = || {
        let mut command = Command::new(PUMAPOOL);
        command.args(["metrics", "--listen", "127.0.0.1:0"]);
        let mut server = Process::spawn(command, &[]).unwrap();
        let ready = server.wait_for_line("READY", PATIENCE).unwrap();
        (server, ready.trim().rsplit(' ').next().unwrap().to_owned())
    };
    let own = format!("pumapool_lender_lending{{lender=\"{}\"}} 1\n", lender.address);
    let (mut server, address) = serve();
    assert!(get(&address).contains(&own));
    assert!(server.stop(PATIENCE).unwrap().success());

    // Those that are stuck keep nobody from the others' numbers, also when nobody takes what was
    // asked out of their queues any more.
    let stuck = |index| Lender::start(&scratch.directory(&format!("stuck{index}")).unwrap(), "1MiB", &[]);
    let mut stuck: Vec<_> = (0..6).map(stuck).collect();
    let lenders = setup::all().lenders;
    let first = lenders.iter().find(|lender| lender.status.listen == stuck[0].address).unwrap();
    stuck.iter_mut().for_each(|lender| lender.process.signal(Signal::STOP).unwrap());
    fill_queue(&first.socket);
    // A server that has no page yet.
    let (_server, address) = serve();
    let begun = Instant::now();
    let page = get(&address);
    println!("{} stuck daemons: a page in {:?}", stuck.len(), begun.elapsed());
    assert!(page.contains(&own) && stuck.iter().all(|lender| !page.contains(&lender.address)), "{page}");
    assert!(begun.elapsed() < SCRAPE_TIMEOUT, "{:?}", begun.elapsed());
    stuck.iter_mut().for_each(|lender| lender.process.signal(Signal::CONT).unwrap());

    for (arguments, word) in [
        (&["metrics", "--listen", "vsock:2:7"][..], "[IPV6]:PORT or unix:PATH"),
        (&["metrics", "--listen", "nonsense"], "the port is missing"),
        (&["metrics", "--listen", "unix:/nonexistent/metrics"], "cannot listen on unix:/nonexistent/metrics"),
        (&["lend", "--listen", "unix:/nonexistent/x", "--metrics", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (&["top", "--interval", "0"], "write a number from 0.25 to 60"),
        (&["top"], "--once"),
    ] {
        let output = Command::new(PUMAPOOL).args(arguments).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(word), "{arguments:?}: {said}");
    }
}

/// A terminal for `top`: shows what is on it until all words have been there, presses keys, and
/// looks whether the terminal is as it was.
const TERMINAL: &str = r#"
import fcntl, os, pty, re, signal, struct, sys, termios, time
program, how, *words = sys.argv[1:]
terminal, inside = pty.openpty()
fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack('HHHH', 200, 200, 0, 0))
before = termios.tcgetattr(inside)
if how == 'stopped':
    termios.tcflow(inside, termios.TCOOFF)
child = os.fork()
if child == 0:
    os.close(terminal)
    os.login_tty(inside) if hasattr(os, 'login_tty') else (os.setsid(), fcntl.ioctl(inside, termios.TIOCSCTTY, 0), [os.dup2(inside, n) for n in range(3)])
    os.environ['TERM'] = 'xterm-256color'
    os.execv(program, [program, 'top', '--interval', '0.25'])
if how == 'stopped':
    # The terminal takes nothing, as after Ctrl-S: it waits for ever, and is ended all the same.
    calls, end = [], time.time() + 110
    while len(calls) < 5 or set(calls[-5:]) != {calls[-1]} or calls[-1][1:] != ('0x1',):
        assert time.time() < end, calls[-5:]
        time.sleep(0.05)
        # Which system call of its first thread waits, and on which descriptor.
        calls.append(tuple(open(f'/proc/{child}/syscall').read().split()[:2]))
    os.kill(child, signal.SIGTERM)
    ended, limit = 0, time.time() + 30
    while ended == 0 and time.time() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
    assert ended, 'it goes on while the terminal is stopped'
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM, status
    assert termios.tcgetattr(inside)[3] == before[3], 'the terminal is not as it was'
    sys.exit()
seen, end = '', time.time() + 110
def read_until(word):
    global seen
    while word not in seen:
        assert time.time() < end, (word, seen)
        # Spaces that are on the screen already are passed over by moving the cursor.
        drawn = os.read(terminal, 65536).decode(errors='replace')
        seen += re.sub(r'\x1b\[[0-9;]*H', ' ', re.sub(r'\x1b\[[0-9;]*m', '', drawn))
for word in words:
    read_until(word)
if how == 'keys':
    os.write(terminal, b'?')
    read_until('look more often')
    # The help goes with any key, and only then the next one is one of its own.
    os.write(terminal, b'xq')
elif how == 'signal':
    os.kill(child, signal.SIGTERM)
else:
    # The window is closed.
    os.close(inside)
    os.close(terminal)
    ended, limit = 0, time.time() + 30
    while ended == 0 and time.time() < limit:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
    assert ended, 'it goes on without a terminal'
    sys.exit()
read_until('\x1b[?1049l')
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert termios.tcgetattr(inside) == before, 'the terminal is not as it was'
"#;

#[test]
fn top_shows_them_and_leaves_the_terminal_as_it_was() {
    let test = "top_shows_them_and_leaves_the_terminal_as_it_was";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new("top").unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), PAGES, 1);
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);
    let reading = || {
        evict(&mount.path.join("file"));
        fs::read(mount.path.join("file")).unwrap();
    };
    reading();
    let output = pumapool(&["top", "--once", "--interval", "0.25", "--size", "200x200"]);
    let said = String::from_utf8(output.stdout).unwrap();
    for word in ["pumapool top", at.to_str().unwrap(), &lender.address, "q quit"] {
        assert!(said.contains(word), "{word} is not in\n{said}");
    }
    assert_eq!(said.lines().count(), 200);
    assert!(said.lines().all(|line| line.chars().count() <= 200) && !said.contains('\x1b'));
    for how in ["keys", "signal", "window", "stopped"] {
        reading();
        run_python("python3", TERMINAL, &[PUMAPOOL, how, "pumapool top", at.to_str().unwrap(), &lender.address], "");
    }
}
