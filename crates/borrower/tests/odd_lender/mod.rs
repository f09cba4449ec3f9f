//! A lender that can be made to misbehave, a file in memory, and READs of it.
#![allow(dead_code)] // each test takes what it needs

use borrower::{BackingFile, Borrower, File, LenderAddress, ReadRequest, Reads, Stamp};
use page::{PAGE_SIZE, Page};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;
use wire::address::Address;
use wire::{GetItem, Header, Kind, PutItem, WireKey};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Starts a real lender, of 1 MiB.
pub fn real_lender() -> lender::Server {
    let config = lender::Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        capacity: lender::Capacity::Bytes(1 << 20),
        reserve_bytes: 1 << 20,
        grace: lender::GRACE_DEFAULT,
        limits: lender::Limits::default(),
        security: lender::Security::Trusting,
    };
    lender::Server::bind(config).unwrap()
}

/// A backing file in memory.
pub struct InMemory {
    pub content: RwLock<Vec<u8>>,
    /// The number of times that it was read.
    pub reads: AtomicUsize,
}

impl InMemory {
    /// Returns a file with these bytes.
    pub fn new(bytes: Vec<u8>) -> InMemory {
        InMemory { content: bytes.into(), reads: AtomicUsize::new(0) }
    }

    /// Returns the file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.content.read().unwrap().clone()
    }
}

impl BackingFile for InMemory {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        (&self.content.read().unwrap()[offset as usize..]).read(buf)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        Ok(Stamp { size_bytes: self.content.read().unwrap().len() as u64, mtime_ns: 1, ctime_ns: 1 })
    }
}

/// Makes READs of `len` bytes at each of these offsets, which are all available at once. Returns
/// their answers.
pub fn read(
    borrower: &Borrower,
    file: &Arc<File>,
    backing: &Arc<InMemory>,
    offsets: &[u64],
    len: usize,
) -> Vec<Vec<u8>> {
    read_as(borrower, file, backing, offsets, len, false)
}

/// Makes READs as [`read`] does. `is_eager`: further requests are sent before earlier ones are
/// answered.
pub fn read_as(
    borrower: &Borrower,
    file: &Arc<File>,
    backing: &Arc<InMemory>,
    offsets: &[u64],
    len: usize,
    is_eager: bool,
) -> Vec<Vec<u8>> {
    let answers = vec![None; offsets.len()];
    let mut all = There { file, backing, offsets, len, is_eager, taken: 0, taken_before: 0, answers };
    let mut buf = vec![0; 1 << 20];
    while all.taken < offsets.len() {
        all.taken_before = all.taken;
        borrower.read_all(&mut all, &mut buf);
        assert!(all.answers[..all.taken].iter().all(Option::is_some), "one that was taken was not answered");
    }
    all.answers.into_iter().map(Option::unwrap).collect()
}

struct There<'a> {
    file: &'a Arc<File>,
    backing: &'a Arc<InMemory>,
    offsets: &'a [u64],
    len: usize,
    is_eager: bool,
    taken: usize,
    taken_before: usize,
    answers: Vec<Option<Vec<u8>>>,
}

impl Reads<InMemory> for There<'_> {
    fn next(&mut self) -> Option<ReadRequest<InMemory>> {
        let offset = *self.offsets.get(self.taken)?;
        self.taken += 1;
        let (file, backing) = (self.file.clone(), self.backing.clone());
        Some(ReadRequest { file, backing, request: self.taken as u64, offset, len: self.len })
    }

    fn wait_beside(&mut self, _answer: BorrowedFd<'_>, _limit: Duration) -> bool {
        self.is_eager && self.taken < self.offsets.len()
    }

    fn answer(&mut self, nth: usize, read: io::Result<&[u8]>) {
        let answer = self.answers[self.taken_before + nth].replace(read.unwrap().to_vec());
        assert!(answer.is_none(), "answered twice");
    }
}

/// The lender's behaviour when it answers gets.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Manner {
    #[default]
    Honest,
    /// The lender returns pages with one bit flipped.
    FlipsABit,
    /// The lender has only every other page of a request.
    Forgets,
    /// The lender does not answer until it gets another behaviour.
    KeepsQuiet,
    /// The lender closes the connection.
    HangsUp,
}

