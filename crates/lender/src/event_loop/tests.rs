use super::*;
use crate::sessions::Name;
use crate::store::Store;
use page::{FileKey, PageId, Version};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use wire::secure::{Channel, Security};
use wire::{Header, PutItem, WireKey};
use zerocopy::IntoBytes;

fn hub() -> EventLoop {
    let mut store = Store::new(1000).unwrap();
    store.set_headroom_pages(1000);
    EventLoop::new(&Arc::new(Shared::new(store, Duration::ZERO, Security::Trusting).unwrap())).unwrap()
}

/// The far end of a main connection that the event loop has under the next number.
fn connect(hub: &mut EventLoop, name: Name) -> UnixStream {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let stream = Arc::new(Stream::Unix(near));
    let entry = hub.shared.enter(&stream).unwrap();
    let joined = entry.join_main(name, None).unwrap();
    let connection = Connection::new(&hub.shared, Channel::plain(), name, joined, true);
    hub.inbox.count.fetch_add(1, Ordering::Relaxed);
    hub.adopt(Member::new(stream, entry, connection, FrameReader::new()));
    far
}

fn serve(hub: &mut EventLoop, number: usize, now: Instant) {
    hub.act(number, |member, scratch| member.on_event(EventFlags::IN, now, scratch));
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
    let mut hub = hub();
    let mut fars = [1, 2].map(|name| connect(&mut hub, [name; 16]));
    hub.act(0, |_, _| panic!("on purpose"));
    assert!(is_closed(&mut fars[0]) && !is_closed(&mut fars[1]));
    assert_eq!((hub.shared.table.lock().connections(), hub.inbox.count.load(Ordering::Relaxed)), (1, 1));
    fars[1].write_all(&ping()).unwrap();
    serve(&mut hub, 1, Instant::now());
    assert!(fars[1].read(&mut [0; 100]).unwrap() > 0);
    // Another connection has its place.
    connect(&mut hub, [3; 16]);
    assert!(hub.members.len() == 2 && hub.vacant.is_empty());
}

#[test]
fn half_a_frame_has_its_time_and_no_more() {
    let mut hub = hub();
    let mut far = connect(&mut hub, [1; 16]);
    let now = Instant::now();
    far.write_all(&put(2)[..5000]).unwrap();
    serve(&mut hub, 0, now);
    // More bytes do not extend the time limit.
    far.write_all(&put(2)[5000..6000]).unwrap();
    serve(&mut hub, 0, now + RECEIVE_LIMIT / 2);
    hub.look(now + RECEIVE_LIMIT - Duration::from_millis(1));
    assert!(!is_closed(&mut far));
    hub.look(now + RECEIVE_LIMIT);
    assert!(is_closed(&mut far));
    assert_eq!(hub.shared.tally.stuck_connections.load(Ordering::Relaxed), 1);
}

#[test]
fn nothing_is_read_from_who_does_not_take_his_answer() {
    let mut hub = hub();
    let mut far = connect(&mut hub, [1; 16]);
    let now = Instant::now();
    // Until the answers fill the socket.
    while hub.members[0].as_ref().unwrap().unsent.is_none() {
        far.write_all(&ping()).unwrap();
        serve(&mut hub, 0, now);
    }
    let armed = hub.members[0].as_ref().unwrap().armed;
    assert_eq!(armed, EventFlags::OUT);
    // The peer takes them late.
    let mut answers = 0;
    while let Ok(bytes) = far.read(&mut [0; 4096]) {
        answers += bytes;
        serve(&mut hub, 0, now);
    }
    assert_eq!(answers % 24, 0, "whole answers");
    assert_eq!(hub.members[0].as_ref().unwrap().armed, EventFlags::IN);
    // And then takes no more.
    while hub.members[0].as_ref().unwrap().unsent.is_none() {
        far.write_all(&ping()).unwrap();
        serve(&mut hub, 0, now);
    }
    hub.look(now + SEND_LIMIT);
    assert!(hub.members[0].is_none());
    assert_eq!(hub.shared.tally.stuck_connections.load(Ordering::Relaxed), 1);
}

#[test]
fn memory_goes_round_and_large_pieces_go() {
    let mut hub = hub();
    let mut fars: Vec<_> = (1..=8).map(|name| connect(&mut hub, [name; 16])).collect();
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
            while hub.shared.store.lock().counters().puts < 40 * (number as u64 + 1) {
                serve(&mut hub, number, now);
            }
        });
        // The frame that has begun, if it did not arrive with the rest.
        serve(&mut hub, number, now);
    }
    let holding: Vec<_> = hub.members.iter().flatten().map(|member| !member.reader.has_no_buffer()).collect();
    assert_eq!(holding, [false, false, false, true, false, false, false, false]);
    assert!((1..=SPARE_BUFFERS_MAX).contains(&hub.scratch.spare_buffers.len()));
    // However long a frame is, no receive buffer has to be larger; an answer may need one.
    assert_eq!(hub.scratch.shrink_at, None);
    hub.scratch.out.give(Vec::with_capacity(1 << 20));
    hub.scratch.take_back(Vec::new(), now);
    assert_eq!(hub.scratch.shrink_at, Some(now + LARGE_BUFFERS_KEPT));
    hub.scratch.shrink();
    assert!(hub.scratch.spare_buffers.is_empty());
}

#[test]
fn half_a_put_holds_slots_only_as_long_as_its_connection() {
    let mut hub = hub();
    let mut far = connect(&mut hub, [1; 16]);
    let now = Instant::now();
    far.write_all(&put(40)[..100_000]).unwrap();
    serve(&mut hub, 0, now);
    let pages = |hub: &EventLoop| {
        let store = hub.shared.store.lock();
        (store.reserved_pages(), store.stored_pages(), store.warm_pages())
    };
    assert_eq!(pages(&hub), (40, 0, 0));
    assert!(hub.members[0].as_ref().unwrap().reader.has_no_buffer(), "nothing of it is held elsewhere");
    // More bytes do not extend the time limit.
    far.write_all(&put(40)[100_000..120_000]).unwrap();
    serve(&mut hub, 0, now + RECEIVE_LIMIT / 2);
    hub.look(now + RECEIVE_LIMIT);
    assert!(is_closed(&mut far));
    assert_eq!(pages(&hub), (0, 0, 40));
}
