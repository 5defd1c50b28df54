//! A reader over one msgpack message that never allocates more than the message itself can hold.

use rmp::Marker;

/// What is wrong with the bytes of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReadError {
    /// The message ends inside a value.
    #[error("the message ends early")]
    Truncated,
    /// A value is of another type than expected, or out of its range.
    #[error("a value of the wrong type")]
    Type,
}

type Result<T> = std::result::Result<T, ReadError>;

/// A position in a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) const fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    pub(super) fn is_nil(&self) -> bool {
        self.peek() == Some(Marker::Null)
    }

    pub(super) fn is_array(&self) -> bool {
        matches!(self.peek(), Some(Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
    }

    pub(super) fn is_map(&self) -> bool {
        matches!(self.peek(), Some(Marker::FixMap(_) | Marker::Map16 | Marker::Map32))
    }

    pub(super) fn is_text(&self) -> bool {
        matches!(self.peek(), Some(Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32))
    }

    pub(super) fn is_bin(&self) -> bool {
        matches!(self.peek(), Some(Marker::Bin8 | Marker::Bin16 | Marker::Bin32))
    }

    /// Reads `nil` if it is next, and says whether it was.
    pub(super) fn nil(&mut self) -> bool {
        let nil = self.is_nil();
        if nil {
            self.rest = &self.rest[1..];
        }
        nil
    }

    /// Reads the head of an array: its number of elements, which the bytes left can hold.
    pub(super) fn array(&mut self) -> Result<usize> {
        let length = match self.marker()? {
            Marker::FixArray(length) => length.into(),
            Marker::Array16 => self.be::<2>()?,
            Marker::Array32 => self.be::<4>()?,
            _ => return Err(ReadError::Type),
        };
        self.plausible(length)
    }

    /// Reads the head of a map: its number of pairs.
    pub(super) fn map(&mut self) -> Result<usize> {
        let length = match self.marker()? {
            Marker::FixMap(length) => length.into(),
            Marker::Map16 => self.be::<2>()?,
            Marker::Map32 => self.be::<4>()?,
            _ => return Err(ReadError::Type),
        };
        self.plausible(length)
    }

    pub(super) fn text(&mut self) -> Result<&'a str> {
        let length = match self.marker()? {
            Marker::FixStr(length) => length.into(),
            Marker::Str8 => self.be::<1>()?,
            Marker::Str16 => self.be::<2>()?,
            Marker::Str32 => self.be::<4>()?,
            _ => return Err(ReadError::Type),
        };
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_not_utf8| ReadError::Type)
    }

    pub(super) fn bin(&mut self) -> Result<&'a [u8]> {
        let length = match self.marker()? {
            Marker::Bin8 => self.be::<1>()?,
            Marker::Bin16 => self.be::<2>()?,
            Marker::Bin32 => self.be::<4>()?,
            _ => return Err(ReadError::Type),
        };
        self.take(length)
    }

    /// Reads an integer as its 64-bit two's complement, and says whether it is negative.
    #[inline]
    pub(super) fn bits(&mut self) -> Result<(u64, bool)> {
        let signed = |value: i64| (value.cast_unsigned(), value < 0);
        Ok(match self.marker()? {
            Marker::FixPos(value) => (value.into(), false),
            Marker::U8 => (self.be::<1>()?, false),
            Marker::U16 => (self.be::<2>()?, false),
            Marker::U32 => (self.be::<4>()?, false),
            Marker::U64 => (self.be::<8>()?, false),
            Marker::FixNeg(value) => signed(value.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.bytes()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.bytes()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.bytes()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.bytes()?)),
            _ => return Err(ReadError::Type),
        })
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        let (bits, negative) = self.bits()?;
        u32::try_from(bits).ok().filter(|_| !negative).ok_or(ReadError::Type)
    }

    pub(super) fn i64(&mut self) -> Result<i64> {
        let (bits, negative) = self.bits()?;
        let value = bits.cast_signed();
        if (value < 0) == negative { Ok(value) } else { Err(ReadError::Type) }
    }

    /// Reads a number as a float; an integer will do.
    pub(super) fn f64(&mut self) -> Result<f64> {
        match self.peek() {
            Some(Marker::F64) => {
                self.marker()?;
                Ok(f64::from_be_bytes(self.bytes()?))
            }
            Some(Marker::F32) => {
                self.marker()?;
                Ok(f32::from_be_bytes(self.bytes()?).into())
            }
            _ => {
                let integer = self.i64()?;
                #[expect(clippy::cast_precision_loss, reason = "a time in whole seconds is exact")]
                Ok(integer as f64)
            }
        }
    }

    /// Steps over one value of any type. Counts what is left to skip instead of recursing, so depth costs nothing.
    pub(super) fn skip(&mut self) -> Result<()> {
        let mut values: u64 = 1;
        while values > 0 {
            values -= 1;
            let marker = self.marker()?;
            let (bytes, inner) = self.size(marker)?;
            self.take(bytes)?;
            values = values.saturating_add(inner);
        }
        Ok(())
    }

    /// The bytes that follow a value's head, and the values it holds.
    fn size(&mut self, marker: Marker) -> Result<(u64, u64)> {
        Ok(match marker {
            Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => (0, 0),
            Marker::U8 | Marker::I8 => (1, 0),
            Marker::U16 | Marker::I16 | Marker::FixExt1 => (2, 0),
            Marker::FixExt2 => (3, 0),
            Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
            Marker::FixExt4 => (5, 0),
            Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
            Marker::FixExt8 => (9, 0),
            Marker::FixExt16 => (17, 0),
            Marker::FixStr(length) => (length.into(), 0),
            Marker::Str8 | Marker::Bin8 => (self.be::<1>()?, 0),
            Marker::Str16 | Marker::Bin16 => (self.be::<2>()?, 0),
            Marker::Str32 | Marker::Bin32 => (self.be::<4>()?, 0),
            // An extension's type takes a byte.
            Marker::Ext8 => (1 + self.be::<1>()?, 0),
            Marker::Ext16 => (1 + self.be::<2>()?, 0),
            Marker::Ext32 => (1 + self.be::<4>()?, 0),
            Marker::FixArray(length) => (0, length.into()),
            Marker::Array16 => (0, self.be::<2>()?),
            Marker::Array32 => (0, self.be::<4>()?),
            Marker::FixMap(pairs) => (0, 2 * u64::from(pairs)),
            Marker::Map16 => (0, 2 * self.be::<2>()?),
            Marker::Map32 => (0, 2 * self.be::<4>()?),
            Marker::Reserved => return Err(ReadError::Type),
        })
    }

    fn peek(&self) -> Option<Marker> {
        self.rest.first().map(|&byte| Marker::from_u8(byte))
    }

    #[inline]
    fn marker(&mut self) -> Result<Marker> {
        let (&byte, rest) = self.rest.split_first().ok_or(ReadError::Truncated)?;
        self.rest = rest;
        Ok(Marker::from_u8(byte))
    }

    #[inline]
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(ReadError::Truncated)?;
        self.rest = rest;
        Ok(*bytes)
    }

    /// A big-endian number of `N` bytes, at most eight.
    #[inline]
    fn be<const N: usize>(&mut self) -> Result<u64> {
        Ok(self.bytes::<N>()?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8]> {
        let length = usize::try_from(length).map_err(|_too_long| ReadError::Truncated)?;
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(ReadError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// A length that the rest of the message can hold: every value takes a byte at least.
    fn plausible(&self, length: u64) -> Result<usize> {
        usize::try_from(length).ok().filter(|&length| length <= self.rest.len()).ok_or(ReadError::Truncated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_that_the_message_cannot_hold_is_refused_before_anything_is_reserved() {
        assert_eq!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 0]).array(), Err(ReadError::Truncated));
        assert_eq!(Reader::new(&[0xdf, 0xff, 0xff, 0xff, 0xff, 0]).map(), Err(ReadError::Truncated));
        assert_eq!(Reader::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 0]).bin(), Err(ReadError::Truncated));
    }

    #[test]
    fn negative_integers_keep_their_bits_and_are_no_unsigned_ones() {
        assert_eq!(Reader::new(&[0xff]).bits(), Ok((u64::MAX, true)));
        assert_eq!(Reader::new(&[0xd1, 0xff, 0xfe]).bits(), Ok((u64::MAX - 1, true)));
        assert_eq!(Reader::new(&[0xff]).u32(), Err(ReadError::Type));
        assert_eq!(Reader::new(&[0xcf, 0xff, 0, 0, 0, 0, 0, 0, 0]).i64(), Err(ReadError::Type));
    }

    #[test]
    fn skipping_steps_over_any_depth() {
        let mut nested = vec![0x91; 100_000];
        nested.extend([0xc0, 7]);
        let mut reader = Reader::new(&nested);
        assert_eq!(reader.skip(), Ok(()));
        assert_eq!(reader.u32(), Ok(7));
    }
}
