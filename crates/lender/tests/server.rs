//! The server over real sockets, with good borrowers and bad ones.

mod client;

use client::{Client, Lender, WAIT_MAX, config, hello, key, page_of};
use page::ZERO_PAGE;
use std::io::Write;
use std::time::Duration;
use wire::{GET_EXCLUSIVE, Header, Kind, ROLE_GET, ROLE_MAIN, STATUS_MISS, STATUS_PAGE, STATUS_ZERO};
use zerocopy::IntoBytes;

/// Runs the test on TCP and on a Unix socket.
fn on_both(capacity_pages: u64, test: impl Fn(&Lender)) {
    test(&Lender::tcp(capacity_pages));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lender");
    let lender = Lender::start(config(&format!("unix:{}", path.display()), capacity_pages));
    test(&lender);
    drop(lender);
    assert!(!path.exists(), "the socket's file is removed");
}

#[test]
fn two_sessions_each_with_its_own_pages() {
    on_both(10_000, |lender| {
        let mut main = [Client::connect(&lender.address, ROLE_MAIN, 1), Client::connect(&lender.address, ROLE_MAIN, 2)];
        let mut get = [Client::connect(&lender.address, ROLE_GET, 1), Client::connect(&lender.address, ROLE_GET, 2)];
        let keys: Vec<_> = (0..600).map(|index| key(index, 1)).collect();
        assert_eq!(main[0].put(&keys[..400]), 400);
        assert_eq!(main[1].put(&keys[300..]), 300);
        assert_eq!(get[0].hits(&keys), 400);
        assert_eq!(get[1].hits(&keys), 300);
        // Another version is a miss, and so is a page of another session.
        assert_eq!(get[0].get(&[key(0, 2), key(0, 1), key(599, 1)], 0), [STATUS_MISS, STATUS_PAGE, STATUS_MISS]);
        // Pages that were dropped or taken are gone, for that session only.
        main[0].drop_keys(&keys[300..310]);
        main[0].ping();
        assert_eq!((get[0].hits(&keys), get[1].hits(&keys)), (390, 300));
        assert_eq!(get[1].get(&keys[300..302], GET_EXCLUSIVE), [STATUS_PAGE; 2]);
        assert_eq!(get[1].get(&keys[299..303], 0), [STATUS_MISS, STATUS_MISS, STATUS_MISS, STATUS_PAGE]);
        // A page of zeros is sent as one byte.
        main[0].put_pages(&[(key(900, 1), ZERO_PAGE), (key(901, 1), page_of(&key(901, 1)))]);
        assert_eq!(get[0].get(&[key(900, 1), key(901, 1)], 0), [STATUS_ZERO, STATUS_PAGE]);

        let status = lender.handle.status();
        assert_eq!((status.borrowers, status.connections), (2, 4));
        assert_eq!((status.stored_pages, status.zero_pages), (390 + 298 + 1, 1));
        assert_eq!(status.borrower_list[1].name, "02020202");
        assert_eq!(status.puts, 702);
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!((&json["puts_refused"], &json["borrower_list"][0]["puts"]), (&0.into(), &402.into()));

        // The session ends with its main connection: its other connections end, and without a grace
        // time its pages are freed.
        let [mut get_1, get_2] = get;
        let [main_1, main_2] = main;
        drop(main_1);
        assert!(get_1.is_closed());
        let status = lender.wait_for("the first is gone", |status| status.borrowers == 1 && status.connections == 2);
        assert_eq!(status.stored_pages, 298);
        drop((get_2, main_2));
        let status = lender.wait_for("everybody is gone", |status| status.connections == 0);
        assert_eq!((status.borrowers, status.stored_pages, status.zero_pages), (0, 0, 0));
        // The same name is a new session.
        let _main = Client::connect(&lender.address, ROLE_MAIN, 1);
        assert_eq!(Client::connect(&lender.address, ROLE_GET, 1).hits(&keys), 0);
    });
}

#[test]
fn replaced_pages_are_notified() {
    let lender = Lender::tcp(300);
    let mut main = Client::connect(&lender.address, ROLE_MAIN, 1);
    let keys: Vec<_> = (0..700).map(|index| key(index, 1)).collect();
    assert_eq!(main.put(&keys), 700);
    lender.wait_for("the notices are sent", |status| status.lost_notices_sent == 400);
    main.ping();
    assert_eq!(main.lost, &keys[..400]);
    // Pages that another borrower displaces are reported without a request.
    let mut other = Client::connect(&lender.address, ROLE_MAIN, 2);
    other.put(&keys[..50]);
    lender.wait_for("the notices are sent", |status| status.lost_notices_sent == 450);
    main.ping();
    assert_eq!(&main.lost[400..], &keys[400..450]);
}

