//! The page that Prometheus reads, in either of the two formats that it knows.

use crate::cli::metrics::Format;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use report::metric::Kind;
use report::{Daemon, Family, Labels, Reading};
use std::fmt;

impl Format {
    /// The content type of HTTP.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::Openmetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The format that a client requests by its header `Accept`.
    pub fn accepted(accept: &str) -> Format {
        if accept.contains("application/openmetrics-text") { Format::Openmetrics } else { Format::Text }
    }

    /// The page in this format, from the one in OpenMetrics.
    pub fn convert(self, openmetrics: &str) -> String {
        match self {
            Format::Openmetrics => openmetrics.to_owned(),
            Format::Text => text_format(openmetrics),
        }
    }
}

/// The page of these daemons, in OpenMetrics.
///
/// # Errors
/// None that can happen: a String takes everything.
pub fn openmetrics(daemons: &[Daemon]) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(report::read(daemons))));
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    Ok(page)
}

#[derive(Debug)]
struct Page(Vec<Family>);

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Family { metric, readings } in &self.0 {
            // The library writes the ends of names.
            let name = metric.name.strip_suffix("_total").unwrap_or(metric.name);
            let unit = metric.unit.base();
            let without_unit = unit.and_then(|unit| name.strip_suffix(unit)?.strip_suffix('_'));
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Histogram => MetricType::Histogram,
                Kind::Gauge | Kind::State(_) | Kind::Info(_) => MetricType::Gauge,
            };
            let unit = unit.map(|unit| Unit::Other(unit.to_owned()));
            let name = without_unit.unwrap_or(name);
            let mut family = encoder.encode_descriptor(name, metric.help(), unit.as_ref(), kind)?;
            for (labels, reading) in readings {
                let mut one = family.encode_family(labels)?;
                match (metric.kind, reading) {
                    (_, Reading::Times { buckets, sum }) => {
                        let count = buckets.iter().map(|(_, count)| count).sum();
                        one.encode_histogram::<Labels>(*sum, count, buckets, None)?;
                    }
                    (Kind::Counter, Reading::Number(number)) => match whole(*number) {
                        Some(whole) => one.encode_counter::<Labels, u64, u64>(&whole, None)?,
                        None => one.encode_counter::<Labels, f64, u64>(number, None)?,
                    },
                    (_, Reading::Number(number)) => match whole(*number) {
                        Some(whole) => one.encode_gauge(&whole)?,
                        None => one.encode_gauge(number)?,
                    },
                }
            }
        }
        Ok(())
    }
}

/// A number that can be written without a point.
fn whole(number: f64) -> Option<u64> {
    (number >= 0.0 && number.fract() == 0.0 && number < 2f64.powi(53)).then_some(number as u64)
}

/// The two differ in what a counter's family is called, and in what a page ends with.
fn text_format(openmetrics: &str) -> String {
    let types = openmetrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"));
    let counters: std::collections::HashSet<&str> = types.collect();
    let mut page = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines().filter(|line| *line != "# EOF" && !line.starts_with("# UNIT ")) {
        let described = ["# HELP ", "# TYPE "].into_iter().find_map(|word| Some((word, line.strip_prefix(word)?)));
        match described.and_then(|(word, rest)| Some((word, rest.split_once(' ')?))) {
            Some((word, (name, rest))) if counters.contains(name) => page.extend([word, name, "_total ", rest]),
            _ => page.push_str(line),
        }
        page.push('\n');
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use report::{Borrower, Disk, Files, Latencies, Mount, Times};

    #[test]
    fn both_formats() {
        let get = Times { bounds_us: vec![10, 1000], counts: vec![1, 2, 3], sum_ns: 2_500_000_000 };
        let mount = Mount {
            mountpoint: "/a \"b\"\n\\c".into(),
            borrower: Borrower { reads: 7, ..Borrower::default() },
            mount: Files { read_bytes: 4096, ..Files::default() },
            disk: Disk { read_us: Some(125), ..Disk::default() },
            latencies: Latencies { get, ..Latencies::default() },
            ..Mount::default()
        };
        let page = openmetrics(&[Daemon::Mount(Box::new(mount))]).unwrap();
        let label = r#"{mount="/a \"b\"\n\\c"}"#;
        for line in [
            "# TYPE pumapool_mount_reads counter",
            &format!("pumapool_mount_reads_total{label} 7"),
            "# TYPE pumapool_mount_read_bytes counter",
            "# UNIT pumapool_mount_read_bytes bytes",
            &format!("pumapool_mount_read_bytes_total{label} 4096"),
            &format!("pumapool_mount_borrowing{label} 0"),
            &format!("pumapool_mount_backing_read_recent_seconds{label} 0.000125"),
            "# TYPE pumapool_mount_get_seconds histogram",
            &format!("pumapool_mount_get_seconds_count{label} 6"),
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "{line}\n{page}");
        }
        let text = Format::Text.convert(&page);
        assert!(
            text.contains("# TYPE pumapool_mount_reads_total counter\n")
                && text.contains("# HELP pumapool_mount_reads_total "),
            "{text}"
        );
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"));
        assert_eq!(openmetrics(&[]).unwrap(), "# EOF\n");
    }

    #[test]
    fn the_format_is_the_readers_choice() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        assert_eq!(Format::accepted(prometheus), Format::Openmetrics);
        assert_eq!(Format::accepted("*/*"), Format::Text);
    }
}
