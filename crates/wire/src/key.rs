//! The pool's key: one secret that all machines of a pool have, and strangers do not.
//!
//! It is 32 random bytes in a file that only its owner can read. The key itself is never used: each
//! use has a key of its own, derived from it ([`PoolKey::derive`]). So knowledge about one use
//! reveals nothing about another.
//!
//! Must never happen here: a byte of the key in a message, a log or an error's text; a key
//! from a file that others could have read or written.

use ring::hmac;
use rustix::fs::{FileType, Mode, OFlags};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zeroize::Zeroizing;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// Bytes of a key file: the key in hexadecimal, and the end of the line.
const FILE_BYTES: usize = 2 * KEY_BYTES + 1;

/// The key of a pool. Copies share one place in memory, which is cleared with the last of them.
#[derive(Clone)]
pub struct PoolKey(Arc<Zeroizing<[u8; KEY_BYTES]>>);

impl fmt::Debug for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolKey(secret)")
    }
}

/// The reason why there is no key, in one line with a remedy.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the text that Display makes of each says what it is
pub enum KeyError {
    #[error("there is no key file {path}: copy the pool's, or make one with `pumapool key new {path}`")]
    Missing { path: PathBuf },
    #[error("cannot read the key file {path}: {source}; check its owner and its folder")]
    Read { path: PathBuf, source: io::Error },
    #[error("the key file {path} is no regular file; name the file itself")]
    NotAFile { path: PathBuf },
    #[error("the key file {path} belongs to user {owner}, who may change it: `chown {ours} {path}`")]
    Owner { path: PathBuf, owner: u32, ours: u32 },
    #[error("the key file {path} is open to others (mode {mode:04o}): `chmod 600 {path}`")]
    Mode { path: PathBuf, mode: u32 },
    #[error(
        "the key file {path} does not hold a key (64 hexadecimal digits): copy the pool's again, or make one with \
         `pumapool key new FILE`"
    )]
    Content { path: PathBuf },
    #[error("{path} exists already, and is never overwritten: remove it first, or choose another name")]
    Exists { path: PathBuf },
    #[error("cannot make the key file {path}: {source}; make its folder, or choose another")]
    Create { path: PathBuf, source: io::Error },
}

impl PoolKey {
    /// A key from random bytes.
    pub fn new(bytes: [u8; KEY_BYTES]) -> PoolKey {
        PoolKey(Arc::new(Zeroizing::new(bytes)))
    }

    /// Reads a key file: a regular file that belongs to this user or root, closed to everybody
    /// else, with 64 hexadecimal digits and the end of a line.
    ///
    /// # Errors
    /// Fails if any of these conditions does not hold.
    pub fn read(path: &Path) -> Result<PoolKey, KeyError> {
        let owned = || path.to_owned();
        // Without waiting: the path may be a pipe.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
            rustix::io::Errno::NOENT => KeyError::Missing { path: owned() },
            error => KeyError::Read { path: owned(), source: error.into() },
        })?;
        let found = rustix::fs::fstat(&file).map_err(|error| KeyError::Read { path: owned(), source: error.into() })?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(KeyError::NotAFile { path: owned() });
        }
        let ours = rustix::process::geteuid().as_raw();
        if found.st_uid != ours && found.st_uid != 0 {
            return Err(KeyError::Owner { path: owned(), owner: found.st_uid, ours });
        }
        // Room for one byte more than is permitted, allocated at once: a growing buffer would leave
        // copies behind.
        let mut text = Zeroizing::new([0; FILE_BYTES + 1]);
        let mut length = 0;
        let mut file = File::from(file);
        while length < text.len() {
            match file.read(&mut text[length..]) {
                Ok(0) => break,
                Ok(bytes) => length += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(KeyError::Read { path: owned(), source }),
            }
        }
        let text = &text[..length];
        let digits = text.strip_suffix(b"\n").unwrap_or(text);
        let key = from_digits(digits).ok_or_else(|| KeyError::Content { path: owned() })?;
        // This check comes last: a user who named another file by mistake is not told to close that
        // file.
        let mode = found.st_mode & 0o7777;
        if mode & 0o077 != 0 {
            return Err(KeyError::Mode { path: owned(), mode });
        }
        Ok(key)
    }

    /// Makes a new key, and a file with it that only its owner can read. An existing file stays.
    ///
    /// # Errors
    /// Fails if there is such a file, or it cannot be written.
    pub fn create(path: &Path) -> Result<PoolKey, KeyError> {
        let fail = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => KeyError::Exists { path: path.to_owned() },
            _ => KeyError::Create { path: path.to_owned(), source },
        };
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        let mut filled = 0;
        while filled < KEY_BYTES {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled += rustix::rand::getrandom(&mut bytes[filled..], flags).map_err(|error| fail(error.into()))?;
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|error| fail(error.into()))?;
        let written = write_digits(File::from(file), &bytes).and_then(|()| sync_folder(path));
        if let Err(source) = written {
            // Half a key is useless, and would prevent the next attempt.
            let _ = std::fs::remove_file(path);
            return Err(fail(source));
        }
        Ok(PoolKey::new(*bytes))
    }

    /// A key for one use, named by the label. It reveals neither the pool's key nor the key of
    /// another use.
    pub fn derive(&self, label: &str) -> [u8; KEY_BYTES] {
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &self.0[..]), label.as_bytes());
        let mut derived = [0; KEY_BYTES];
        derived.copy_from_slice(tag.as_ref());
        derived
    }
}

