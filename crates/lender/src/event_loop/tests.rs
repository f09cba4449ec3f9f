use super::*;
use crate::sessions::Name;
use crate::store::Store;
use page::{FileKey, PageId, Version};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use wire::secure::{Channel, Security};
use wire::{Header, PutItem, WireKey};
use zerocopy::IntoBytes;

fn event_loop() -> EventLoop {
    let mut store = Store::new(1000).unwrap();
    store.set_available_pages(1000);
    EventLoop::new(&Arc::new(Shared::new(store, Duration::ZERO, Security::Trusting).unwrap())).unwrap()
}

/// The far end of a main connection that the event loop has under the next number.
fn connect(event_loop: &mut EventLoop, name: Name) -> UnixStream {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let stream = Arc::new(Stream::Unix(near));
    let entry = event_loop.shared.enter(&stream).unwrap();
    let joined = entry.join_main(name, None).unwrap();
    let connection = Connection::new(&event_loop.shared, Channel::plain(), name, joined, true);
    event_loop.inbox.count.fetch_add(1, Ordering::Relaxed);
    event_loop.adopt(LoopConnection::new(stream, entry, connection, FrameReader::new()));
    far
}

fn serve(event_loop: &mut EventLoop, number: usize, now: Instant) {
    event_loop.dispatch(number, |connection, scratch| connection.on_event(EventFlags::IN, now, scratch));
}

fn put(pages: usize) -> Vec<u8> {
    let name = |at| WireKey::new(PageId { file: FileKey(1), index: at as u32 }, Version(1));
    let items: Vec<_> = (0..pages).map(|at| PutItem { key: name(at), checksum: 7.into() }).collect();
    let pages = vec![7; pages * page::PAGE_SIZE];
    let body_bytes = size_of_val(&*items) + pages.len();
    [Header::new(Kind::Put, items.len(), body_bytes, 1).as_bytes(), items.as_bytes(), &pages].concat()
}

fn ping() -> Vec<u8> {
    Header::new(Kind::Ping, 0, 0, 1).as_bytes().to_vec()
}

fn is_closed(far: &mut UnixStream) -> bool {
    far.read_to_end(&mut Vec::new()).is_ok()
}

#[test]
fn a_panic_ends_one_connection() {
    let mut event_loop = event_loop();
    let mut fars = [1, 2].map(|name| connect(&mut event_loop, [name; 16]));
    event_loop.dispatch(0, |_, _| panic!("on purpose"));
    assert!(is_closed(&mut fars[0]) && !is_closed(&mut fars[1]));
    assert_eq!((event_loop.shared.table.lock().connections(), event_loop.inbox.count.load(Ordering::Relaxed)), (1, 1));
    fars[1].write_all(&ping()).unwrap();
    serve(&mut event_loop, 1, Instant::now());
    assert!(fars[1].read(&mut [0; 100]).unwrap() > 0);
    // Another connection has its place.
    connect(&mut event_loop, [3; 16]);
    assert!(event_loop.connections.len() == 2 && event_loop.vacant.is_empty());
}

#[test]
fn half_a_frame_has_its_time_and_no_more() {
    let mut event_loop = event_loop();
    let mut far = connect(&mut event_loop, [1; 16]);
    let now = Instant::now();
    far.write_all(&put(2)[..5000]).unwrap();
    serve(&mut event_loop, 0, now);
    // More bytes do not extend the time limit.
    far.write_all(&put(2)[5000..6000]).unwrap();
    serve(&mut event_loop, 0, now + RECEIVE_LIMIT / 2);
    event_loop.look(now + RECEIVE_LIMIT - Duration::from_millis(1));
    assert!(!is_closed(&mut far));
    event_loop.look(now + RECEIVE_LIMIT);
    assert!(is_closed(&mut far));
    assert_eq!(event_loop.shared.statistics.stuck_connections.load(Ordering::Relaxed), 1);
}

