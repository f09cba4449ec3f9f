//! Lost connections: what a lender keeps for a borrower that comes back, and what is never claimed
//! again.

mod setup;

use page::PAGE_SIZE;
use setup::{Lender, Mount, PATIENCE, can_run, unless_stalled, write_pages};
use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use testbed::{Scratch, wait_until};
use wire::secure::Channel;
use wire::{GetItem, Header, Kind, PutItem, WireKey};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const PAGES: u64 = 300;

/// A stretch of network between borrower and lender, which can be cut and frozen.
struct Network {
    address: String,
    shared: Arc<NetworkState>,
}

#[derive(Default)]
struct NetworkState {
    is_cut: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    /// Of the connections there are now: what is sent over them vanishes.
    frozen: Mutex<Arc<AtomicBool>>,
}

impl Network {
    fn to(lender: &Lender) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::<NetworkState>::default();
        let (state, lender) = (shared.clone(), lender.address.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if state.is_cut.load(Ordering::SeqCst) {
                    continue; // closes it
                }
                let Ok(far) = TcpStream::connect(&lender) else { continue };
                let frozen = state.frozen.lock().unwrap().clone();
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to, frozen) = (from.try_clone().unwrap(), to.try_clone().unwrap(), frozen.clone());
                    std::thread::spawn(move || carry(from, to, &frozen));
                }
                state.streams.lock().unwrap().extend([near, far]);
            }
        });
        Network { address, shared }
    }

    /// Ends all connections, and lets none be made.
    fn cut(&self) {
        self.shared.is_cut.store(true, Ordering::SeqCst);
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.shared.is_cut.store(false, Ordering::SeqCst);
    }

    /// Lets what is sent over the connections there are vanish; neither end is told. New ones work.
    fn freeze(&self) {
        std::mem::take(&mut *self.shared.frozen.lock().unwrap()).store(true, Ordering::SeqCst);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.cut();
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, frozen: &AtomicBool) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if !frozen.load(Ordering::SeqCst) && to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    if !frozen.load(Ordering::SeqCst) {
        let _ = to.shutdown(Shutdown::Both);
    }
}

fn tcp_lender(grace: &str) -> Lender {
    Lender::with("127.0.0.1:0", &["--capacity", "64MiB", "--grace", grace], &[])
}

fn mount(scratch: &Scratch, lender: &str) -> Mount {
    let (source, at) = (scratch.path().join("source"), scratch.directory("mount").unwrap());
    Mount::start(&source, &at, &["--lender", lender, "--fill", "evict"])
}

fn wait_away(mount: &Mount) {
    mount.wait_for("the loss", |status| !status.lender_is_up);
}

fn wait_back(mount: &Mount, connects: u64) {
    mount.wait_for("the lender", |status| status.lender_is_up && status.borrower.lender_connects >= connects);
}

/// A lender behind a network, and a mount whose file it has, every page of it.
fn lent(scratch: &Scratch, seed: u64) -> (Vec<u8>, Lender, Network, Mount, PathBuf) {
    let bytes = write_pages(&scratch.directory("source").unwrap().join("file"), PAGES as usize, seed);
    let lender = tcp_lender("600");
    let network = Network::to(&lender);
    let mount = mount(scratch, &network.address);
    let file = mount.path.join("file");
    assert!(fs::read(&file).unwrap() == bytes);
    mount.evict(&file, PAGES);
    (bytes, lender, network, mount, file)
}

#[test]
fn a_cut_connection_costs_no_page() {
    let test = "a_cut_connection_costs_no_page";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let (bytes, lender, network, mount, file) = lent(&scratch, 1);
        mount.measure(&lender, stalls);
        stalls.add(std::process::id());
        for round in 1..=3 {
            let (sent, below) = (mount.count(|of| of.put_pages), mount.count(|of| of.backing_pages));
            network.cut();
            wait_away(&mount);
            assert!(wait_until(PATIENCE, || lender.count(|of| of.kept_sessions) == 1));
            assert_eq!((lender.count(|of| of.stored_pages), lender.count(|of| of.borrowers)), (PAGES, 0));
            network.mend();
            wait_back(&mount, round + 1);
            assert!(fs::read(&file).unwrap() == bytes);
            mount.in_time(stalls)?;
            let after =
                (mount.count(|of| of.put_pages), mount.count(|of| of.backing_pages), mount.count(|of| of.get_misses));
            assert_eq!(after, (sent, below, 0), "all came from the lender, and nothing was put again");
            assert_eq!((mount.count(|of| of.lender_resumes), mount.count(|of| of.lender_losses)), (round, round));
            mount.evict(&file, PAGES);
        }
        assert_eq!((lender.count(|of| of.resumed_sessions), lender.count(|of| of.expired_sessions)), (3, 0));
        Some(())
    });
}

