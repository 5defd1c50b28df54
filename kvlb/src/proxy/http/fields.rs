//! The fields of a head, as ranges of its bytes.

use super::FIELDS_MAX;

/// A range of a head's bytes. Heads are far shorter than 4 GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    at: u32,
    len: u32,
}

impl Span {
    /// The range that `part` is of `whole`; `part` must lie in it unless it is empty.
    pub(super) fn of(whole: &[u8], part: &[u8]) -> Self {
        if part.is_empty() {
            return Self::default();
        }
        let at = (part.as_ptr() as usize).wrapping_sub(whole.as_ptr() as usize);
        debug_assert!(at <= whole.len() && at + part.len() <= whole.len());
        Self { at: u32::try_from(at).unwrap_or(0), len: u32::try_from(part.len()).unwrap_or(0) }
    }

    pub(super) fn range(self) -> std::ops::Range<usize> {
        self.at as usize..self.at as usize + self.len as usize
    }
}

/// What a field means to a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// End to end: none of our business.
    Other,
    ContentLength,
    TransferEncoding,
    Connection,
    Host,
    Expect,
    Upgrade,
    AcceptEncoding,
    ForwardedFor,
    ForwardedProto,
    TraceParent,
    TraceState,
    /// For this connection only.
    Hop,
}

impl Kind {
    fn of(name: &str) -> Self {
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        match name.len() {
            2 if is("te") => Self::Hop,
            4 if is("host") => Self::Host,
            6 if is("expect") => Self::Expect,
            7 if is("upgrade") => Self::Upgrade,
            10 if is("connection") => Self::Connection,
            10 if is("keep-alive") => Self::Hop,
            10 if is("tracestate") => Self::TraceState,
            11 if is("traceparent") => Self::TraceParent,
            14 if is("content-length") => Self::ContentLength,
            15 if is("x-forwarded-for") => Self::ForwardedFor,
            15 if is("accept-encoding") => Self::AcceptEncoding,
            16 if is("proxy-connection") => Self::Hop,
            17 if is("transfer-encoding") => Self::TransferEncoding,
            17 if is("x-forwarded-proto") => Self::ForwardedProto,
            18 if is("proxy-authenticate") => Self::Hop,
            19 if is("proxy-authorization") => Self::Hop,
            _ => Self::Other,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    pub(super) kind: Kind,
    name: Span,
    value: Span,
}

/// The fields of a head, as ranges of the bytes they were parsed from.
#[derive(Clone, Debug, Default)]
pub(super) struct Lines(Vec<Line>);

impl Lines {
    pub(super) fn of(head: &[u8], fields: &[httparse::Header<'_>]) -> Self {
        debug_assert!(fields.len() <= FIELDS_MAX);
        Self(
            fields
                .iter()
                .map(|field| Line {
                    kind: Kind::of(field.name),
                    name: Span::of(head, field.name.as_bytes()),
                    value: Span::of(head, field.value),
                })
                .collect(),
        )
    }

    pub(super) fn on<'a>(&'a self, head: &'a [u8]) -> Fields<'a> {
        Fields { head, lines: &self.0 }
    }
}

/// The fields of a head, in its order.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    head: &'a [u8],
    lines: &'a [Line],
}

impl<'a> Fields<'a> {
    /// The value of the first field called `name`, in any case; without the space around it.
    pub fn get(self, name: &str) -> Option<&'a [u8]> {
        self.iter().find(|(own, _)| own.eq_ignore_ascii_case(name.as_bytes())).map(|(_, value)| value)
    }

    /// As [`Fields::get`], where the value is text.
    pub fn text(self, name: &str) -> Option<&'a str> {
        std::str::from_utf8(self.get(name)?).ok()
    }

    /// As [`Fields::text`], of a field that goes on to the other side.
    pub fn end_to_end(self, name: &str) -> Option<&'a str> {
        let is_for_connection = self.list(Kind::Connection).any(|named| named.eq_ignore_ascii_case(name.as_bytes()));
        self.text(name).filter(|_| !is_for_connection)
    }

    /// Bytes of the whole head.
    pub(in crate::proxy) fn bytes(self) -> usize {
        self.head.len()
    }

    /// Names and values.
    pub fn iter(self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        self.lines.iter().map(move |line| (&self.head[line.name.range()], &self.head[line.value.range()]))
    }

    /// Values of every field of one kind.
    pub(super) fn of_kind(self, kind: Kind) -> impl Iterator<Item = &'a [u8]> {
        self.lines.iter().filter(move |line| line.kind == kind).map(move |line| &self.head[line.value.range()])
    }

    /// The members of all comma-separated lists of one kind, without empty ones.
    pub(super) fn list(self, kind: Kind) -> impl Iterator<Item = &'a [u8]> {
        self.of_kind(kind)
            .flat_map(|value| value.split(|byte| *byte == b','))
            .map(<[u8]>::trim_ascii)
            .filter(|member| !member.is_empty())
    }

    /// Writes every field that goes on to the other side: none that is for this connection only, none of which `drop`
    /// says that the proxy writes it itself.
    pub(super) fn write_end_to_end(self, out: &mut Vec<u8>, drop: impl Fn(Kind) -> bool) {
        let mut named: [&[u8]; NAMED_MAX] = [&[]; NAMED_MAX];
        let mut count = 0;
        for name in self.list(Kind::Connection).filter(|name| names_a_field(name)) {
            if let Some(slot) = named.get_mut(count) {
                *slot = name;
                count += 1;
            }
        }
        let named = &named[..count];
        for line in self.lines {
            let gone = match line.kind {
                Kind::Hop | Kind::Connection | Kind::Upgrade | Kind::TransferEncoding | Kind::ContentLength => true,
                kind @ (Kind::Other | Kind::TraceParent | Kind::TraceState) => {
                    let name = &self.head[line.name.range()];
                    named.iter().any(|named| named.eq_ignore_ascii_case(name)) || drop(kind)
                }
                kind => drop(kind),
            };
            if !gone {
                write_field(out, &self.head[line.name.range()], &self.head[line.value.range()]);
            }
        }
    }
}

/// Fields that `Connection` may name; requests that name more are refused.
pub(super) const NAMED_MAX: usize = 16;

/// Whether a member of `Connection` names a field, and is not one of its own words.
fn names_a_field(member: &[u8]) -> bool {
    !member.eq_ignore_ascii_case(b"close") && !member.eq_ignore_ascii_case(b"keep-alive")
}

/// Writes one field line.
pub(super) fn write_field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.extend_from_slice(name);
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// The length that `Content-Length` fields agree on; `None` where there is none.
///
/// # Errors
/// When there are several that differ, or one is not a plain number.
///
/// Source: RFC 9112 §6.3: a list of one same value counts as that value.
pub(super) fn content_length(fields: Fields<'_>) -> Result<Option<u64>, ()> {
    let mut length = None;
    for value in fields.of_kind(Kind::ContentLength) {
        for member in value.split(|byte| *byte == b',') {
            let member = number(member.trim_ascii()).ok_or(())?;
            if length.is_some_and(|length| length != member) {
                return Err(());
            }
            length = Some(member);
        }
    }
    Ok(length)
}

/// Digits alone: no sign, no space, nothing above 2^63 (what a signed reader would take for negative).
fn number(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = std::str::from_utf8(digits).ok()?;
    digits.parse().ok().filter(|length| i64::try_from(*length).is_ok())
}