#[test]
fn nothing_is_read_from_a_peer_that_takes_no_answer() {
    let mut event_loop = event_loop();
    let mut far = connect(&mut event_loop, [1; 16]);
    let now = Instant::now();
    // Until the answers fill the socket.
    while event_loop.connections[0].as_ref().unwrap().unsent.is_none() {
        far.write_all(&ping()).unwrap();
        serve(&mut event_loop, 0, now);
    }
    let armed = event_loop.connections[0].as_ref().unwrap().armed;
    assert_eq!(armed, EventFlags::OUT);
    // The peer takes them late.
    let mut answers = 0;
    while let Ok(bytes) = far.read(&mut [0; 4096]) {
        answers += bytes;
        serve(&mut event_loop, 0, now);
    }
    assert_eq!(answers % 24, 0, "whole answers");
    assert_eq!(event_loop.connections[0].as_ref().unwrap().armed, EventFlags::IN);
    // And then takes no more.
    while event_loop.connections[0].as_ref().unwrap().unsent.is_none() {
        far.write_all(&ping()).unwrap();
        serve(&mut event_loop, 0, now);
    }
    event_loop.look(now + SEND_LIMIT);
    assert!(event_loop.connections[0].is_none());
    assert_eq!(event_loop.shared.statistics.stuck_connections.load(Ordering::Relaxed), 1);
}

#[test]
fn memory_goes_round_and_large_pieces_go() {
    let mut event_loop = event_loop();
    let mut fars: Vec<_> = (1..=8).map(|name| connect(&mut event_loop, [name; 16])).collect();
    let now = Instant::now();
    for (number, far) in fars.iter_mut().enumerate() {
        let (first, second) = (put(40), put(1));
        // One connection has begun another frame.
        let more = if number == 3 { &second[..10] } else { &[] };
        let mut writer = far.try_clone().unwrap();
        writer.set_nonblocking(false).unwrap();
        let bytes = [&first, more].concat();
        std::thread::scope(|scope| {
            scope.spawn(move || writer.write_all(&bytes).unwrap());
            while event_loop.shared.store.lock().counters().puts < 40 * (number as u64 + 1) {
                serve(&mut event_loop, number, now);
            }
        });
        // The frame that has begun, if it did not arrive with the rest.
        serve(&mut event_loop, number, now);
    }
    let holding: Vec<_> =
        event_loop.connections.iter().flatten().map(|connection| !connection.reader.has_no_buffer()).collect();
    assert_eq!(holding, [false, false, false, true, false, false, false, false]);
    assert!((1..=SPARE_BUFFERS_MAX).contains(&event_loop.scratch.spare_buffers.len()));
    // However long a frame is, no receive buffer has to be larger; an answer may need one.
    assert_eq!(event_loop.scratch.shrink_at, None);
    event_loop.scratch.out.give(Vec::with_capacity(1 << 20));
    event_loop.scratch.take_back(Vec::new(), now);
    assert_eq!(event_loop.scratch.shrink_at, Some(now + LARGE_BUFFERS_KEPT));
    event_loop.scratch.shrink();
    assert!(event_loop.scratch.spare_buffers.is_empty());
}

#[test]
fn half_a_put_holds_slots_only_as_long_as_its_connection() {
    let mut event_loop = event_loop();
    let mut far = connect(&mut event_loop, [1; 16]);
    let now = Instant::now();
    far.write_all(&put(40)[..100_000]).unwrap();
    serve(&mut event_loop, 0, now);
    let pages = |event_loop: &EventLoop| {
        let store = event_loop.shared.store.lock();
        (store.reserved_pages(), store.stored_pages(), store.free_resident_pages())
    };
    assert_eq!(pages(&event_loop), (40, 0, 0));
    assert!(event_loop.connections[0].as_ref().unwrap().reader.has_no_buffer(), "nothing of it is held elsewhere");
    // More bytes do not extend the time limit.
    far.write_all(&put(40)[100_000..120_000]).unwrap();
    serve(&mut event_loop, 0, now + RECEIVE_LIMIT / 2);
    event_loop.look(now + RECEIVE_LIMIT);
    assert!(is_closed(&mut far));
    assert_eq!(pages(&event_loop), (0, 0, 40));
}
