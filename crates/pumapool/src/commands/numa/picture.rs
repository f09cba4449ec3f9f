//! The picture of `numa list`: the nodes, what they have free and how far they are from each other,
//! and where each process's memory is.

use super::ranges;
use crate::cli::size;
use charts::{GRID, INK, PALE_INK};
use numa::PAGE_BYTES;
use numa::machines::Found;
use numa::topology::Node;
use std::fmt::Write;

/// One for each node, again from the beginning for more nodes than there are; which one it is, is
/// written beside it, too.
const COLOURS: [&str; 8] = ["#0b7a75", "#e0a526", "#7c5cbf", "#b44d12", "#3a86c8", "#7a9a01", "#c81e5b", "#52606d"];
const WIDTH: f64 = 860.0;
const MARGIN: f64 = 24.0;
/// Where bars begin and end.
const BAR_LEFT: f64 = 260.0;
const BAR_RIGHT: f64 = 690.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
/// Least width of a share that has its node written on it.
const LABELLED: f64 = 16.0;

/// As SVG.
pub fn draw(nodes: &[Node], found: &[Found]) -> String {
    let place = |id: numa::NodeId| nodes.iter().position(|node| node.id == id).unwrap_or(0);
    let height = MARGIN * 2.0 + 34.0 + ROW * (nodes.len() + found.len() + 3) as f64;
    let mut svg = charts::begin(WIDTH, height);
    let mut y = MARGIN + 16.0;
    charts::text(&mut svg, MARGIN, y, 16.0, INK, "start", true, "Memory on the nodes");
    y += ROW;
    charts::text(&mut svg, MARGIN, y, 12.0, PALE_INK, "start", false, "node, its processors, distances");
    charts::text(&mut svg, BAR_LEFT, y, 12.0, PALE_INK, "start", false, "in use of all");
    let largest = nodes.iter().map(|node| node.memory_bytes).max().unwrap_or(0).max(1);
    for (nth, node) in nodes.iter().enumerate() {
        y += ROW;
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        let what = format!("{}: {} ({})", node.id, ranges(&node.cpus), distances.join(" "));
        charts::text(&mut svg, MARGIN, y, 13.0, INK, "start", false, &what);
        let width = |bytes: u64| (BAR_RIGHT - BAR_LEFT) * bytes as f64 / largest as f64;
        let used = node.memory_bytes.saturating_sub(node.free_bytes);
        bar(&mut svg, BAR_LEFT, y, width(node.memory_bytes), GRID);
        bar(&mut svg, BAR_LEFT, y, width(used), COLOURS[nth % COLOURS.len()]);
        let amount = format!("{} of {}", size::display(used), size::display(node.memory_bytes));
        charts::text(&mut svg, WIDTH - MARGIN, y, 12.0, INK, "end", false, &amount);
    }
    y += ROW * 1.5;
    charts::text(&mut svg, MARGIN, y, 12.0, PALE_INK, "start", false, "machine or process");
    charts::text(&mut svg, BAR_LEFT, y, 12.0, PALE_INK, "start", false, "share on each node");
    for found in found {
        y += ROW;
        charts::text(&mut svg, MARGIN, y, 13.0, INK, "start", false, &format!("{} {}", found.pid, super::what(found)));
        let pages: u64 = found.pages_by_node.values().sum();
        let mut x = BAR_LEFT;
        for (id, count) in &found.pages_by_node {
            let width = (BAR_RIGHT - BAR_LEFT) * *count as f64 / pages.max(1) as f64;
            bar(&mut svg, x, y, width, COLOURS[place(*id) % COLOURS.len()]);
            if width >= LABELLED {
                charts::text(&mut svg, x + width / 2.0, y, 11.0, INK, "middle", false, &id.to_string());
            }
            x += width;
        }
        charts::text(&mut svg, WIDTH - MARGIN, y, 12.0, INK, "end", false, &size::display(pages * PAGE_BYTES));
    }
    svg.push_str("</svg>\n");
    svg
}

/// On the line of a text.
fn bar(svg: &mut String, x: f64, y: f64, width: f64, fill: &str) {
    let _infallible =
        write!(svg, r#"<rect x="{x:.1}" y="{:.1}" width="{width:.1}" height="{BAR}" fill="{fill}"/>"#, y - BAR + 4.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_and_process_is_drawn() {
        let node = |id: numa::NodeId| Node {
            id,
            cpus: vec![u32::from(id)],
            distances: vec![10, 20],
            memory_bytes: 1 << 30,
            free_bytes: 1 << 29,
        };
        let pages_by_node = [(0, 300), (1, 100)].into();
        let found = Found { pid: 4711, name: "a <b> & c".to_owned(), machine: None, pages_by_node };
        let svg = draw(&[node(0), node(1)], &[found]);
        for text in ["512 MiB of 1.0 GiB", "4711 a &lt;b> &amp; c", "1: 1 (10 20)"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        // Of the bars' whole width three quarters are the first node's.
        let share =
            |width: f64, colour: &str| svg.contains(&format!(r#"width="{width:.1}" height="{BAR}" fill="{colour}""#));
        let width = BAR_RIGHT - BAR_LEFT;
        assert!(share(width * 0.75, COLOURS[0]) && share(width * 0.25, COLOURS[1]), "{svg}");
        let file = tempfile::tempdir().unwrap();
        assert!(charts::render(&svg, &file.path().join("list.png")).is_ok());
    }
}
