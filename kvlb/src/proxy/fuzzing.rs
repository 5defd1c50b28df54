//! What must hold of the proxy's parsers whatever bytes they get: see [`crate::fuzzing`].

#![expect(clippy::panic, reason = "that something does not hold is said by a panic")]

use std::net::{Ipv4Addr, SocketAddr};

use super::http::{ChunkError, Chunked, FIELDS_MAX, Forward, Framing, Head, HeadScan, Refusal};
use super::trace::{Ids, Trace};

/// The head of a request, after a byte that says how its pieces are cut.
///
/// # Panics
/// Where what must hold does not.
pub(crate) fn head(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else { return };
    let whole = HeadScan::default().request(bytes);
    let pieces = in_pieces(bytes, usize::from(*step).max(1));
    match (&whole, &pieces) {
        (Ok(Some((head, length))), Ok(Some((other, other_length)))) => {
            assert_eq!((length, head.method(), head.target()), (other_length, other.method(), other.target()));
            read(head);
            forwarded(head);
        }
        // What lies behind a head may be refused with it, or be the next one's.
        (Err(refusal), _) => refused(*refusal),
        (Ok(None), Ok(None)) => {}
        _ => panic!("whole {whole:?}, in pieces {pieces:?}"),
    }
}

fn in_pieces(bytes: &[u8], step: usize) -> Result<Option<(Head, usize)>, Refusal> {
    let mut scan = HeadScan::default();
    let ends = (step..bytes.len()).step_by(step).chain([bytes.len()]);
    for end in ends {
        if let Some(done) = scan.request(&bytes[..end])? {
            return Ok(Some(done));
        }
    }
    Ok(None)
}

/// A refusal is an error of the client's, or says that we lack something, and has words for it.
fn refused(refusal: Refusal) {
    assert!(matches!(refusal.status(), 400..=431 | 501 | 505), "{refusal:?}");
    assert!(!refusal.code().is_empty() && refusal.code().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
    assert!(!refusal.to_string().is_empty());
}

/// What is read of a head belongs to it.
fn read(head: &Head) {
    assert!(head.path().starts_with('/') || head.path() == "*", "{:?}", head.path());
    assert!(head.origin_target().starts_with(head.path()) || head.origin_target().starts_with('?'));
    assert_eq!(head.is_head(), head.method() == "HEAD");
    assert!(!(head.is_http_1_0() && head.expects_continue()), "HTTP/1.0 knows no interim answers");
    let hosts = head.fields().iter().filter(|(name, _)| name.eq_ignore_ascii_case(b"host")).count();
    assert!(hosts <= 1 && (hosts == 1 || head.is_http_1_0()), "{hosts} of Host");
    assert!(head.host().is_none_or(str::is_ascii));
    assert_eq!(head.fields().text("host").is_some(), hosts == 1);
    let (mut traced, trace) = (head.clone(), Trace::new(head.parent(), &Ids::new()));
    traced.set_trace(trace);
    assert_eq!(traced.trace(), Some(&trace));
    forwarded(&traced);
}

/// Fields that are added on the way: Host, traceparent, two of forwarding, and the framing.
const ADDED: usize = 5;

/// A head that is passed on is one head, with the framing that it was given. One that has as many fields as may be has more
/// then, which engines take and another kvlb would not.
fn forwarded(head: &Head) {
    if head.fields().iter().count() + ADDED > FIELDS_MAX {
        return;
    }
    let vip = SocketAddr::from((Ipv4Addr::LOCALHOST, 80));
    for framing in [Framing::None, Framing::Length(7), Framing::Chunked] {
        let mut out = Vec::new();
        let forward = Forward { client: Some("192.0.2.1"), vip, framing, expect_continue: false, read_here: true };
        head.write_for_endpoint(&mut out, &forward);
        let parsed = HeadScan::default().request(&out);
        let Ok(Some((again, length))) = parsed else { panic!("{parsed:?}: {:?}", String::from_utf8_lossy(&out)) };
        assert_eq!(length, out.len(), "something stands behind the head");
        assert_eq!((again.method(), again.framing(), again.is_http_1_0()), (head.method(), framing, false));
        assert_eq!(again.path(), head.path());
        assert!(head.trace().is_none() || again.parent().is_some(), "the endpoint is told of the trace");
    }
}

/// A chunked body, after a byte that says how its pieces are cut.
///
/// # Panics
/// Where what must hold does not.
pub(crate) fn chunked(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else { return };
    let whole = scanned(bytes, bytes.len().max(1));
    assert_eq!(whole, scanned(bytes, usize::from(*step).max(1)), "the same in pieces");
    let mut body = Chunked::default();
    let mut buffer = bytes.to_vec();
    let decoded = body.decode(&mut buffer).map(|(payload, used)| (buffer[..payload].to_vec(), used));
    let Ok(read) = whole else { return assert!(decoded.is_err(), "scanning refuses what decoding takes") };
    assert_eq!(decoded.as_ref().ok(), Some(&(read.payload.clone(), read.used)));
    if read.done {
        assert!(read.used <= bytes.len() && bytes[..read.used].ends_with(b"\r\n"));
    } else {
        assert_eq!(read.used, bytes.len(), "all is taken until the end");
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Read {
    payload: Vec<u8>,
    used: usize,
    done: bool,
    trailers: Vec<u8>,
}

fn scanned(bytes: &[u8], step: usize) -> Result<Read, ChunkError> {
    let (mut scanner, mut payload, mut used) = (Chunked::default(), Vec::new(), 0);
    for piece in bytes.to_vec().chunks_mut(step) {
        let count = scanner.scan_showing(piece, |bytes| payload.extend_from_slice(bytes))?;
        used += count;
        if scanner.is_done() {
            break;
        }
    }
    Ok(Read { payload, used, done: scanner.is_done(), trailers: scanner.trailers().to_vec() })
}
