//! JSON from its end.
//!
//! The last byte of a JSON document is outside of every string, and from there each quote can be told for what it is. So the
//! end of a long document can be read without a look at its beginning. What is not certain ends the reading.

/// A piece of JSON.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Token<'a> {
    /// `{` or `[`.
    Open,
    /// `}` or `]`.
    Close,
    /// `,`.
    Comma,
    /// `:`.
    Colon,
    /// What stands between two quotes, escapes and all.
    Text(&'a [u8]),
    /// A number, `true`, `false`, `null`.
    Plain,
}

/// Reads JSON from its end to its beginning, or to the first piece whose beginning is missing.
#[derive(Debug)]
pub(crate) struct Backwards<'a> {
    text: &'a [u8],
    /// Bytes that are still to be read.
    at: usize,
}

impl<'a> Iterator for Backwards<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        let rest = self.text[..self.at].trim_ascii_end();
        self.at = rest.len().checked_sub(1)?;
        match rest[self.at] {
            b'{' | b'[' => Some(Token::Open),
            b'}' | b']' => Some(Token::Close),
            b',' => Some(Token::Comma),
            b':' => Some(Token::Colon),
            b'"' => self.string(),
            byte if is_plain(byte) => {
                self.at = rest.iter().rposition(|byte| !is_plain(*byte))? + 1;
                Some(Token::Plain)
            }
            _ => None,
        }
    }
}

impl<'a> Backwards<'a> {
    /// The reader of what ends where a JSON document does; its beginning may be missing.
    pub(crate) fn new(text: &'a [u8]) -> Self {
        Self { text, at: text.len() }
    }

    /// Where the piece begins that was read last.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The string whose closing quote is at `at`. A quote within it is escaped: an odd number of backslashes stands before
    /// it, and none before the opening one, since nothing outside of strings has any.
    fn string(&mut self) -> Option<Token<'a>> {
        let closing = self.at;
        loop {
            let quote = self.text[..self.at].iter().rposition(|byte| *byte == b'"')?;
            let backslashes = self.text[..quote].iter().rev().take_while(|byte| **byte == b'\\').count();
            self.at = quote;
            if backslashes == quote {
                // What stands before is missing: this could be either.
                return None;
            }
            if backslashes % 2 == 0 {
                return Some(Token::Text(&self.text[quote + 1..closing]));
            }
        }
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}
