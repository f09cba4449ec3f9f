//! docs/user/metrics.md, written from the declarations of metrics.

use report::metric::{Kind, Metric, Section};
use report::sections;
use std::fmt::Write;

/// The page of the documentation.
pub fn markdown() -> String {
    let mut text = String::from(HEAD);
    let mut title = "";
    for section in sections() {
        if section.title != title {
            title = section.title;
            let _infallible =
                write!(text, "\n## {title}\n| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n");
        }
        for metric in section.metrics() {
            let _infallible = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} |",
                metric.name,
                kind(metric.kind),
                metric.unit.base().unwrap_or("–"),
                labels(section, metric).join(", "),
                metric.help()
            );
        }
    }
    text
}

const HEAD: &str = "# Metrics
<!-- Written by `pumapool generate metrics`, from crates/report/src: change that. -->

All that the daemons count, as the Prometheus page names it. [Monitoring](monitoring.md) says how to get at it. `pumapool status --json` has the same numbers, in
the units that they are kept in. Counters begin at 0 with the daemon. What is true or false is 1 or 0. A page is 4096 bytes.
";

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge | Kind::State(_) | Kind::Info(_) => "gauge",
        Kind::Histogram => "histogram",
    }
}

fn labels(section: &Section, metric: &Metric) -> Vec<String> {
    let mut labels: Vec<String> = section.labels.iter().map(|name| (*name).to_owned()).collect();
    match metric.kind {
        Kind::State(states) => labels.push(format!("state ({})", states.join(", "))),
        Kind::Info(further) => labels.extend(further.iter().map(|name| (*name).to_owned())),
        Kind::Counter | Kind::Gauge | Kind::Histogram => {}
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_committed_page_is_what_the_code_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/user/metrics.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/user/metrics.md is old: pumapool generate metrics > docs/user/metrics.md"
        );
    }

    /// Words of a text that could be names of metrics.
    fn named(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c)));
        words.filter(|word| word.starts_with("pumapool_")).map(|word| word.trim_end_matches(':'))
    }

    #[test]
    fn dashboard_alerts_and_docs_name_metrics_that_there_are() {
        let mut known: HashSet<String> = HashSet::new();
        for metric in sections().iter().flat_map(Section::metrics) {
            match metric.kind {
                Kind::Histogram => {
                    known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{}{part}", metric.name)))
                }
                _ => drop(known.insert(metric.name.to_string())),
            }
        }
        // Of the dashboard, to find machines: (mount|lender|…)_info.
        known.insert("pumapool_".to_owned());
        let read =
            |file: &str| std::fs::read_to_string(format!("{}/../../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let alerts = read("packaging/prometheus/alerts.yml");
        let recorded = alerts.lines().filter_map(|line| line.trim().strip_prefix("- record: "));
        known.extend(recorded.map(str::to_owned));
        for (file, least) in [
            ("packaging/grafana/pumapool.json", 30),
            ("packaging/prometheus/alerts.yml", 10),
            ("docs/user/monitoring.md", 3),
        ] {
            let text = read(file);
            let names: HashSet<&str> = named(&text).collect();
            assert!(names.len() >= least, "{file} names {names:?}");
            for name in names {
                assert!(known.contains(name), "{file}: there is no metric {name}");
            }
        }
    }
}
