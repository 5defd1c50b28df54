//! A chat's prompt without what is said: what stands around the texts of its messages.
//!
//! Most of a chat template's work is the same for all chats of one shape: as many messages of the same roles, the same tools
//! and options, in all of which nothing differs but texts that the template [cannot tell from one another](Opaque). For these
//! the template runs once with marks in the place of the texts, which gives the outline; then only the texts have to be put
//! in. What the template makes of the first chat itself has to be the same, else there is no outline for its shape.

mod opaque;

use std::borrow::Cow;
use std::ops::Range;

use minijinja::machinery::ast::Stmt;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::conversation::Turn;
use super::date::WallTime;
use super::syntax::ContentFormat;
use super::value::{self, Dict};
use opaque::Opaque;

/// What every mark begins with. No text with this character is hidden.
pub(super) const MARK: char = '\u{f0000}';

/// The most texts that are hidden in one chat: as many as there are second characters.
const MARKS: u32 = 1 << 12;

/// The second character of the first mark.
const FIRST: u32 = 0xf_1000;

/// Whether `char` is one of those that marks are made of. They are private ones.
const fn is_of_marks(char: char) -> bool {
    char as u32 >= 0xf_0000
}

/// What a text is hidden behind.
fn mark(number: usize) -> Option<String> {
    let number = u32::try_from(number).ok().filter(|number| *number < MARKS)?;
    Some(String::from_iter([MARK, char::from_u32(FIRST + number)?]))
}

/// How the chats of one template become outlines.
#[derive(Debug)]
pub(super) struct Outlines {
    opaque: Opaque,
    format: ContentFormat,
    /// Tells the template from others.
    source: u128,
}

impl Outlines {
    /// Those of the template `source`, whose syntax tree is `root`; `None` where it may do anything with texts.
    pub(super) fn of(source: &str, root: &Stmt<'_>, format: ContentFormat) -> Option<Self> {
        let opaque = Opaque::read(root, format)?;
        Some(Self { opaque, format, source: xxh3_128_with_seed(source.as_bytes(), 0) })
    }

    /// Puts a mark in the place of each text that the template cannot tell from others, and gives these texts.
    pub(super) fn hide<'m>(&self, turns: &mut [Turn<'m>]) -> Vec<Hidden<'m>> {
        let mut hidden = Vec::new();
        for (place, text) in turns.iter_mut().flat_map(|turn| turn.texts(self.format)).enumerate() {
            if let Some(part) = self.opaque.part(text)
                && let Some(mark) = mark(hidden.len())
            {
                let left = [&text[..part.start], &mark, &text[part.end..]].concat();
                hidden.push(Hidden { place, text: std::mem::replace(text, left.into()), part });
            }
        }
        hidden
    }

    /// Puts `hidden` texts back into their places.
    pub(super) fn show<'m>(&self, turns: &mut [Turn<'m>], hidden: &[Hidden<'m>]) {
        let mut hidden = hidden.iter().peekable();
        for (place, text) in turns.iter_mut().flat_map(|turn| turn.texts(self.format)).enumerate() {
            if let Some(hidden) = hidden.next_if(|hidden| hidden.place == place) {
                text.clone_from(&hidden.text);
            }
        }
    }

    /// The key of all chats that a template sees as `variables` on the same day, given a secret seed.
    pub(super) fn key(&self, variables: &Dict, now: Option<WallTime>, seed: u64) -> Option<u128> {
        let mut shape = Vec::with_capacity(1 << 10);
        shape.extend(self.source.to_le_bytes());
        shape.extend(now.map_or(i64::MIN, WallTime::day).to_le_bytes());
        value::write_exactly(variables, &mut shape).then(|| xxh3_128_with_seed(&shape, seed))
    }
}

/// A text of which a part is hidden.
#[derive(Debug)]
pub(super) struct Hidden<'m> {
    /// Which of the chat's texts it is.
    place: usize,
    text: Cow<'m, str>,
    part: Range<usize>,
}

impl Hidden<'_> {
    fn part(&self) -> &str {
        &self.text[self.part.clone()]
    }
}

/// The number that a mark's second character stands for.
fn number(char: char) -> Option<usize> {
    u32::from(char).checked_sub(FIRST).filter(|number| *number < MARKS).and_then(|number| usize::try_from(number).ok())
}

/// What is known of the chats of one shape.
#[derive(Debug)]
pub struct Shape(Known);

#[derive(Debug)]
enum Known {
    /// One was met. An outline costs as much as the chat itself, which is too much for what never comes again.
    Met,
    /// There is no outline.
    Nothing,
    Outline(Outline),
}

impl Shape {
    /// A chat of a shape that was not known.
    pub(super) const fn met() -> Self {
        Self(Known::Met)
    }

    /// Whether an outline is still to be made.
    pub(super) const fn is_to_be_outlined(&self) -> bool {
        matches!(self.0, Known::Met)
    }

    /// The shape of a chat that becomes `text`, and `marked` when `hidden` texts are hidden.
    pub(super) fn outlined(marked: Option<&str>, hidden: &[Hidden<'_>], text: &str) -> Self {
        let outline = marked.and_then(Outline::of).filter(|outline| outline.filled(hidden).as_deref() == Some(text));
        Self(outline.map_or(Known::Nothing, Known::Outline))
    }

    /// The text of a chat of this shape in which `hidden` texts are hidden, where there is an outline.
    pub(super) fn filled(&self, hidden: &[Hidden<'_>]) -> Option<String> {
        match &self.0 {
            Known::Outline(outline) => outline.filled(hidden),
            Known::Met | Known::Nothing => None,
        }
    }

    /// Bytes of memory that it takes.
    pub fn bytes(&self) -> usize {
        let inside = match &self.0 {
            Known::Outline(outline) => outline.fixed.len() + size_of_val(&*outline.places),
            Known::Met | Known::Nothing => 0,
        };
        size_of::<Self>() + inside
    }
}

/// A text with places for others.
#[derive(Debug)]
struct Outline {
    fixed: Box<str>,
    /// Where in `fixed` a hidden text stands, and which one.
    places: Box<[(usize, usize)]>,
}

impl Outline {
    /// Reads a text with marks.
    fn of(marked: &str) -> Option<Self> {
        let mut pieces = marked.split(MARK);
        let mut fixed = pieces.next()?.to_owned();
        let mut places = Vec::new();
        for piece in pieces {
            let mut rest = piece.chars();
            places.push((fixed.len(), rest.next().and_then(number)?));
            fixed.push_str(rest.as_str());
        }
        Some(Self { fixed: fixed.into(), places: places.into() })
    }

    /// The text with `hidden` ones in their places.
    fn filled(&self, hidden: &[Hidden<'_>]) -> Option<String> {
        let mut length = self.fixed.len();
        for (_, number) in &self.places {
            length += hidden.get(*number)?.part.len();
        }
        if length > FILLED_MAX {
            return None;
        }
        let (mut text, mut done) = (String::with_capacity(length), 0);
        for (place, number) in &self.places {
            text.push_str(&self.fixed[done..*place]);
            text.push_str(hidden.get(*number)?.part());
            done = *place;
        }
        text.push_str(&self.fixed[done..]);
        Some(text)
    }
}

/// Longer texts are left to the template, whose work is bounded.
const FILLED_MAX: usize = 256 << 20;

#[cfg(test)]
mod tests;
