//! One client of page servers in two dialects: the pool's protocol and memcached's. Requests are
//! made before they are timed, and the length of each response is known. So the client's work is
//! the same for both: write a request, read its response, check one page.
//!
//! Each session has a connection for puts and one for gets, as a borrower has. One thread serves
//! all sessions: it sends a request on each connection, then receives the responses in the same
//! order. So a server always has as many pending requests as there are sessions, and the server's
//! core is measured.

use crate::worker::Report;
use page::{FileKey, PAGE_SIZE, PageId, Version};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use wire::{GetItem, Header, Hello, Kind, PutItem, WireKey};
use zerocopy::{FromBytes, IntoBytes};

/// A server that takes longer for a response counts as failed.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dialect {
    /// The pool's, without a key.
    Pool,
    /// memcached's text protocol.
    Memcached,
}

/// The parameters of a measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PageLoad {
    /// The address of the server.
    pub address: String,
    /// Its protocol.
    pub dialect: Dialect,
    /// Sessions, with pages of their own each.
    pub sessions: u32,
    /// Pages of a session.
    pub pages: u32,
    /// Pages of a request.
    pub batch: u32,
    /// The duration of the gets, and then of the puts.
    pub ms: u64,
    /// The seed of the chosen pages.
    pub seed: u64,
}

/// A request and the known parts of its response.
struct PageRequest {
    request: Vec<u8>,
    answer_bytes: usize,
    /// The place of the first page in the response to a get.
    page_at: usize,
}

/// Puts all pages, then measures gets of stored pages, then puts of pages that replace them. The
/// report's `phase_seconds` are those of one page: of a get, and of a put.
pub fn ask(load: &PageLoad) -> Result<Report, String> {
    let problem = |error: io::Error| format!("asking {} in {:?}: {error}", load.address, load.dialect);
    let mut sessions = Vec::new();
    for number in 0..load.sessions {
        sessions.push(Session::connect(load, number).map_err(problem)?);
    }
    let mut random = fastrand::Rng::with_seed(load.seed);
    for first in (0..load.pages).step_by(load.batch as usize) {
        let page_requests = sessions.iter_mut().map(|session| session.put(first, load.batch)).collect::<Vec<_>>();
        run(&mut sessions, &page_requests, true).map_err(problem)?;
    }
    let mut report = Report::default();
    let limit = Duration::from_millis(load.ms);
    for puts in [false, true] {
        let (mut busy, mut pages) = (Duration::ZERO, 0);
        while busy < limit {
            let first = random.u32(..=load.pages - load.batch);
            let page_request = |session: &mut Session| {
                if puts { session.put(first, load.batch) } else { session.get(first, load.batch) }
            };
            let page_requests: Vec<_> = sessions.iter_mut().map(page_request).collect();
            busy += run(&mut sessions, &page_requests, puts).map_err(problem)?;
            pages += u64::from(load.batch * load.sessions);
        }
        report.phase_seconds.push(busy.as_secs_f64() / pages as f64);
        report.operations += pages;
        report.seconds += busy.as_secs_f64();
    }
    Ok(report)
}

/// Makes one exchange with each session. Returns the time of all together.
fn run(sessions: &mut [Session], page_requests: &[PageRequest], puts: bool) -> io::Result<Duration> {
    let begin = Instant::now();
    for (session, page_request) in sessions.iter_mut().zip(page_requests) {
        session.stream(puts).write_all(&page_request.request)?;
    }
    for (session, page_request) in sessions.iter_mut().zip(page_requests) {
        session.take(page_request, puts)?;
    }
    Ok(begin.elapsed())
}

struct Session {
    dialect: Dialect,
    number: u32,
    puts: TcpStream,
    gets: TcpStream,
    answer: Vec<u8>,
    version: u64,
    page: [u8; PAGE_SIZE],
}