#[test]
fn what_changes_while_the_lender_is_away_is_never_claimed() {
    let test = "what_changes_while_the_lender_is_away_is_never_claimed";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let source = scratch.directory("source").unwrap();
        let names = ["same", "written", "beside", "deleted"];
        let mut contents: HashMap<_, _> =
            (2..).zip(names).map(|(seed, name)| (name, write_pages(&source.join(name), 100, seed))).collect();
        let lender = tcp_lender("600");
        let network = Network::to(&lender);
        let mount = mount(&scratch, &network.address);
        mount.measure(&lender, stalls);
        stalls.add(std::process::id());
        for (name, lent) in names.into_iter().zip([100, 200, 300, 400]) {
            assert!(fs::read(mount.path.join(name)).unwrap() == contents[name]);
            let file = mount.path.join(name);
            setup::evict(&file);
            mount.wait_for("pages lent", |status| status.catalog.live_pages == lent && status.puts_under_way == 0);
        }
        let (sent, below) = (mount.count(|of| of.put_pages), mount.count(|of| of.backing_pages));
        network.cut();
        wait_away(&mount);
        // Read and evicted while the lender is away: from below, and what the lender has is as good
        // as before.
        assert!(fs::read(mount.path.join("same")).unwrap() == contents["same"]);
        let known = mount.count(|of| of.evictions_already_lent);
        setup::evict(&mount.path.join("same"));
        mount.wait_for("evictions", |status| status.borrower.evictions_already_lent == known + 100);
        // Changed through the mount, changed beside it, deleted.
        let new = vec![7; 10 * PAGE_SIZE];
        let written = fs::File::options().write(true).open(mount.path.join("written")).unwrap();
        written.write_all_at(&new, 20 * PAGE_SIZE as u64).unwrap();
        drop(written);
        contents.get_mut("written").unwrap()[20 * PAGE_SIZE..30 * PAGE_SIZE].copy_from_slice(&new);
        // Their evictions are dealt with before the lender is back, else the new pages would be
        // lent.
        let seen = mount.count(|of| of.evictions);
        setup::evict(&mount.path.join("written"));
        mount.wait_for("evictions", |status| status.borrower.evictions == seen + 10);
        contents.insert("beside", write_pages(&source.join("beside"), 100, 9));
        fs::remove_file(mount.path.join("deleted")).unwrap();
        network.mend();
        wait_back(&mount, 2);
        assert_eq!(mount.count(|of| of.lender_resumes), 1);
        // The lender hears what of its pages was changed or deleted meanwhile.
        assert!(wait_until(PATIENCE, || lender.count(|of| of.drops) == 110), "{} drops", lender.count(|of| of.drops));
        for name in ["same", "written", "beside"] {
            assert!(fs::read(mount.path.join(name)).unwrap() == contents[name], "{name}");
        }
        assert_eq!(mount.count(|of| of.bad_pages), 0);
        mount.in_time(stalls)?;
        assert!(wait_until(PATIENCE, || lender.count(|of| of.drops) == 210), "{} drops", lender.count(|of| of.drops));
        assert_eq!(
            (lender.count(|of| of.hits), mount.count(|of| of.lender_pages)),
            (190, 190),
            "the pages that did not change"
        );
        assert_eq!((mount.count(|of| of.put_pages), mount.count(|of| of.get_misses)), (sent, 0));
        // 100 while the lender was away, 10 written, 100 changed beside; these last perhaps twice,
        // as the kernel is told to drop what it had of them while they are read.
        let from_below = mount.count(|of| of.backing_pages) - below;
        assert!((210..=310).contains(&from_below), "{from_below} pages from below");
        Some(())
    });
}

