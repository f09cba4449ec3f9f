//! Serves the page over HTTP, from one thread, to everybody who can connect. The page has amounts
//! and speeds, the program's version, and these names: mounts, backing directories, control groups,
//! images, guests' file systems and NUMA targets. It also has the addresses of lenders, hosts,
//! gossip and the pool's members. The server reads no input beyond the request.
//!
//! A client, even one that does not read, must never cost the daemon more than a few connections
//! and one status a second.

use crate::cli::metrics::Format;
use crate::metrics::page;
use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use report::Daemon;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::cell::Cell;
use std::convert::Infallible;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use wire::address::Address;
use wire::confined::{self, Work, confine};
use wire::listener::Listener;

/// Limit on concurrent connections. A further one closes the oldest, preferably one that has not
/// sent its request.
const CONNECTIONS_MAX: usize = 16;
/// Time limit of a connection for each step: receiving the request, making the page, and sending
/// it. So slow readers do not delay others. A connection serves one request.
const CONNECTION_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of a request's head, at the most: the least that the library takes.
const HEAD_BYTES_MAX: usize = 8192;
/// How long a page is reused. So the daemon is asked for its status at most so often.
const PAGE_LIFETIME: Duration = Duration::from_secs(1);
/// Pause when there are no descriptors left to accept with.
const RETRY: Duration = Duration::from_millis(100);

/// The statuses that the page is made of.
pub type Statuses = Arc<dyn Fn() -> Vec<Daemon> + Send + Sync>;

/// The listener of the page. It is bound before the daemon drops its rights, and closed when
/// dropped.
pub struct MetricsListener(Listener);

impl MetricsListener {
    /// Listens.
    ///
    /// # Errors
    /// When it cannot.
    pub fn bind(address: &Address) -> Result<MetricsListener> {
        // The daemon leaves its folder; the address must not.
        Ok(MetricsListener(Listener::bind(&address.clone().absolute()?).context("--metrics")?))
    }

    /// The address of the listener, with the port that the kernel has chosen.
    pub fn address(&self) -> &Address {
        self.0.address()
    }

    /// Serves the page, from a thread of its own, as long as the process runs.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn serve(&self, statuses: Statuses) -> Result<()> {
        serve(self.as_fd().try_clone_to_owned()?, statuses)
    }
}

impl AsFd for MetricsListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The address of such a socket.
pub fn address(socket: impl AsFd) -> Option<Address> {
    let name = rustix::net::getsockname(socket).ok()?;
    if let Ok(unix) = rustix::net::SocketAddrUnix::try_from(name.clone()) {
        return Some(Address::Unix(OsStr::from_bytes(unix.path_bytes()?).into()));
    }
    Some(SocketAddr::try_from(name).ok()?.into())
}

/// Serves as [`MetricsListener::serve`] does, on a socket that another process has bound.
pub fn serve(socket: OwnedFd, statuses: Statuses) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot serve metrics")?;
    // One thread speaks with the network. Another makes the pages, one after the other: it has the
    // daemon's rights, and may have to wait for those who know.
    let (pages, asked) = sync_channel(CONNECTIONS_MAX);
    let make = move || make_pages(&statuses, &asked);
    std::thread::Builder::new().name("puma-pages".into()).spawn(make).context("cannot start a thread")?;
    let is_unix = matches!(address(&socket), Some(Address::Unix(_)));
    let work = move || {
        confine(Work::Serving, confined::NOTHING);
        let ended = runtime.block_on(async {
            if is_unix {
                let listener = UnixListener::from_std(socket.into())?;
                accept(async || listener.accept().await.map(|(stream, _)| stream), pages).await;
            } else {
                let listener = TcpListener::from_std(socket.into())?;
                accept(async || listener.accept().await.map(|(stream, _)| stream), pages).await;
            }
            std::io::Result::Ok(())
        });
        if let Err(error) = ended {
            tracing::error!("cannot serve metrics: {error}");
        }
    };
    std::thread::Builder::new().name("puma-metrics".into()).spawn(work).context("cannot start a thread")?;
    Ok(())
}

