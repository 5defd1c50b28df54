//! W3C trace context: read what a client sent, and write what an endpoint gets.
//!
//! Nothing of a client's own spelling goes on: the field is written anew from numbers, so that it cannot carry anything
//! else. Source: W3C Recommendation "Trace Context" of 23 November 2021, for version 00 of `traceparent`; the random flag
//! is that of level 2.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};

use crate::telemetry::access::TraceIds;

/// The caller may have recorded the trace.
const SAMPLED: u8 = 0x01;
/// The trace id is random to its last 56 bits.
const RANDOM: u8 = 0x02;

/// Bytes of `traceparent` in version 00, and of what any later one begins with.
const LENGTH: usize = 55;

/// What a client's `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parent {
    trace_id: u128,
    span_id: u64,
    flags: u8,
}

impl Parent {
    /// What the only field of that name says; `None` where there is none, where there are several, or where it does not
    /// say what it must.
    pub(super) fn of<'a>(values: impl IntoIterator<Item = &'a [u8]>) -> Option<Self> {
        let mut values = values.into_iter();
        let value = values.next()?;
        if values.next().is_some() { None } else { Self::read(value.trim_ascii()) }
    }

    /// The ids of the trace and of the client's span.
    pub(super) fn ids(self) -> (u128, u64) {
        (self.trace_id, self.span_id)
    }

    fn read(value: &[u8]) -> Option<Self> {
        let (known, more) = value.split_at_checked(LENGTH)?;
        let [version, trace_id, span_id, flags] = parts(known)?;
        let version = number(version)?;
        let is_whole = match version {
            0 => more.is_empty(),
            0xff => return None,
            // What later versions add stands behind another dash.
            _ => matches!(more, [] | [b'-', ..]),
        };
        // Of later versions this bit alone is promised to mean the same.
        let known = if version == 0 { SAMPLED | RANDOM } else { SAMPLED };
        let flags = u8::try_from(number(flags)?).ok()? & known;
        let (trace_id, span_id) = (number(trace_id)?, u64::try_from(number(span_id)?).ok()?);
        (is_whole && trace_id != 0 && span_id != 0).then_some(Self { trace_id, span_id, flags })
    }
}

/// The four parts between the dashes.
fn parts(value: &[u8]) -> Option<[&[u8]; 4]> {
    let mut parts = value.split(|byte| *byte == b'-');
    let four = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
    let lengths = four.map(<[u8]>::len);
    (parts.next().is_none() && lengths == [2, 32, 16, 2]).then_some(four)
}

/// Digits in lower case, as the recommendation wants them.
fn number(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some((number << 4) | u128::from(value))
    })
}

/// The place of one request in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "these are the recommendation's names")]
pub(super) struct Trace {
    /// Not zero.
    pub(super) trace_id: u128,
    /// Ours, not zero: the parent of what the endpoint does.
    pub(super) span_id: u64,
    /// The client's, where it began the trace.
    pub(super) parent_id: Option<u64>,
    flags: u8,
}

impl Trace {
    /// Goes on with the client's trace, or begins one.
    pub(super) fn new(parent: Option<Parent>, ids: &Ids) -> Self {
        let span_id = ids.next();
        if let Some(Parent { trace_id, span_id: parent_id, flags }) = parent {
            return Self { trace_id, span_id, parent_id: Some(parent_id), flags };
        }
        let trace_id = (u128::from(ids.next()) << 64) | u128::from(ids.next());
        Self { trace_id, span_id, parent_id: None, flags: SAMPLED }
    }

    /// The same; one that was begun here tells whether it is recorded.
    pub(super) fn marked(self, recorded: bool) -> Self {
        let begun_here = self.parent_id.is_none();
        Self { flags: if begun_here && !recorded { 0 } else { self.flags }, ..self }
    }

    /// For the access log.
    pub(super) fn ids(&self) -> TraceIds {
        TraceIds { trace_id: self.trace_id, span_id: Some(self.span_id), parent_id: self.parent_id }
    }

    /// Writes the field line.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let mut line = *b"traceparent: 00-00000000000000000000000000000000-0000000000000000-00\r\n";
        write_hex(&mut line[16..48], self.trace_id);
        write_hex(&mut line[49..65], self.span_id.into());
        write_hex(&mut line[66..68], self.flags.into());
        out.extend_from_slice(&line);
    }
}

fn write_hex(digits: &mut [u8], number: u128) {
    let mut rest = number;
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdef"[usize::from(rest.to_le_bytes()[0] & 0xf)];
        rest >>= 4;
    }
}

/// Random numbers of one data thread: a keyed hash of 1, 2, 3 and so on, by a key that the system gave this thread.
/// Nobody who sees some of them can tell the next.
#[derive(Debug)]
pub(super) struct Ids {
    key: RandomState,
    drawn: Cell<u64>,
}

impl Ids {
    pub(super) fn new() -> Self {
        Self { key: RandomState::new(), drawn: Cell::new(0) }
    }