fn from_digits(digits: &[u8]) -> Option<PoolKey> {
    if digits.len() != 2 * KEY_BYTES {
        return None;
    }
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    let (pairs, _) = digits.as_chunks::<2>();
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = (digit(*high)? << 4 | digit(*low)?) as u8;
    }
    Some(PoolKey::new(*bytes))
}

fn write_digits(mut file: File, bytes: &[u8; KEY_BYTES]) -> io::Result<()> {
    let mut text = Zeroizing::new([b'\n'; FILE_BYTES]);
    let (pairs, _) = text.as_chunks_mut::<2>();
    for (pair, byte) in pairs.iter_mut().zip(bytes) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        *pair = [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
    }
    file.write_all(&text[..])?;
    file.sync_all()
}

/// A new file survives a crash of the machine only if its folder is written, too.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn write(path: &Path, text: &[u8], mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_is_made_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool.key");
        let made = PoolKey::create(&path).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert_eq!(file.len(), FILE_BYTES);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(made.derive("x"), PoolKey::read(&path).unwrap().derive("x"));
        // A stricter mode, and a line without its end.
        write(&path, &file[..64], 0o400);
        assert_eq!(made.derive("x"), PoolKey::read(&path).unwrap().derive("x"));

        let error = PoolKey::create(&path).unwrap_err().to_string();
        assert!(error.contains("never overwritten"), "{error}");
        let other = PoolKey::create(&folder.path().join("other.key")).unwrap();
        assert_ne!(made.derive("x"), other.derive("x"));
    }

    #[test]
    fn bad_files_are_refused_in_one_line_without_a_byte_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool.key");
        let good = [[b'7'; 64].as_slice(), b"\n"].concat();
        let refused = |text: &str, path: &Path| {
            let error = PoolKey::read(path).unwrap_err().to_string();
            assert!(error.contains(text) && !error.contains('\n') && !error.contains("777777"), "{error}");
        };
        refused("pumapool key new", &path);
        for mode in [0o640, 0o604, 0o620, 0o660, 0o644, 0o601] {
            write(&path, &good, mode);
            refused("chmod 600", &path);
        }
        let long = [good.as_slice(), b"\n"].concat();
        let almost = [&good[..63], b"x\n"].concat();
        let texts: [&[u8]; 7] = [b"", b"\n", &good[1..], &long, &almost, &[0xff; 65], &[b'7'; 100_000]];
        for text in texts {
            write(&path, text, 0o600);
            refused("64 hexadecimal digits", &path);
        }
        refused("no regular file", folder.path());
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        refused("no regular file", &pipe);
        if rustix::process::geteuid().is_root() {
            write(&path, &good, 0o600);
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            refused("chown 0", &path);
        }
    }

    #[test]
    fn each_use_has_its_own_key() {
        // From Python: hmac.new(bytes(range(32)), b"noise", "sha256").
        let key = PoolKey::new(std::array::from_fn(|at| at as u8));
        let digits: String = key.derive("noise").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, "2d00f8a4d8a65c325c8a32c9e0f01e219310823ce11a9baefcd885adfd5d1ccf");
        assert_ne!(key.derive("noise"), key.derive("gossip"));
        assert_eq!(format!("{key:?}"), "PoolKey(secret)");
    }
}
