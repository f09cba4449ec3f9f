//! Declarations of metrics, and the macro that declares them next to their fields.
//!
//! [`measured!`](crate::measured) takes a structure of a status. A field is followed by its metric:
//! kind, unit of the field, and name on the Prometheus page. The doc comment of the field is the
//! help text of the metric. A field without a metric is not on the page: it is a text, a name or a
//! list.
//!
//! Names follow the conventions of Prometheus: `pumapool_`, the object, the quantity, the base
//! unit, and `_total` for counters. Amounts of memory are in bytes; operations on pages are counted
//! in pages.

use crate::Times;

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that only grows while the daemon runs.
    Counter,
    /// A number that grows and shrinks. True is 1 and false is 0.
    Gauge,
    /// One of these words, distinguished by the label `state`: 1 for the present word, 0 for the
    /// others.
    State(&'static [&'static str]),
    /// A distribution of times: [`Times`].
    Histogram,
    /// Always 1; the information is in further labels of these names.
    Info(&'static [&'static str]),
}

/// The unit of a number in the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things, or pages that something happened to.
    Count,
    /// Pages that take memory: bytes on the Prometheus page.
    Pages,
    /// Bytes.
    Bytes,
    /// Milliseconds: seconds on the Prometheus page.
    Milliseconds,
    /// Microseconds: seconds on the Prometheus page.
    Microseconds,
    /// Percent: a ratio on the Prometheus page.
    Percent,
}

impl Unit {
    /// The factor from this unit to the base unit.
    pub fn factor(self) -> f64 {
        match self {
            Unit::Count | Unit::Bytes => 1.0,
            Unit::Pages => ::page::PAGE_SIZE as f64,
            Unit::Milliseconds => 1e-3,
            Unit::Microseconds => 1e-6,
            Unit::Percent => 1e-2,
        }
    }

    /// The base unit, as it stands in names. None: it has none.
    pub fn base(self) -> Option<&'static str> {
        match self {
            Unit::Count => None,
            Unit::Pages | Unit::Bytes => Some("bytes"),
            Unit::Milliseconds | Unit::Microseconds => Some("seconds"),
            Unit::Percent => Some("ratio"),
        }
    }
}

/// The declaration of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name on the Prometheus page.
    pub name: &'static str,
    /// The kind of a metric.
    pub kind: Kind,
    /// The unit of the field.
    pub unit: Unit,
    /// Its help text, with spaces around it.
    doc: &'static str,
}

impl Metric {
    /// Declares one; `doc` is the text of a doc comment.
    pub const fn new(name: &'static str, kind: Kind, unit: Unit, doc: &'static str) -> Metric {
        Metric { name, kind, unit, doc }
    }

    /// Its help text.
    pub fn help(&self) -> &'static str {
        self.doc.trim()
    }
}

/// Metrics that stand together in a structure and have the same labels.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The title. Sections with the same title are together in the reference.
    pub title: &'static str,
    /// The kinds of daemon that have it.
    pub daemons: &'static [&'static str],
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// The metric of each field, if it has one.
    pub fields: &'static [&'static [Metric]],
}

impl Section {
    /// The metrics, in the order of their declarations.
    pub fn metrics(&self) -> impl Iterator<Item = &'static Metric> + use<> {
        self.fields.iter().copied().flatten()
    }
}

/// The present value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum Sample<'a> {
    /// Nothing.
    Missing,
    /// A number in the unit of the field.
    Number(f64),
    /// The present word.
    Word(&'static str),
    /// How long something took.
    Times(&'a Times),
    /// The values of the further labels of [`Kind::Info`].
    Texts(Vec<String>),
}

/// A structure with metrics. [`measured!`](crate::measured) implements it.
pub trait Measured {
    /// The declarations.
    const SECTION: Section;

    /// The values of the metrics, in the order of their declarations.
    fn samples(&self) -> Vec<Sample<'_>>;
}

/// The type of a field that can have a metric.
pub trait Sampled {
    /// The present value.
    fn sample(&self) -> Sample<'_>;
}

impl Sampled for u64 {
    fn sample(&self) -> Sample<'_> {
        Sample::Number(*self as f64)
    }
}

