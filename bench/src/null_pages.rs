//! The floor of a page server, in a process of its own: one thread that receives as many bytes as
//! the pool's protocol has, answers with as many, and stores nothing. Its memory stays in the
//! processor's caches, so its speed is that of the kernel, one client and one server core.

use crate::dialects;
use page::PAGE_SIZE;
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use testbed::Failure;
use wire::{GetItem, Header, Hello, Kind, Welcome};
use zerocopy::{FromBytes, IntoBytes};

/// The subcommand.
pub const NAME: &str = "null-pages";
/// Received at once.
const RECEIVED_BYTES: usize = 256 << 10;
/// The maximum number of connections with events.
const EVENTS_MAX: usize = 64;
/// Polls, as the lender does while requests arrive.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// The listener's key; connections have their numbers.
const LISTENER: u64 = u64::MAX;

/// Runs the process: prints READY and its address, and serves until it is killed.
pub fn run() -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(io::Error::from)?;
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN).map_err(io::Error::from)?;
    println!("READY {}", listener.local_addr()?);
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut buffer = vec![0; RECEIVED_BYTES];
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS_MAX);
    let mut open_clients = 0;
    loop {
        events.clear();
        let timeout = if open_clients == 0 { None } else { Some(&NOW) };
        epoll::wait(&epoll, spare_capacity(&mut events), timeout).map_err(io::Error::from)?;
        for event in &events {
            let number = event.data.u64();
            if number == LISTENER {
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                let data = EventData::new_u64(clients.len() as u64);
                epoll::add(&epoll, &stream, data, EventFlags::IN).map_err(io::Error::from)?;
                clients.push(Some(Client::new(stream)));
                open_clients += 1;
            } else if let Some(client) = &mut clients[number as usize]
                && !client.serve(&mut buffer)?
            {
                // A closed connection leaves the epoll.
                clients[number as usize] = None;
                open_clients -= 1;
            }
        }
    }
}

/// A connection.
struct Client {
    stream: TcpStream,
    /// The header of the arriving frame and, except for a Put, its body.
    head: Vec<u8>,
    /// Bytes of a Put that are still to arrive, and its header.
    put: Option<(usize, Header)>,
    /// The content of the received pages.
    page: [u8; PAGE_SIZE],
    /// The last response to a get, whole.
    answer: Vec<u8>,
}

impl Client {
    fn new(stream: TcpStream) -> Client {
        Client { stream, head: Vec::new(), put: None, page: [0; PAGE_SIZE], answer: Vec::new() }
    }

    /// Receives available bytes. Returns false if the client has closed.
    fn serve(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        match recv(&self.stream, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(false),
            Ok((_, count)) => self.take(&buffer[..count]).map(|()| true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if let Some((left, header)) = &mut self.put {
                let (now, later) = bytes.split_at(bytes.len().min(*left));
                (*left, bytes) = (*left - now.len(), later);
                if *left == 0 {
                    let items = usize::from(header.items.get());
                    let answer = Header::new(Kind::PutReply, items, items, header.request.get());
                    self.put = None;
                    self.stream.write_all(&[answer.as_bytes(), &vec![1; items]].concat())?;
                }
                continue;
            }
            let wanted = match Header::read_from_prefix(&self.head) {
                Ok((header, _)) => size_of::<Header>() + header.body_bytes.get() as usize,
                Err(_) => size_of::<Header>(),
            };
            let (now, later) = bytes.split_at(bytes.len().min(wanted - self.head.len()));
            self.head.extend_from_slice(now);
            bytes = later;
            self.look()?;
        }
        Ok(())
    }

    /// Answers the frame, if it is whole.
    fn look(&mut self) -> io::Result<()> {
        let Ok((header, body)) = Header::read_from_prefix(&self.head) else { return Ok(()) };
        let kind = header.validate().map_err(io::Error::other)?;
        if kind == Kind::Put {
            self.put = Some((header.body_bytes.get() as usize, header));
        } else if body.len() < header.body_bytes.get() as usize {
            return Ok(());
        } else if kind == Kind::Get {
            self.give(&header)?;
        } else if let Ok(hello) = Hello::ref_from_bytes(body) {
            self.page = dialects::page_of(dialects::number_of(hello.session));
            let welcome =
                Welcome { protocol: hello.protocol, flags: 0.into(), incarnation: 1.into(), capacity_pages: 1.into() };
            let answer = Header::new(Kind::Welcome, 0, size_of::<Welcome>(), header.request.get());
            self.stream.write_all(&[answer.as_bytes(), welcome.as_bytes()].concat())?;
        }
        self.head.clear();
        Ok(())
    }

    fn give(&mut self, header: &Header) -> io::Result<()> {
        let items = usize::from(header.items.get());
        let body_bytes = items * (size_of::<GetItem>() + PAGE_SIZE);
        let answer = Header::new(Kind::GetReply, items, body_bytes, header.request.get());
        if self.answer.len() != size_of::<Header>() + body_bytes {
            let item = GetItem { status: wire::STATUS_PAGE, reserved: [0; 7], checksum: 0.into() };
            self.answer = [answer.as_bytes(), &item.as_bytes().repeat(items), &self.page.repeat(items)].concat();
        }
        self.answer[..size_of::<Header>()].copy_from_slice(answer.as_bytes());
        self.stream.write_all(&self.answer)
    }
}