    /// One that is not zero.
    pub(super) fn next(&self) -> u64 {
        let drawn = self.drawn.get().wrapping_add(1);
        self.drawn.set(drawn);
        self.key.hash_one(drawn).max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TRACE: u128 = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;
    const SPAN: u64 = 0xb7ad_6b71_6920_3331;

    fn read(value: &str) -> Option<Parent> {
        Parent::of([value.as_bytes()])
    }

    #[test]
    fn a_parent_is_read_as_the_recommendation_says() {
        let with = |flags| Some(Parent { trace_id: TRACE, span_id: SPAN, flags });
        let ids = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";
        let cases = [
            (format!("00-{ids}-00"), with(0)),
            (format!("00-{ids}-01"), with(1)),
            (format!(" 00-{ids}-01\t"), with(1)),
            // Bits without a meaning are cleared.
            (format!("00-{ids}-03"), with(3)),
            (format!("00-{ids}-ff"), with(3)),
            (format!("00-{ids}-08"), with(0)),
            // Version 00 has these four parts and no more.
            (format!("00-{ids}-01-"), None),
            (format!("00-{ids}-01-what"), None),
            (format!("00-{ids}-01."), None),
            (format!("00-{ids}"), None),
            (format!("00-{ids}-"), None),
            (format!("00-{ids}-1"), None),
            // A later one may have more, behind a dash.
            (format!("01-{ids}-01"), with(1)),
            (format!("cc-{ids}-01"), with(1)),
            (format!("cc-{ids}-03"), with(1)),
            (format!("cc-{ids}-01-what-the-future-will-be-like"), with(1)),
            (format!("cc-{ids}-01."), None),
            (format!("cc-{ids}-01what"), None),
            (format!("cc-{ids}-"), None),
            (format!("ff-{ids}-01"), None),
            (format!("0-{ids}-01"), None),
            (format!("000-{ids}-01"), None),
            (format!("-{ids}-01"), None),
            (format!(".0-{ids}-01"), None),
            (format!("0x-{ids}-01"), None),
            (format!("00-{ids}-0x"), None),
            (format!("00-{ids}-.0"), None),
            // Ids are lower-case digits, of exact length, and not zero.
            ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c-B7AD6B7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319C-b7ad6b7169203331-01".to_owned(), None),
            (format!("0A-{ids}-01"), None),
            (format!("00-{ids}-0A"), None),
            ("00-00000000000000000000000000000000-b7ad6b7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c1-b7ad6b7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b71692033311-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319-cb7ad6b7169203331-01".to_owned(), None),
            ("00-.af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned(), None),
            ("00-0af7651916cd43dd8448eb211c80319c-.7ad6b7169203331-01".to_owned(), None),
            (format!("00_{}_01", ids.replace('-', "_")), None),
            ("00-é".repeat(20), None),
            ("-".repeat(55), None),
            (String::new(), None),
        ];
        for (value, expected) in cases {
            assert_eq!(read(&value), expected, "{value:?}");
        }
    }

    #[test]
    fn several_fields_are_none() {
        let value = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".as_slice();
        assert!(Parent::of([value]).is_some());
        assert_eq!(Parent::of([value, value]), None);
        assert_eq!(Parent::of([value, b"nonsense"]), None);
        assert_eq!(Parent::of([b"nonsense".as_slice(), value]), None);
        assert_eq!(Parent::of([]), None);
    }

    #[test]
    fn what_is_written_is_read_again_and_keeps_the_trace() {
        let ids = Ids::new();
        let parent = Parent { trace_id: TRACE, span_id: SPAN, flags: 3 };
        for (parent, recorded, flags) in [(Some(parent), false, 3), (None, true, 1), (None, false, 0)] {
            let trace = Trace::new(parent, &ids).marked(recorded);
            let mut out = Vec::new();
            trace.write(&mut out);
            let text = std::str::from_utf8(&out).unwrap();
            let value = text.strip_prefix("traceparent: ").and_then(|text| text.strip_suffix("\r\n")).unwrap();
            assert_eq!(value.len(), LENGTH);
            assert_eq!(read(value), Some(Parent { trace_id: trace.trace_id, span_id: trace.span_id, flags }));
            assert_eq!(trace.parent_id, parent.map(|_| SPAN));
            assert!(trace.span_id != SPAN && (trace.trace_id == TRACE) == parent.is_some());
        }
    }

    #[test]
    fn ids_do_not_repeat_from_thread_to_thread() {
        let draw = || {
            let ids = Ids::new();
            (0..10_000).map(|_| ids.next()).collect::<BTreeSet<u64>>()
        };
        let mut all = draw();
        for other in [std::thread::spawn(draw), std::thread::spawn(draw)] {
            all.extend(other.join().unwrap());
        }
        assert_eq!(all.len(), 30_000);
        assert!(!all.contains(&0));
    }
}