impl Sampled for u32 {
    fn sample(&self) -> Sample<'_> {
        Sample::Number(f64::from(*self))
    }
}

impl Sampled for bool {
    fn sample(&self) -> Sample<'_> {
        Sample::Number(f64::from(*self))
    }
}

impl Sampled for Times {
    fn sample(&self) -> Sample<'_> {
        if self.counts.is_empty() { Sample::Missing } else { Sample::Times(self) }
    }
}

impl<T: Sampled> Sampled for Option<T> {
    fn sample(&self) -> Sample<'_> {
        self.as_ref().map_or(Sample::Missing, T::sample)
    }
}

/// Declares a structure of a status, and the metrics of its fields.
#[macro_export]
macro_rules! measured {
    (
        $(#[$meta:meta])*
        pub struct $name:ident, $title:literal of [$($daemon:literal),+] by [$($label:literal),+]
        $(info $info:literal with [$($further:ident),+]: $info_doc:literal)?
        {
            $($(#[doc = $doc:literal])+ $field:ident: $type:ty $(= $kind:ident $unit:ident $metric:literal)?,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $name {
            $($(#[doc = $doc])+ pub $field: $type,)*
        }

        impl $crate::metric::Measured for $name {
            const SECTION: $crate::metric::Section = $crate::metric::Section {
                title: $title,
                daemons: &[$($daemon),+],
                labels: &[$($label),+],
                fields: &[
                    $(&[$crate::metric::Metric::new(
                        $info,
                        $crate::metric::Kind::Info(&[$(stringify!($further)),+]),
                        $crate::metric::Unit::Count,
                        $info_doc,
                    )],)?
                    $($crate::metric_of!([$($doc),+] $type $(, $kind $unit $metric)?),)*
                ],
            };

            fn samples(&self) -> Vec<$crate::metric::Sample<'_>> {
                vec![
                    $($crate::metric::Sample::Texts({
                        let _ = $info;
                        vec![$(self.$further.to_string()),+]
                    }),)?
                    $($({
                        let _ = $metric;
                        $crate::metric::Sampled::sample(&self.$field)
                    },)?)*
                ]
            }
        }
    };
}

/// The metric of one field of [`measured!`](crate::measured), in a list; an empty one for a field
/// without a metric.
#[doc(hidden)]
#[macro_export]
macro_rules! metric_of {
    ($doc:tt $type:ty) => {
        &[]
    };
    ($doc:tt $type:ty, state $unit:ident $name:literal) => {
        $crate::metric_of!($doc $name, $unit, $crate::metric::Kind::State(<$type>::WORDS))
    };
    ($doc:tt $type:ty, counter $unit:ident $name:literal) => {
        $crate::metric_of!($doc $name, $unit, $crate::metric::Kind::Counter)
    };
    ($doc:tt $type:ty, gauge $unit:ident $name:literal) => {
        $crate::metric_of!($doc $name, $unit, $crate::metric::Kind::Gauge)
    };
    ($doc:tt $type:ty, times $unit:ident $name:literal) => {
        $crate::metric_of!($doc $name, $unit, $crate::metric::Kind::Histogram)
    };
    ([$($doc:literal),+] $name:literal, $unit:ident, $kind:expr) => {
        &[$crate::metric::Metric::new($name, $kind, $crate::metric::Unit::$unit, concat!($($doc),+))]
    };
}

/// Declares an enumeration, with the word of each variant in JSON and on the Prometheus page. An
/// unknown word, from a daemon of another version, is `Unknown`.
#[macro_export]
macro_rules! words {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $variant,)+
            /// Another word.
            #[default]
            #[serde(rename = "?", other)]
            Unknown,
        }

        impl $name {
            /// The words that are known.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word in JSON; `?` if it is unknown.
            pub fn word(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)+
                    $name::Unknown => "?",
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.pad(self.word())
            }
        }

        impl $crate::metric::Sampled for $name {
            fn sample(&self) -> $crate::metric::Sample<'_> {
                match self {
                    $name::Unknown => $crate::metric::Sample::Missing,
                    known => $crate::metric::Sample::Word(known.word()),
                }
            }
        }
    };
}