impl Session {
    fn connect(load: &PageLoad, number: u32) -> io::Result<Session> {
        let stream = |role: u32| {
            let mut stream = TcpStream::connect(&load.address)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_MAX))?;
            if load.dialect == Dialect::Pool {
                handshake(&mut stream, role, number)?;
            }
            Ok::<_, io::Error>(stream)
        };
        let page = page_of(number);
        let (puts, gets) = (stream(wire::ROLE_MAIN)?, stream(wire::ROLE_GET)?);
        Ok(Session { dialect: load.dialect, number, puts, gets, answer: Vec::new(), version: 1, page })
    }

    fn stream(&mut self, puts: bool) -> &mut TcpStream {
        if puts { &mut self.puts } else { &mut self.gets }
    }

    /// A key of memcached: as long as the pool's keys.
    fn name(&self, index: u32) -> String {
        format!("{:04}-{index:011}", self.number)
    }

    fn key(&self, index: u32) -> WireKey {
        WireKey::new(PageId { file: FileKey(1), index }, Version(self.version))
    }

    fn get(&mut self, first: u32, count: u32) -> PageRequest {
        let indices = first..first + count;
        match self.dialect {
            Dialect::Pool => {
                let keys: Vec<WireKey> = indices.map(|index| self.key(index)).collect();
                let header = Header::new(Kind::Get, keys.len(), size_of_val(&*keys), 1);
                let page_at = size_of::<Header>() + keys.len() * size_of::<GetItem>();
                let answer_bytes = page_at + keys.len() * PAGE_SIZE;
                PageRequest { request: [header.as_bytes(), keys.as_bytes()].concat(), answer_bytes, page_at }
            }
            Dialect::Memcached => {
                let names = indices.map(|index| self.name(index)).collect::<Vec<_>>();
                let head_bytes = self.value_head(first).len();
                PageRequest {
                    request: format!("get {}\r\n", names.join(" ")).into_bytes(),
                    answer_bytes: names.len() * (head_bytes + PAGE_SIZE + "\r\n".len()) + "END\r\n".len(),
                    page_at: head_bytes,
                }
            }
        }
    }

    fn put(&mut self, first: u32, count: u32) -> PageRequest {
        let indices = first..first + count;
        match self.dialect {
            Dialect::Pool => {
                let items = count as usize;
                let header = Header::new(Kind::Put, items, items * (size_of::<PutItem>() + PAGE_SIZE), 1);
                let mut request = header.as_bytes().to_vec();
                // Borrowers make and check the seal: a lender only returns it with the page.
                indices
                    .clone()
                    .map(|index| PutItem { key: self.key(index), checksum: u64::from(index).into() })
                    .for_each(|item| {
                        request.extend_from_slice(item.as_bytes());
                    });
                indices.for_each(|_| request.extend_from_slice(&self.page));
                PageRequest { request, answer_bytes: size_of::<Header>() + items, page_at: 0 }
            }
            Dialect::Memcached => {
                let mut request = Vec::new();
                for index in indices.clone() {
                    let quiet = if index + 1 < indices.end { " noreply" } else { "" };
                    request
                        .extend_from_slice(format!("set {} 0 0 {PAGE_SIZE}{quiet}\r\n", self.name(index)).as_bytes());
                    request.extend_from_slice(&self.page);
                    request.extend_from_slice(b"\r\n");
                }
                PageRequest { request, answer_bytes: "STORED\r\n".len(), page_at: 0 }
            }
        }
    }

    fn value_head(&self, index: u32) -> String {
        format!("VALUE {} 0 {PAGE_SIZE}\r\n", self.name(index))
    }

    /// Reads a response, and checks whether it is the expected one.
    fn take(&mut self, page_request: &PageRequest, puts: bool) -> io::Result<()> {
        let mut answer = std::mem::take(&mut self.answer);
        answer.resize(page_request.answer_bytes, 0);
        self.stream(puts).read_exact(&mut answer)?;
        let good = match (self.dialect, puts) {
            (_, false) => answer[page_request.page_at..][..PAGE_SIZE] == self.page,
            (Dialect::Pool, true) => answer[size_of::<Header>()..].iter().all(|status| *status == 1),
            (Dialect::Memcached, true) => answer == b"STORED\r\n",
        };
        self.answer = answer;
        if good { Ok(()) } else { Err(io::Error::other("a page is not there, or another one, or was not stored")) }
    }
}

/// The content of all pages of a session.
pub fn page_of(session: u32) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    fastrand::Rng::with_seed(u64::from(session)).fill(&mut page);
    page
}

/// The number of a session with that name in the pool's handshake.
pub fn number_of(name: [u8; 16]) -> u32 {
    let [first, second, third, fourth, ..] = name;
    u32::from_le_bytes([first, second, third, fourth])
}

/// The pool's handshake.
fn handshake(stream: &mut TcpStream, role: u32, session: u32) -> io::Result<()> {
    let mut name = [7; 16];
    name[..4].copy_from_slice(&session.to_le_bytes());
    let hello = Hello { magic: wire::MAGIC, protocol: wire::PROTOCOL.into(), role: role.into(), session: name };
    let header = Header::new(Kind::Hello, 0, size_of::<Hello>(), 0);
    stream.write_all(&[header.as_bytes(), hello.as_bytes()].concat())?;
    let mut answer = [0; size_of::<Header>() + size_of::<wire::Welcome>()];
    stream.read_exact(&mut answer)?;
    let kind = Header::read_from_prefix(&answer).ok().and_then(|(header, _)| header.validate().ok());
    if kind == Some(Kind::Welcome) { Ok(()) } else { Err(io::Error::other("the lender refuses")) }
}