#[test]
fn a_lender_that_starts_again_has_nothing_to_claim() {
    let test = "a_lender_that_starts_again_has_nothing_to_claim";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let bytes = write_pages(&scratch.directory("source").unwrap().join("file"), PAGES as usize, 10);
        let address = format!("unix:{}", scratch.path().join("lender.sock").display());
        let mut lender = Lender::listen(&address, "64MiB", &[]);
        let mount = mount(&scratch, &address);
        let file = mount.path.join("file");
        assert!(fs::read(&file).unwrap() == bytes);
        mount.evict(&file, PAGES);
        lender.process.kill().unwrap();
        wait_away(&mount);
        assert_eq!(mount.status().catalog.live_pages, PAGES, "it may come back");
        let lender = Lender::listen(&address, "64MiB", &[]);
        mount.measure(&lender, stalls);
        wait_back(&mount, 2);
        mount.wait_for("the old pages to be forgotten", |status| status.catalog.live_pages == 0);
        let below = mount.count(|of| of.backing_pages);
        assert!(fs::read(&file).unwrap() == bytes);
        assert_eq!((mount.count(|of| of.backing_pages), mount.count(|of| of.get_messages)), (below + PAGES, 0));
        assert_eq!((mount.count(|of| of.lender_resumes), lender.count(|of| of.gets)), (0, 0));
        // The new one is as good as the old one.
        mount.evict(&file, PAGES);
        assert!(fs::read(&file).unwrap() == bytes);
        mount.in_time(stalls)?;
        assert_eq!(mount.count(|of| of.backing_pages), below + PAGES);
        Some(())
    });
}

#[test]
fn a_connection_that_only_one_side_gave_up_is_taken_over() {
    let test = "a_connection_that_only_one_side_gave_up_is_taken_over";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let (bytes, lender, network, mount, file) = lent(&scratch, 11);
        mount.measure(&lender, stalls);
        stalls.add(std::process::id());
        let (below, connections) = (mount.count(|of| of.backing_pages), lender.count(|of| of.connections));
        network.freeze();
        // The borrower gives the silent lender up and comes back over new connections, while the
        // lender still has the old ones.
        wait_back(&mount, 2);
        assert_eq!((mount.count(|of| of.lender_resumes), lender.count(|of| of.resumed_sessions)), (1, 1));
        assert!(wait_until(PATIENCE, || lender.count(|of| of.connections) == connections), "the old ones are ended");
        assert!(fs::read(&file).unwrap() == bytes);
        mount.in_time(stalls)?;
        assert_eq!((mount.count(|of| of.backing_pages), mount.count(|of| of.get_misses)), (below, 0));
        Some(())
    });
}

#[test]
fn pages_of_a_borrower_that_died_are_freed_after_the_grace_time() {
    let test = "pages_of_a_borrower_that_died_are_freed_after_the_grace_time";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    write_pages(&scratch.directory("source").unwrap().join("file"), PAGES as usize, 12);
    let lender = tcp_lender("2");
    let mount = mount(&scratch, &lender.address);
    fs::read(mount.path.join("file")).unwrap();
    mount.evict(&mount.path.join("file"), PAGES);
    mount.kill_daemon();
    assert!(wait_until(PATIENCE, || lender.count(|of| of.kept_sessions) == 1));
    assert_eq!(lender.count(|of| of.stored_pages), PAGES);
    assert!(
        wait_until(PATIENCE, || lender.count(|of| of.expired_sessions) == 1 && lender.count(|of| of.stored_pages) == 0)
    );
    assert_eq!(lender.count(|of| of.kept_sessions), 0);
}

#[test]
fn umount_frees_at_once() {
    let test = "umount_frees_at_once";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    write_pages(&scratch.directory("source").unwrap().join("file"), PAGES as usize, 13);
    let lender = tcp_lender("600");
    let mount = mount(&scratch, &lender.address);
    fs::read(mount.path.join("file")).unwrap();
    mount.evict(&mount.path.join("file"), PAGES);
    setup::umount(mount.path.to_str().unwrap());
    assert!(wait_until(PATIENCE, || lender.count(|of| of.stored_pages) == 0), "nothing is kept of who said goodbye");
    assert_eq!((lender.count(|of| of.kept_sessions), lender.count(|of| of.expired_sessions)), (0, 0));
}

/// A page's checksum and bytes.
type Kept = (u64, Vec<u8>);

/// A lender that has the key, and keeps what is put. Once it lies, it says that it has kept
/// everything, and mixes it up.
#[derive(Default)]
struct Liar {
    pages: Mutex<HashMap<[u8; 16], Kept>>,
    streams: Mutex<Vec<UnixStream>>,
    lies: AtomicBool,
}

