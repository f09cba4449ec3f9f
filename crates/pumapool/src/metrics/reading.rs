//! From statuses to the values of metrics. Nothing but logic.

use crate::metrics::table::{Kind, Metric, Section, registry};
use serde_json::Value;
use std::collections::HashSet;

/// Labels of a value, in the order of their declaration.
pub type Labels = Vec<(&'static str, String)>;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// Of everything but a histogram.
    Number(f64),
    /// Of a histogram.
    Times {
        /// Upper bounds in seconds, the last one infinite, and how many fell into each bucket.
        buckets: Vec<(f64, u64)>,
        /// In seconds.
        sum: f64,
    },
}

/// A metric, and its value for each set of labels.
#[derive(Debug)]
pub struct Family {
    /// The metric.
    pub metric: &'static Metric,
    /// Each set of labels is there once.
    pub readings: Vec<(Labels, Reading)>,
}

/// What these daemons say, metric by metric, without those of which they say nothing. Of two
/// daemons that say the same of themselves (such as two mounts one over the other) the first one
/// counts: a page must not have a value twice.
pub fn read(statuses: &[Value]) -> Vec<Family> {
    let mut families = Vec::new();
    for section in registry() {
        let of_section: Vec<_> = statuses
            .iter()
            .filter(|status| section.daemons.iter().any(|daemon| status["kind"] == *daemon))
            .flat_map(|status| places(status, section.at).into_iter().map(move |place| (status, place)))
            .collect();
        for metric in section.metrics.iter() {
            let mut seen = HashSet::new();
            let mut readings: Vec<_> =
                of_section.iter().flat_map(|(status, place)| of_place(section, metric, status, place)).collect();
            readings.retain(|(labels, _)| seen.insert(labels.clone()));
            if !readings.is_empty() {
                families.push(Family { metric, readings });
            }
        }
    }
    families
}

/// A place in a status that a pattern leads to.
struct Place<'a> {
    value: &'a Value,
    /// What stood for each `*`.
    stars: Vec<String>,
}

/// Where a pattern leads to.
fn places<'a>(status: &'a Value, pattern: &str) -> Vec<Place<'a>> {
    let mut places = vec![Place { value: status, stars: Vec::new() }];
    for step in pattern.split('/').skip(1) {
        places = places.into_iter().flat_map(|place| follow(place, step)).collect();
    }
    places
}

fn follow<'a>(place: Place<'a>, step: &str) -> Vec<Place<'a>> {
    let Place { value, stars } = place;
    let with = |star: String, value: &'a Value| Place { value, stars: [&stars[..], &[star]].concat() };
    match (step, value) {
        ("*", Value::Array(list)) => list.iter().enumerate().map(|(at, value)| with(at.to_string(), value)).collect(),
        ("*", Value::Object(map)) => map.iter().map(|(key, value)| with(key.clone(), value)).collect(),
        (step, Value::Object(map)) => map.get(step).map(|value| Place { value, stars }).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn of_place(section: &Section, metric: &'static Metric, status: &Value, place: &Place<'_>) -> Vec<(Labels, Reading)> {
    let label = |(name, at): &(&'static str, &'static str)| (*name, text(status, at, &place.stars));
    let mut labels: Labels = section.labels.iter().map(label).collect();
    let at = metric.at.split('/').filter(|step| !step.is_empty());
    let value = at.fold(place.value, |value, step| &value[step]);
    let number = |number: f64| Reading::Number(number * metric.is_in.factor());
    match metric.kind {
        Kind::Counter | Kind::Gauge => {
            let found = value.as_f64().or(value.as_bool().map(f64::from));
            found.map(|found| (labels, number(found))).into_iter().collect()
        }
        Kind::State(states) => {
            let Some(state) = value.as_str() else { return Vec::new() };
            let one = |name: &&'static str| {
                let labels = labels.iter().cloned().chain([("state", (*name).to_owned())]).collect();
                (labels, Reading::Number(f64::from(*name == state)))
            };
            states.iter().map(one).collect()
        }
        Kind::Info(further) => {
            if place.value.is_null() {
                return Vec::new();
            }
            labels.extend(further.iter().map(label));
            vec![(labels, Reading::Number(1.0))]
        }
        Kind::Histogram => times(value).map(|times| (labels, times)).into_iter().collect(),
    }
}

