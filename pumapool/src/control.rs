//! How the commands find the daemons of this machine: each has a Unix socket in one folder, and answers a connection with its
//! status as one JSON object.

use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a daemon may take to tell its status.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of a status at the most.
const STATUS_BYTES_MAX: u64 = 4 << 20;

/// The folder: root's daemons are in `/run`, a user's in that user's runtime folder.
pub fn folder() -> PathBuf {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return "/run/pumapool".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(runtime) => Path::new(&runtime).join("pumapool"),
        None => std::env::temp_dir().join(format!("pumapool-{}", uid.as_raw())),
    }
}

/// Makes the folder if need be, for its owner only.
pub fn make_folder() -> Result<PathBuf> {
    let folder = folder();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let owner = rustix::fs::stat(&folder).with_context(|| format!("cannot look at {}", folder.display()))?.st_uid;
    anyhow::ensure!(
        owner == rustix::process::geteuid().as_raw(),
        "{} belongs to somebody else; remove it or set XDG_RUNTIME_DIR",
        folder.display()
    );
    Ok(folder)
}

/// The socket of a running daemon; removed when dropped.
pub struct Control {
    path: PathBuf,
}

impl Control {
    /// Answers connections with what `status` returns, from a thread of its own, as long as the process runs.
    pub fn serve(kind: &str, status: impl Fn() -> Value + Send + 'static) -> Result<Control> {
        let path = make_folder()?.join(format!("{kind}-{}.sock", std::process::id()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        std::thread::Builder::new().name("puma-control".into()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else {
                    std::thread::sleep(Duration::from_millis(100)); // out of descriptors: do not spin
                    continue;
                };
                let _ = stream.set_write_timeout(Some(ANSWER_TIMEOUT));
                let _ = stream.write_all(status().to_string().as_bytes());
            }
        })?;
        Ok(Control { path })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The status of every daemon that can be reached. Sockets that nobody listens on any more are removed.
pub fn ask_all() -> Vec<Value> {
    let Ok(entries) = fs::read_dir(folder()) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "sock"));
    paths.sort();
    paths.iter().filter_map(|path| ask(path)).collect()
}

fn ask(path: &Path) -> Option<Value> {
    let stream = match UnixStream::connect(path) {
        Ok(stream) => stream,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            let _ = fs::remove_file(path);
            return None;
        }
        Err(_) => return None,
    };
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).ok()?;
    let mut text = String::new();
    stream.take(STATUS_BYTES_MAX).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}