async fn accept<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    next: impl AsyncFn() -> std::io::Result<S>,
    pages: SyncSender<Asked>,
) {
    let local = tokio::task::LocalSet::new();
    let accepting = async {
        let mut connections: Vec<Connection> = Vec::new();
        loop {
            let Ok(stream) = next().await else {
                tokio::time::sleep(RETRY).await;
                continue;
            };
            connections.retain(|connection| !connection.task.is_finished());
            if connections.len() >= CONNECTIONS_MAX {
                let silent = connections.iter().position(|connection| !connection.has_asked.get());
                connections.remove(silent.unwrap_or(0)).task.abort();
            }
            let (pages, has_asked) = (pages.clone(), Rc::new(Cell::new(false)));
            let asks = has_asked.clone();
            let task = tokio::task::spawn_local(async move {
                let deadline = Rc::new(Cell::new(Instant::now() + CONNECTION_LIMIT));
                let for_answer = deadline.clone();
                let answer = service_fn(move |request| {
                    asks.set(true);
                    let (pages, deadline) = (pages.clone(), for_answer.clone());
                    async move {
                        deadline.set(Instant::now() + CONNECTION_LIMIT);
                        let answer = answer(&request, pages).await;
                        deadline.set(Instant::now() + CONNECTION_LIMIT);
                        Ok::<_, Infallible>(answer)
                    }
                });
                let mut http = http1::Builder::new();
                http.keep_alive(false).max_buf_size(HEAD_BYTES_MAX);
                let connection = http.serve_connection(TokioIo::new(stream), answer);
                tokio::select! {
                    // A client that goes away, or makes no sense, has had its answer.
                    _ = connection => {}
                    () = passes(&deadline) => {}
                }
            });
            connections.push(Connection { task: task.abort_handle(), has_asked });
        }
    };
    local.run_until(accepting).await;
}

/// One that was accepted.
struct Connection {
    task: AbortHandle,
    has_asked: Rc<Cell<bool>>,
}

/// Waits until the deadline has passed, which may be put off meanwhile.
async fn passes(deadline: &Cell<Instant>) {
    while Instant::now() < deadline.get() {
        tokio::time::sleep_until(deadline.get().into()).await;
    }
}

/// The page is asked for in that format, by whoever waits there.
type Asked = (Format, oneshot::Sender<String>);

/// Answers all that is asked, for as long as somebody may ask.
fn make_pages(statuses: &Statuses, asked: &Receiver<Asked>) {
    let mut last: Option<(Instant, String)> = None;
    for (format, asker) in asked {
        let fresh = last.take().filter(|(made, _)| made.elapsed() < PAGE_LIFETIME);
        // A fault in one look is to cost one page.
        let look = || page::openmetrics(&statuses()).unwrap_or_default();
        last = fresh.or_else(|| Some((Instant::now(), catch_unwind(AssertUnwindSafe(look)).ok()?)));
        if let Some((_, page)) = &last {
            let _ = asker.send(format.convert(page));
        }
    }
}

async fn answer(request: &Request<Incoming>, pages: SyncSender<Asked>) -> Response<Full<Bytes>> {
    let respond = |status: StatusCode, text: String| {
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        response
    };
    if request.uri().path() != "/metrics" {
        return respond(StatusCode::NOT_FOUND, "there is nothing here but /metrics\n".to_owned());
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = respond(StatusCode::METHOD_NOT_ALLOWED, "GET or HEAD\n".to_owned());
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    let accept = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let format = Format::accepted(accept);
    let (asker, page) = oneshot::channel();
    // Full it is only of what connections have asked that are gone.
    let _ = pages.try_send((format, asker));
    let Ok(page) = page.await else {
        return respond(StatusCode::SERVICE_UNAVAILABLE, "the page cannot be made now; ask again\n".to_owned());
    };
    let mut response = respond(StatusCode::OK, page);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    response
}