/// A lender that stores pages, and returns them according to its behaviour.
#[derive(Default)]
pub struct OddLender {
    pages: Mutex<HashMap<[u8; 16], (u64, Page)>>,
    pub connections: AtomicUsize,
    /// The number of gets that have arrived.
    pub gets: AtomicUsize,
    manner: Mutex<Manner>,
    /// The time that a ping takes.
    pong_after: Duration,
}

impl OddLender {
    /// Starts the lender on that socket, for as long as the process runs.
    pub fn listen(socket: &Path, pong_after: Duration) -> (Arc<OddLender>, LenderAddress) {
        let listener = UnixListener::bind(socket).unwrap();
        let lender = Arc::new(OddLender { pong_after, ..OddLender::default() });
        let for_thread = lender.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                for_thread.connections.fetch_add(1, Ordering::SeqCst);
                let lender = for_thread.clone();
                std::thread::spawn(move || lender.serve(stream));
            }
        });
        (lender, Address::Unix(socket.to_owned()).into())
    }

    /// Sets the behaviour from now on.
    pub fn behave(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
    }

    fn manner(&self) -> Manner {
        *self.manner.lock().unwrap()
    }

    fn answer(&self, keys: &[WireKey], manner: Manner) -> Vec<u8> {
        let kept = self.pages.lock().unwrap();
        let (mut answer, mut pages) = (Vec::new(), Vec::new());
        for (nth, key) in keys.iter().enumerate() {
            let (checksum, mut page) = kept[key.as_bytes()];
            let is_there = manner != Manner::Forgets || nth % 2 == 0;
            let status = if is_there { wire::STATUS_PAGE } else { wire::STATUS_MISS };
            answer.extend_from_slice(GetItem { status, reserved: [0; 7], checksum: checksum.into() }.as_bytes());
            page[99] ^= if manner == Manner::FlipsABit { 4 } else { 0 };
            pages.extend_from_slice(if is_there { &page } else { &[] });
        }
        [answer, pages].concat()
    }

    fn serve(&self, mut stream: UnixStream) -> io::Result<()> {
        loop {
            let mut header = Header::new_zeroed();
            stream.read_exact(header.as_mut_bytes())?;
            let mut body = vec![0; header.body_bytes.get() as usize];
            stream.read_exact(&mut body)?;
            let (items, request) = (usize::from(header.items.get()), header.request.get());
            let (kind, answer) = match header.validate().map_err(io::Error::other)? {
                Kind::Hello => {
                    let mut welcome = wire::Welcome::new_zeroed();
                    (welcome.protocol, welcome.capacity_pages) = (wire::PROTOCOL.into(), 1000u64.into());
                    (Kind::Welcome, welcome.as_bytes().to_vec())
                }
                Kind::Put => {
                    let (items, pages) = <[PutItem]>::ref_from_prefix_with_elems(&body, items).unwrap();
                    let mut kept = self.pages.lock().unwrap();
                    for (item, page) in items.iter().zip(pages.as_chunks::<PAGE_SIZE>().0) {
                        kept.insert(item.key.as_bytes().try_into().unwrap(), (item.checksum.get(), *page));
                    }
                    (Kind::PutReply, vec![1; items.len()])
                }
                Kind::Get => {
                    self.gets.fetch_add(1, Ordering::SeqCst);
                    while self.manner() == Manner::KeepsQuiet {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    if self.manner() == Manner::HangsUp {
                        return Ok(());
                    }
                    (Kind::GetReply, self.answer(<[WireKey]>::ref_from_bytes(&body).unwrap(), self.manner()))
                }
                Kind::Ping => {
                    std::thread::sleep(self.pong_after);
                    (Kind::Pong, 1000u64.to_le_bytes().to_vec())
                }
                Kind::Bye => return Ok(()),
                _ => continue,
            };
            let items = if matches!(kind, Kind::PutReply | Kind::GetReply) { items } else { 0 };
            let header = Header::new(kind, items, answer.len(), request);
            stream.write_all(&[header.as_bytes(), &answer].concat())?;
        }
    }
}
