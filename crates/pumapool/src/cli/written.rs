//! How options are written where one process of ours passes them to the next
//! ([`crate::config`]): as a user writes them. The modules are for serde's `with`. No I/O.

/// A value that has a text of its own, such as an address.
pub mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub fn serialize<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'a, T: FromStr<Err: Display>, D: Deserializer<'a>>(deserializer: D) -> Result<T, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A value with a text, or none.
pub mod maybe_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub fn serialize<S: Serializer>(value: &Option<impl Display>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_ref().map(ToString::to_string).serialize(serializer)
    }

    pub fn deserialize<'a, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'a>,
    {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// Values with texts.
pub mod texts {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub fn serialize<S: Serializer>(values: &[impl Display], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(ToString::to_string))
    }

    pub fn deserialize<'a, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'a>,
    {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.into_iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

/// A path: a string, or its bytes if it is not UTF-8.
pub mod path {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    pub(super) enum Written {
        Text(String),
        Bytes(Vec<u8>),
    }

    impl From<&Path> for Written {
        fn from(path: &Path) -> Written {
            match path.to_str() {
                Some(text) => Written::Text(text.to_owned()),
                None => Written::Bytes(path.as_os_str().as_bytes().to_vec()),
            }
        }
    }

    impl From<Written> for PathBuf {
        fn from(written: Written) -> PathBuf {
            match written {
                Written::Text(text) => text.into(),
                Written::Bytes(bytes) => OsString::from_vec(bytes).into(),
            }
        }
    }

    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        Written::from(path).serialize(serializer)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Written::deserialize(deserializer).map(PathBuf::from)
    }
}

/// A path, or none.
pub mod maybe_path {
    use super::path::Written;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::path::PathBuf;

    pub fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_deref().map(Written::from).serialize(serializer)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<Written>::deserialize(deserializer)?.map(PathBuf::from))
    }
}

/// A size in bytes, by the largest unit that it is a multiple of.
pub mod size {
    use crate::cli::size;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&size::exact(*bytes))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<u64, D::Error> {
        size::parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// A size in bytes, or none.
pub mod maybe_size {
    use crate::cli::size;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub fn serialize<S: Serializer, T: Copy + Into<u64>>(bytes: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
        bytes.map(|bytes| size::exact(bytes.into())).serialize(serializer)
    }

    pub fn deserialize<'a, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: TryFrom<u64, Error: std::fmt::Display>,
        D: Deserializer<'a>,
    {
        let bytes = |text: String| T::try_from(size::parse(&text).map_err(D::Error::custom)?).map_err(D::Error::custom);
        Option::<String>::deserialize(deserializer)?.map(bytes).transpose()
    }
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};
    use std::ffi::OsString;
    use std::num::NonZeroU64;
    use std::os::unix::ffi::OsStringExt;
    use std::path::PathBuf;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct All {
        #[serde(with = "super::path")]
        path: PathBuf,
        #[serde(with = "super::maybe_path")]
        odd: Option<PathBuf>,
        #[serde(with = "super::size")]
        size: u64,
        #[serde(with = "super::maybe_size")]
        rate: Option<NonZeroU64>,
        #[serde(with = "super::texts")]
        addresses: Vec<wire::address::Address>,
        #[serde(with = "super::maybe_text")]
        none: Option<wire::address::Address>,
    }

    #[test]
    fn what_is_written_is_read_again() {
        let all = All {
            path: "/srv".into(),
            odd: Some(OsString::from_vec(vec![b'/', 0xff]).into()),
            size: 12 << 20,
            rate: NonZeroU64::new(4097),
            addresses: vec!["unix:/a".parse().unwrap(), "[::1]:7".parse().unwrap()],
            none: None,
        };
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.contains(r#""size":"12MiB""#) && text.contains(r#""rate":"4097""#), "{text}");
        assert_eq!(serde_json::from_str::<All>(&text).unwrap(), all);
    }
}
