use super::*;

#[test]
fn pictures_and_ranges() {
    let pages_by_node = [(0, 50), (1, 25), (3, 25)].into();
    let found = Found { pid: 1, name: String::new(), machine: None, pages_by_node };
    assert_eq!(bar(&found), "00000000000000001111111133333333");
    assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
    assert_eq!(ranges(&[]), "none");
}

#[test]
fn rates_and_times_have_bounds() {
    assert_eq!(rate("1MiB"), Ok(RATE_MIN_BYTES));
    assert_eq!(rate("1048575").unwrap_err(), "write at least 1.0 MiB a second");
    let apply = |option, value| {
        let given = ["pumapool", "numa", "apply", "--pid", "1", "--policy", "carrefour", option, value];
        crate::Cli::try_parse_from(given).is_ok()
    };
    for (option, value, is_good) in [
        ("--for", "0", false),
        ("--for", "86400", true),
        ("--for", "18446744073709551615", false),
        ("--rate", "0", false),
    ] {
        assert_eq!(apply(option, value), is_good, "{option} {value}");
    }
}

#[test]
fn what_was_done_is_said() {
    let applied = Applied {
        pages: 1024,
        moved_pages: 512,
        full_pages: 256,
        full_nodes: vec![2],
        pages_by_node: [(0, 512), (1, 512)].into(),
        ..Applied::default()
    };
    let said = summary(&applied);
    assert_eq!(
        said,
        "of 4.0 MiB, 2.0 MiB moved; now on nodes  0: 50.0 %  1: 50.0 %\n1.0 MiB could not be moved: no memory is free on node 2"
    );
}