impl Liar {
    fn serve(&self, mut stream: UnixStream) -> std::io::Result<()> {
        let mut channel = Channel::plain();
        loop {
            let mut header = Header::new_zeroed();
            stream.read_exact(header.as_mut_bytes())?;
            let mut body = vec![0; header.body_bytes.get() as usize + channel.extra_bytes()];
            stream.read_exact(&mut body)?;
            if channel.is_sealed() {
                let sealed = ..header.items_bytes() + channel.extra_bytes();
                let mut opened = Vec::new();
                let items = channel.open_head(&header, &body[sealed], &mut opened).unwrap();
                body.splice(sealed, items.iter().copied());
            }
            let mut send = |channel: &Channel, header: &Header, items: &[u8], pages: &[u8]| {
                let mut frame = Vec::new();
                channel.push_head(header, items, &mut frame).unwrap();
                frame.extend_from_slice(pages);
                stream.write_all(&frame)
            };
            let (request, items) = (header.request.get(), usize::from(header.items.get()));
            match header.validate() {
                Ok(Kind::Handshake1) => {
                    let (answer, sealed) = wire::secure::answer(&setup::key(), &body).unwrap();
                    send(&channel, &Header::new(Kind::Handshake2, 0, answer.len(), 0), &answer, &[])?;
                    channel = sealed;
                }
                Ok(Kind::Hello) => {
                    let flags = if self.lies.load(Ordering::SeqCst) { wire::WELCOME_RESUMED } else { 0 };
                    let welcome = wire::Welcome {
                        protocol: wire::PROTOCOL.into(),
                        flags: flags.into(),
                        ..FromZeros::new_zeroed()
                    };
                    let header = Header::new(Kind::Welcome, 0, size_of_val(&welcome), 0);
                    send(&channel, &header, welcome.as_bytes(), &[])?;
                }
                Ok(Kind::Put) => {
                    let (items_read, pages) = <[PutItem]>::ref_from_prefix_with_elems(&body, items).unwrap();
                    let mut kept = self.pages.lock().unwrap();
                    for (item, page) in items_read.iter().zip(pages.chunks(PAGE_SIZE)) {
                        kept.insert(item.key.as_bytes().try_into().unwrap(), (item.checksum.get(), page.to_vec()));
                    }
                    send(&channel, &Header::new(Kind::PutReply, items, items, request), &vec![1; items], &[])?;
                }
                Ok(Kind::Get) => {
                    let keys = <[WireKey]>::ref_from_bytes(&body).unwrap();
                    let kept = self.pages.lock().unwrap();
                    let (mut items, mut pages) = (Vec::new(), Vec::new());
                    for (number, key) in keys.iter().enumerate() {
                        let name: [u8; 16] = key.as_bytes().try_into().unwrap();
                        let own = &kept[&name];
                        let (_, other) = kept.iter().find(|(other, _)| **other != name).unwrap();
                        let (checksum, mut page) = match number % 3 {
                            0 => other.clone(),
                            1 => (own.0, other.1.clone()),
                            _ => own.clone(),
                        };
                        if number % 3 == 2 {
                            page[number] ^= 1;
                        }
                        let status = wire::STATUS_PAGE;
                        items.push(GetItem { status, reserved: [0; 7], checksum: checksum.into() });
                        pages.extend(page);
                    }
                    let header =
                        Header::new(Kind::GetReply, keys.len(), size_of_val(&items[..]) + pages.len(), request);
                    send(&channel, &header, items.as_bytes(), &pages)?;
                }
                _ => {}
            }
        }
    }
}

#[test]
fn a_lender_that_lies_about_what_it_kept_does_no_harm() {
    let test = "a_lender_that_lies_about_what_it_kept_does_no_harm";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let bytes = write_pages(&scratch.directory("source").unwrap().join("file"), PAGES as usize, 14);
        let socket = scratch.path().join("liar");
        let listener = UnixListener::bind(&socket).unwrap();
        let liar = Arc::<Liar>::default();
        let for_thread = liar.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                for_thread.streams.lock().unwrap().push(stream.try_clone().unwrap());
                let liar = for_thread.clone();
                std::thread::spawn(move || liar.serve(stream));
            }
        });
        let (source, at) = (scratch.path().join("source"), scratch.directory("mount").unwrap());
        let address = format!("unix:{}", socket.display());
        let mount = Mount::start(&source, &at, &["--lender", &address, "--fill", "evict"]);
        stalls.add(mount.daemon_pid());
        stalls.add(std::process::id());
        let file = mount.path.join("file");
        assert!(fs::read(&file).unwrap() == bytes);
        mount.evict(&file, PAGES);
        liar.lies.store(true, Ordering::SeqCst);
        for stream in liar.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        wait_back(&mount, 2);
        assert_eq!(mount.count(|of| of.lender_resumes), 1);
        assert!(fs::read(&file).unwrap() == bytes);
        assert_eq!(mount.count(|of| of.lender_pages), 0);
        mount.in_time(stalls)?;
        assert_eq!(mount.count(|of| of.bad_pages), PAGES);
        Some(())
    });
}

