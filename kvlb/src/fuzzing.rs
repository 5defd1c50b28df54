//! What must hold of parsers whatever bytes they get. `cargo xtask fuzz` looks for bytes for which it does not; the unit test
//! runs those that were found, and the rest of the corpus.
//!
//! Each function panics where what must hold does not.

use std::cell::Cell;

use kvlb_common::packet::{self, Bytes, Parsed, READS_MAX, Segment};
use serde::de::IgnoredAny;

use crate::contract::events::{Event, decode, time};
use crate::openai::{Glimpse, Request, glimpse_model, model, parse};
use crate::proxy;

const PATHS: [&str; 6] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/inference/v1/generate",
    "/v1/responses",
    "/v1/messages",
];

/// The head of a request, after a byte that says how its pieces are cut: the same in pieces as at once, and one head when
/// it is passed on.
pub fn head(bytes: &[u8]) {
    proxy::fuzzing::head(bytes);
}

/// A chunked body, after a byte that says how its pieces are cut: the same in pieces as at once, scanned as decoded.
pub fn chunked(bytes: &[u8]) {
    proxy::fuzzing::chunked(bytes);
}

/// The body of an OpenAI request, after a byte that says to which path: a prompt comes of a JSON object only, and two ways
/// of reading its model agree.
///
/// # Panics
/// Where what must hold does not.
pub fn body(bytes: &[u8]) {
    let Some((path, body)) = bytes.split_first() else { return };
    let path = PATHS[usize::from(*path) % PATHS.len()];
    let request = Request { method: "POST", path, model_header: None, body };
    let named = model(&request);
    assert_eq!(glimpse_model(&request, body.len()), Glimpse::Model(named.clone()), "a look at all of it");
    // At its ends only, it may be overruled by what stands between; whether it makes sense of them is what is tried here.
    if let Glimpse::Model(Some(glimpsed)) = glimpse_model(&request, body.len() / 3) {
        assert!(!glimpsed.is_empty(), "a model without a name");
    }
    let Ok(prompt) = parse(&request) else { return };
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let is_json = serde_json::from_slice::<IgnoredAny>(body).is_ok();
    assert!(is_json && body.trim_ascii_start().starts_with(b"{"), "a prompt of what is no object");
    assert_eq!(prompt.model, named, "two readers, two models");
}

/// A message of vLLM's event stream: decoded or refused, in proportion to its length.
///
/// # Panics
/// Where what must hold does not.
pub fn events(bytes: &[u8]) {
    let Ok(batch) = decode(bytes) else { return };
    assert_eq!(time(bytes).to_bits(), batch.ts.to_bits(), "two readers, two times");
    let said = |event: &Event| match event {
        Event::Stored(stored) => stored.hashes.len() + stored.tokens.len(),
        Event::Removed(removed) => removed.hashes.len(),
        Event::Cleared => 0,
    };
    assert!(batch.events.iter().map(said).sum::<usize>() <= bytes.len(), "more names and tokens than bytes");
}

/// An Ethernet frame, as the kernel program reads it: in a bounded number of reads, and by what it read alone.
///
/// # Panics
/// Where what must hold does not.
pub fn frame(bytes: &[u8]) {
    let counted = Counted { bytes, reads: Cell::new(0), end: Cell::new(0) };
    let parsed = packet::parse(&counted);
    assert!(counted.reads.get() <= READS_MAX, "{} reads", counted.reads.get());
    if let Parsed::Tcp(segment) = &parsed {
        let [source, target] = [segment.source, segment.target].map(kvlb_common::addr_from_bytes);
        let pair = |addr: std::net::IpAddr| match addr {
            std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
            std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let (short, long) = ([pair(source), pair(target)].concat(), [segment.source, segment.target].concat());
        let stands = |what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
        assert!(stands(&short) || stands(&long), "from {source} to {target}");
        let ports = [segment.source_port.to_be_bytes(), segment.target_port.to_be_bytes()].concat();
        assert!(stands(&ports), "ports {ports:?}");
    }
    // A first fragment may go on where it was cut off.
    if !matches!(parsed, Parsed::Malformed | Parsed::Tcp(Segment { flags: None, .. })) {
        assert_eq!(packet::parse(&bytes[..counted.end.get()]), parsed, "without what was not read");
        assert_eq!(packet::parse([bytes, &[0xff; 64]].concat().as_slice()), parsed, "with more behind");
    }
}

/// A frame that counts how often it is read, and knows how far.
struct Counted<'a> {
    bytes: &'a [u8],
    reads: Cell<usize>,
    end: Cell<usize>,
}

impl Bytes for Counted<'_> {
    fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        assert!(at <= packet::OFFSET_MAX, "a read at {at}");
        self.reads.set(self.reads.get() + 1);
        let read = self.bytes.read(at)?;
        self.end.set(self.end.get().max(at + N));
        Some(read)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// What `cargo xtask fuzz --coverage` wants to be run besides.
    #[expect(
        clippy::disallowed_methods,
        reason = "a test is no part of the daemon, whose environment only config reads"
    )]
    fn more(name: &str) -> Vec<std::path::PathBuf> {
        let folder = std::env::var_os("KVLB_FUZZ_MORE").map(|folder| Path::new(&folder).join(name));
        let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn what_was_found_holds() {
        type Target = fn(&[u8]);
        let targets = [super::head as Target, super::chunked, super::body, super::events, super::frame];
        for (name, target) in ["head", "chunked", "body", "events", "frame"].into_iter().zip(targets) {
            let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
            let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
            assert!(files.len() > 10, "no corpus in {}", corpus.display());
            for file in files.into_iter().chain(more(name)) {
                target(&std::fs::read(file).unwrap());
            }
        }
    }
}