#[test]
fn garbage_ends_its_connection() {
    on_both(1000, |lender| {
        let mut good = Client::connect(&lender.address, ROLE_MAIN, 1);
        let mut too_long = Header::new(Kind::Hello, 0, 32, 0);
        too_long.body_bytes = u32::MAX.into();
        let garbage: [&[u8]; 5] = [
            b"GET / HTTP/1.1\r\nHost: lender\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            &[0; 4096],
            &[0xff; 100_000],
            too_long.as_bytes(),
        ];
        for bytes in garbage {
            let mut bad = Client::connect_raw(&lender.address);
            let _ = (&bad.stream).write_all(bytes); // it may be closed already
            let _ = bad.stream.shutdown(std::net::Shutdown::Write);
            assert!(bad.is_closed());
        }
        let status = lender.wait_for("all are gone", |status| status.connections == 1);
        assert_eq!(status.malformed_frames, 5);

        // Frames that are not allowed on their connection.
        let mut bad = Client::connect_raw(&lender.address);
        bad.send(Kind::Put, 0, 256, &[1; 256 * 4120][..]).ok();
        assert!(bad.is_closed());
        let main = Client::connect(&lender.address, ROLE_MAIN, 2);
        let mut bad = Client::connect(&lender.address, ROLE_GET, 2);
        bad.send(Kind::Put, 0, 1, &[1; 4120]).unwrap();
        assert!(bad.is_closed());
        drop(main);
        let mut bad = Client::connect(&lender.address, ROLE_MAIN, 2);
        bad.send(Kind::Get, 0, 1, &[1; 16]).unwrap();
        assert!(bad.is_closed());
        let mut bad = Client::connect(&lender.address, ROLE_MAIN, 2);
        bad.send(Kind::Pong, 0, 0, &[]).unwrap();
        assert!(bad.is_closed());
        // A frame that ends in the middle.
        let bad = Client::connect(&lender.address, ROLE_MAIN, 2);
        (&bad.stream).write_all(Header::new(Kind::Put, 2, 2 * 4120, 1).as_bytes()).unwrap();
        drop(bad);

        let status = lender.wait_for("all are gone", |status| status.connections == 1);
        assert_eq!((status.malformed_frames, status.stored_pages, status.borrowers), (10, 0, 1));
        assert_eq!(good.put(&[key(1, 1)]), 1);
    });
}

#[test]
fn refused_peers_are_sent_the_reason() {
    let lender = Lender::tcp(1000);
    let other = wire::Hello { protocol: 77.into(), ..hello(ROLE_MAIN, [1; 16]) };
    let refused = Client::connect_raw(&lender.address).handshake(other).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_PROTOCOL);
    assert!(refused.text.contains(&format!("protocol {}, not 77", wire::PROTOCOL)), "{}", refused.text);
    for bad in [hello(9, [1; 16]), wire::Hello { magic: *b"PUMAFOOL", ..hello(ROLE_MAIN, [1; 16]) }] {
        let refused = Client::connect_raw(&lender.address).handshake(bad).unwrap_err();
        assert_eq!(refused.code, wire::REFUSED_HELLO, "{}", refused.text);
    }
    // The numbers of connections of one session, of sessions, and of connections are limited.
    let mut crowd = vec![Client::connect(&lender.address, ROLE_MAIN, 1)];
    crowd.extend((1..16).map(|_| Client::connect(&lender.address, ROLE_GET, 1)));
    let refused = Client::connect_raw(&lender.address).handshake(hello(ROLE_GET, [1; 16])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_BUSY, "{}", refused.text);
    crowd.extend((2..=64).map(|name| Client::connect(&lender.address, ROLE_MAIN, name)));
    let refused = Client::connect_raw(&lender.address).handshake(hello(ROLE_MAIN, [65; 16])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_BUSY, "{}", refused.text);
    for name in 2..=64 {
        crowd.extend((0..3).take(256 - crowd.len()).map(|_| Client::connect(&lender.address, ROLE_GET, name)));
    }
    lender.wait_for("the house is full", |status| status.connections == 256);
    let mut late = Client::connect_raw(&lender.address);
    let (_, body) = late.receive().unwrap();
    assert_eq!(body[0], wire::REFUSED_BUSY as u8);
    assert_eq!(lender.handle.status().refused_connections, 6);
    // When a connection ends there is room again.
    crowd.truncate(100);
    lender.wait_for("there is room", |status| status.connections == 100);
    Client::connect(&lender.address, ROLE_GET, 2).ping();
    // A get connection needs a main one.
    let refused = Client::connect_raw(&lender.address).handshake(hello(ROLE_GET, [99; 16])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_SESSION, "{}", refused.text);
}

