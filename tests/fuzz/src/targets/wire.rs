//! The protocol's header and bodies, and addresses.

use super::Target;
use wire::address::Address;
use wire::{
    Advice, BODY_BYTES_MAX, DemotedPage, DemotionOutcome, GetItem, Header, Hello, ITEMS_MAX, Kind, PageSpan, PutItem,
    Refused, Room, Welcome, WireKey,
};
use zerocopy::{FromBytes, IntoBytes};

pub const HEADER: Target = Target {
    name: "wire_header",
    about: "the peer's header, and the bodies that it announces",
    input_bytes_max: size_of::<Header>() + size_of::<DemotedPage>() + 512,
    run: header,
    seeds: header_seeds,
};

fn header(bytes: &[u8]) {
    let Ok((header, body)) = Header::read_from_prefix(bytes) else { return };
    let (items, body_bytes) = (usize::from(header.items.get()), header.body_bytes.get() as usize);
    let Ok(kind) = header.validate() else { return };
    assert!(items <= ITEMS_MAX && body_bytes <= BODY_BYTES_MAX, "{header:?}");
    let Some(body) = body.get(..body_bytes) else { return };
    // The readers can decode everything that `validate` accepts.
    match kind {
        Kind::Hello => drop(Hello::read(0, body, true).unwrap()),
        Kind::Welcome => drop(Welcome::read_from_bytes(body).unwrap()),
        Kind::Advise => drop(Advice::read_from_bytes(body).unwrap()),
        Kind::Refused | Kind::Advised => {
            let text = Refused::read_from_bytes(body).unwrap().text();
            assert!(!text.contains(|c: char| c.is_control()), "{text:?}");
        }
        Kind::Put => drop(<[PutItem]>::ref_from_prefix_with_elems(body, items).unwrap()),
        Kind::GetReply => drop(<[GetItem]>::ref_from_prefix_with_elems(body, items).unwrap()),
        Kind::Get | Kind::Drop | Kind::Lost => assert_eq!(<[WireKey]>::ref_from_bytes(body).unwrap().len(), items),
        Kind::Pong => drop(Room::read_from_bytes(body).unwrap()),
        Kind::Demote => assert_eq!(<[DemotedPage]>::ref_from_bytes(body).unwrap().len(), items),
        Kind::Held => assert_eq!(<[PageSpan]>::ref_from_bytes(body).unwrap().len(), items),
        Kind::Demoted => {
            let _ = body.iter().filter_map(|byte| DemotionOutcome::from_wire(*byte)).count();
        }
        Kind::PutReply | Kind::Ping | Kind::Bye | Kind::Handshake1 | Kind::Handshake2 => {}
    }
}

fn header_seeds() -> Vec<Vec<u8>> {
    let frame = |kind, items: usize, body: &[u8]| [Header::new(kind, items, body.len(), 7).as_bytes(), body].concat();
    let key = WireKey::new(page::PageId { file: page::FileKey(1), index: 2 }, page::Version(3));
    vec![
        frame(Kind::Hello, 0, &super::lender::hello(wire::ROLE_MAIN)[size_of::<Header>()..]),
        frame(Kind::Welcome, 0, &[1; size_of::<Welcome>()]),
        frame(Kind::Refused, 0, Refused::new(2, "too many borrowers").as_bytes()),
        frame(Kind::Get, 2, [key, key].as_bytes()),
        frame(Kind::Lost, 1, key.as_bytes()),
        frame(Kind::PutReply, 3, &[1, 0, 1]),
        frame(Kind::GetReply, 1, &[0; size_of::<GetItem>()]),
        frame(Kind::Demote, 1, &[2; size_of::<DemotedPage>()]),
        frame(Kind::Held, 2, &[3; 2 * size_of::<PageSpan>()]),
        frame(Kind::Demoted, 2, &[1, 5]),
        frame(Kind::Advise, 0, b"first-touch\0\0\0\0\0"),
        frame(Kind::Ping, 0, &[]),
    ]
}

pub const ADDRESS: Target = Target {
    name: "address",
    about: "where a lender is, as a person writes it",
    input_bytes_max: 160,
    run: address,
    seeds: || {
        let texts = [
            "a.example:7000",
            "10.0.0.1:0",
            "[::1]:65535",
            "unix:/run/puma.sock",
            "unix:relative:7",
            "host:65536",
            "vsock:2:7000",
            "vsock:any:0",
        ];
        texts.map(|text| text.as_bytes().to_vec()).to_vec()
    },
};

fn address(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    match text.parse::<Address>() {
        Ok(address) => {
            let shown = address.to_string();
            assert_eq!(shown.parse().as_ref(), Ok(&address), "{text:?} is shown as {shown:?}");
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n') && line.contains("write HOST:PORT"), "{line:?}");
        }
    }
}