/// A file as the borrower sees it.
struct OneFile(fs::File);

impl borrower::BackingFile for OneFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.0.read_at(buf, offset)
    }

    fn stamp(&self) -> std::io::Result<borrower::Stamp> {
        Ok(borrower::Stamp { size_bytes: self.0.metadata()?.len(), mtime_ns: 1, ctime_ns: 1 })
    }
}

/// One READ of a file from its beginning, and its answer.
struct OneRead {
    asked: Option<borrower::ReadRequest<OneFile>>,
    answer: Vec<u8>,
}

impl borrower::Reads<OneFile> for OneRead {
    fn next(&mut self) -> Option<borrower::ReadRequest<OneFile>> {
        self.asked.take()
    }

    fn answer(&mut self, _: usize, read: std::io::Result<&[u8]>) {
        self.answer = read.unwrap().to_vec();
    }
}

#[test]
fn a_successor_resumes_the_session() {
    unless_stalled(|stalls| {
        let scratch = Scratch::new("a_successor_resumes_the_session").unwrap();
        let path = scratch.path().join("file");
        let bytes = write_pages(&path, 64, 15);
        let backing = std::sync::Arc::new(OneFile(fs::File::open(&path).unwrap()));
        let lender = tcp_lender("600");
        stalls.add(lender.process.pid());
        stalls.add(std::process::id());
        let start = |session| {
            let config = borrower::Config {
                lenders: [lender.address.parse::<wire::address::Address>().unwrap().into()].into(),
                strategy: borrower::Strategy::NonInclusive,
                filter: false,
                gate: None,
                session,
                security: borrower::Security::Keyed(setup::key()),
                ..borrower::Config::default()
            };
            let borrower = borrower::Borrower::start(config, None).unwrap();
            assert!(wait_until(PATIENCE, || borrower.lender_is_up()));
            borrower
        };
        let read = |borrower: &borrower::Borrower| {
            let file = borrower.adopt(borrower::FileIdentity { device: 1, inode: 1, generation: 1 });
            let (backing, len) = (backing.clone(), bytes.len());
            let asked = Some(borrower::ReadRequest { file, backing, request: 1, offset: 0, len });
            let mut read = OneRead { asked, answer: Vec::new() };
            borrower.read_all(&mut read, &mut vec![0; len]);
            assert!(read.answer == bytes);
            assert!(wait_until(PATIENCE, || borrower.puts_under_way() == 0 && lender.count(|of| of.stored_pages) == 64));
        };
        let first = start(None);
        read(&first);
        let session = first.stop_for_successor();
        assert!(session.next_version.0 > 64);
        assert!(wait_until(PATIENCE, || lender.count(|of| of.kept_sessions) == 1));
        let second = start(Some(session.clone()));
        assert_eq!((second.metrics().lender_resumes.get(), lender.count(|of| of.stored_pages)), (1, 64));
        // It knows nothing of the pages, so it puts them again, under versions of its own.
        read(&second);
        assert_eq!(second.metrics().get_messages.get(), 0);
        read(&second);
        assert_eq!(second.metrics().bad_pages.get(), 0);
        setup::all_answered(second.metrics().get_failures.get(), stalls)?;
        assert_eq!(second.metrics().lender_pages.get(), 64);
        let next = second.stop_for_successor();
        assert!(next.next_version.0 >= session.next_version.0 + 64 && next.lenders == session.lenders);
        start(Some(next)).stop();
        assert!(wait_until(PATIENCE, || lender.count(|of| of.stored_pages) == 0), "who stops for good frees the pages");
        assert_eq!((lender.count(|of| of.kept_sessions), lender.count(|of| of.expired_sessions)), (0, 0));
        Some(())
    });
}
