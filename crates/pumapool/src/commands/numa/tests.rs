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