#[test]
fn silence_and_stuck_borrowers_hold_nobody() {
    on_both(10_000, |lender| {
        // One client sends nothing, and one sends half a Hello.
        let mut silent = Client::connect_raw(&lender.address);
        let mut half = Client::connect_raw(&lender.address);
        (&half.stream).write_all(&hello(ROLE_MAIN, [1; 16]).as_bytes()[..3]).unwrap();
        // One client sends requests all the time, and never receives.
        let mut main = Client::connect(&lender.address, ROLE_MAIN, 2);
        let keys: Vec<_> = (0..256).map(|index| key(index, 1)).collect();
        assert_eq!(main.put(&keys), 256);
        let stuck = Client::connect(&lender.address, ROLE_GET, 2);
        let mut get = Header::new(Kind::Get, 256, 256 * 16, 1).as_bytes().to_vec();
        get.extend_from_slice(keys.as_bytes());
        stuck.stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        while (&stuck.stream).write_all(&get).is_ok() {}
        // The others are served meanwhile.
        let mut other = Client::connect(&lender.address, ROLE_GET, 2);
        assert_eq!(other.hits(&keys), 256);
        assert!(silent.is_closed() && half.is_closed());
        lender.wait_for("all three are gone", |status| status.stuck_connections == 3 && status.connections == 2);
        main.ping();
    });
}

#[test]
fn it_stops_with_borrowers_connected() {
    let lender = Lender::tcp(1000);
    let (address, handle) = (lender.address.clone(), lender.handle.clone());
    let mut main = Client::connect(&address, ROLE_MAIN, 1);
    let mut silent = Client::connect_raw(&address);
    main.put(&[key(1, 1)]);
    lender.wait_for("both are there", |status| status.connections == 2);
    drop(lender);
    assert!(main.is_closed() && silent.is_closed());
    assert_eq!((handle.status().connections, handle.status().stored_pages), (0, 0));
    assert!(address.connect(WAIT_MAX).is_err());
}

#[test]
fn each_start_has_its_own_incarnation() {
    let incarnation = |lender: &Lender| {
        let welcome = Client::connect_raw(&lender.address).handshake(hello(ROLE_MAIN, [1; 16])).unwrap();
        assert_eq!(welcome.capacity_pages.get(), 100);
        assert_eq!(format!("{:016x}", welcome.incarnation.get()), lender.handle.status().incarnation);
        welcome.incarnation.get()
    };
    let (one, two) = (Lender::tcp(100), Lender::tcp(100));
    assert_eq!(incarnation(&one), incarnation(&one));
    assert_ne!(incarnation(&one), incarnation(&two));
}

#[test]
fn borrowers_in_parallel() {
    let lender = Lender::tcp(2000);
    std::thread::scope(|scope| {
        for name in 1..=4u8 {
            let lender = &lender;
            scope.spawn(move || {
                let mut main = Client::connect(&lender.address, ROLE_MAIN, name);
                let mut get = Client::connect(&lender.address, ROLE_GET, name);
                for round in 0..30u64 {
                    let first = (round * 37) as u32 + u32::from(name) * 1000;
                    let keys: Vec<_> = (first..first + 100).map(|index| key(index, round)).collect();
                    assert_eq!(main.put(&keys), 100);
                    // The fair share of each borrower is 500 pages, so its newest hundred are safe.
                    assert_eq!(get.hits(&keys), 100);
                    main.drop_keys(&keys[..10]);
                    main.ping();
                    assert_eq!(get.hits(&keys), 90);
                }
            });
        }
    });
    lender.wait_for("everybody is gone", |status| status.connections == 0 && status.stored_pages == 0);
}