/// The text at a pointer in whose place of each `*` stands what was found there.
fn text(status: &Value, at: &str, stars: &[String]) -> String {
    let mut stars = stars.iter();
    if at == "*" {
        return stars.next_back().cloned().unwrap_or_default();
    }
    let steps = at.split('/').map(|step| if step == "*" { stars.next().map_or(step, String::as_str) } else { step });
    let pointer = steps.collect::<Vec<_>>().join("/");
    status.pointer(&pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// What a [`borrower::Times`] says.
fn times(value: &Value) -> Option<Reading> {
    let numbers = |name: &str| value[name].as_array().map(|list| list.iter().filter_map(Value::as_u64));
    let bounds = numbers("bounds_us")?.map(|us| us as f64 / 1e6).chain([f64::INFINITY]);
    let buckets = bounds.zip(numbers("counts")?).collect();
    Some(Reading::Times { buckets, sum: value["sum_ns"].as_f64()? / 1e9 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(families: &[Family], name: &str, wanted: &[(&str, &str)]) -> Option<f64> {
        let family = families.iter().find(|family| family.metric.name == name)?;
        let is_wanted =
            |labels: &Labels| labels.iter().map(|(name, value)| (*name, &value[..])).eq(wanted.iter().copied());
        match family.readings.iter().find(|(labels, _)| is_wanted(labels))?.1 {
            Reading::Number(number) => Some(number),
            Reading::Times { sum, .. } => Some(sum),
        }
    }

    #[test]
    fn places_labels_and_units() {
        let lender = |address: &str, state: &str| json!({"address": address, "state": state, "ping_us": 250, "free_pages": 2, "get_us": null});
        let mount = json!({
            "kind": "mount", "mountpoint": "/mnt", "source": "/srv", "lender_is_up": true,
            "lenders": [lender("a", "used"), lender("b", "down")],
            "borrower": {"reads": 7},
            "mount": {"requests": {"READ": 5}},
            "latencies": {"get": {"bounds_us": [10, 1000], "counts": [1, 2, 3], "sum_ns": 2_500_000_000u64}},
        });
        // One mount twice: once on the page.
        let families = read(&[
            mount.clone(),
            mount,
            json!({"kind": "lend", "listen": "x", "lender": {"cpu_ms": 1500, "cpu_percent": 50}}),
            json!(null),
        ]);
        let of = |name: &str, labels: &[(&str, &str)]| value(&families, name, labels);
        let (first, second) = ([("mount", "/mnt"), ("lender", "a")], [("mount", "/mnt"), ("lender", "b")]);
        assert_eq!(of("pumapool_mount_reads_total", &first[..1]), Some(7.0));
        assert_eq!(of("pumapool_mount_lender_up", &first[..1]), Some(1.0));
        assert_eq!(of("pumapool_link_ping_seconds", &second), Some(250e-6));
        assert_eq!(of("pumapool_link_free_bytes", &first), Some(8192.0));
        assert_eq!(of("pumapool_link_get_recent_seconds", &first), None);
        let state = |lender: &str, state: &str| {
            of("pumapool_link_state", &[("mount", "/mnt"), ("lender", lender), ("state", state)])
        };
        assert_eq!((state("a", "used"), state("b", "used"), state("b", "down")), (Some(1.0), Some(0.0), Some(1.0)));
        assert_eq!(of("pumapool_mount_requests_total", &[("mount", "/mnt"), ("request", "READ")]), Some(5.0));
        assert_eq!(of("pumapool_mount_get_seconds", &first[..1]), Some(2.5));
        assert_eq!(of("pumapool_lender_cpu_seconds_total", &[("lender", "x")]), Some(1.5));
        assert_eq!(of("pumapool_lender_cpu_limit_ratio", &[("lender", "x")]), Some(0.5));
        let get = families.iter().find(|family| family.metric.name == "pumapool_mount_get_seconds").unwrap();
        let buckets = vec![(10e-6, 1), (1e-3, 2), (f64::INFINITY, 3)];
        assert_eq!(get.readings[0].1, Reading::Times { buckets, sum: 2.5 });
        assert_eq!(get.readings.len(), 1);
    }
}
