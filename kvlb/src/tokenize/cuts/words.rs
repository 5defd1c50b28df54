//! Which neighbours a regular expression that cuts text into words always cuts apart.
//!
//! The expressions of tokenizers are alternatives without context: `A|B|…`, tried in order at each place. Let text have
//! `a` before a place and `b` after it. Where no alternative can have `b` right after `a`, no word spans the place, and
//! which words lie before it cannot depend on what comes after: all paths that stay before it are the same, and there
//! are no others. The words after it begin there and look at nothing before. The one exception is `\s+(?!\S)`, which
//! looks ahead: it decides differently before white space and at the end of a text. It never gets its turn at white
//! space that ends with a line break where `\s*[\r\n]+` comes before it, and it never stands after anything else than
//! white space.
//!
//! What may follow what is read off the expression as Glushkov does: each character class is a position, and positions
//! have followers.

use regex_syntax::hir::{Class, Hir, HirKind};

use super::sign::{Pairs, Sign, Signs};

/// What an expression does with neighbours.
#[derive(Debug)]
pub(super) struct Words {
    /// Pairs that no word spans, and whose being together or apart changes no word.
    pub(super) apart: Pairs,
    /// Signs that always are in a word.
    pub(super) matched: Signs,
}

/// What looks around, or means something else to Oniguruma, with which the words are cut, than to `regex-syntax`.
const UNKNOWN: [&str; 12] = ["(?!", "(?=", "(?<", "(?>", r"\b", r"\B", r"\G", r"\K", r"\A", r"\z", r"\Z", "[:"];

/// What `pattern` does, or `None` where that is not known.
pub(super) fn analyse(pattern: &str) -> Option<Words> {
    let (mut together, mut matched) = (Pairs::none(), Signs::default());
    let (mut line_break_taken, mut looks_at) = (false, Signs::default());
    for alternative in alternatives(pattern)? {
        let (body, looks_ahead) = match alternative.text.strip_suffix(r"(?!\S)") {
            // Another expression before the look-ahead may end with anything.
            Some(body) if body == r"\s+" => (body, true),
            Some(_) => return None,
            None => (alternative.text.as_str(), false),
        };
        if UNKNOWN.iter().any(|unknown| body.contains(unknown)) {
            return None;
        }
        let mut positions = Positions::default();
        let whole = positions.read(&regex_syntax::parse(body).ok()?)?;
        if whole.nullable {
            return None;
        }
        positions.followers.iter().for_each(|(before, after)| {
            together.insert_all(&positions.touching[*before], &positions.touching[*after]);
        });
        if looks_ahead {
            looks_at.unite(&Signs::which(|sign| sign.is_space() && !(line_break_taken && sign.is_newline())));
        } else if !alternative.possessive {
            whole.single.iter().for_each(|position| matched.unite(&positions.covered[*position]));
        }
        line_break_taken |= matches!(body, r"\s*[\r\n]+" | r"\s*[\r\n]");
    }
    let apart = Pairs::which(|a, b| !together.contains(a, b) && !looks_at.contains(a));
    Some(Words { apart, matched })
}

/// One alternative of an expression.
struct Alternative {
    /// Without marks of possessive repetition, which only ever make it match less.
    text: String,
    possessive: bool,
}

/// The alternatives of `pattern`. `None` where its parentheses or brackets are not in order.
fn alternatives(pattern: &str) -> Option<Vec<Alternative>> {
    let new = || Alternative { text: String::new(), possessive: false };
    let mut all = vec![new()];
    let (mut depth, mut class, mut counted, mut repeated) = (0_u32, 0_u32, false, false);
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        let here = all.last_mut()?;
        let (was_repeated, in_class) = (repeated, class > 0);
        repeated = false;
        match char {
            '\n' => here.text.push_str(r"\n"),
            '\r' => here.text.push_str(r"\r"),
            '\\' => {
                let escaped = chars.next()?;
                here.text.extend(['\\', escaped]);
                // The braces of a class's name count nothing.
                if matches!(escaped, 'p' | 'P' | 'x' | 'u') && chars.as_str().starts_with('{') {
                    here.text.extend(chars.by_ref().take_while(|char| *char != '}'));
                    here.text.push('}');
                }
            }
            '+' if was_repeated => here.possessive = true,
            '|' if depth == 0 && !in_class => all.push(new()),
            _ => {
                match char {
                    '[' => class += 1,
                    ']' => class = class.checked_sub(1)?,
                    '(' if !in_class => depth += 1,
                    ')' if !in_class => depth = depth.checked_sub(1)?,
                    '{' if !in_class => counted = true,
                    '}' if !in_class => repeated = std::mem::take(&mut counted),
                    '+' | '*' | '?' if !in_class => repeated = !was_repeated,
                    // Anchors look around.
                    '^' | '$' if !in_class => return None,
                    _ => {}
                }
                here.text.push(char);
            }
        }
    }
    (depth == 0 && class == 0).then_some(all)
}

/// The positions of an expression.
#[derive(Default)]
struct Positions {
    /// Signs that some character of the position's class belongs to.
    touching: Vec<Signs>,
    /// Signs all of whose characters the position takes.
    covered: Vec<Signs>,
    /// Positions right after one another.
    followers: Vec<(usize, usize)>,
}

/// How a part of an expression begins and ends.
#[derive(Default)]
struct Part {
    nullable: bool,
    first: Vec<usize>,
    last: Vec<usize>,
    /// Positions that are all of the part by themselves.
    single: Vec<usize>,
}

impl Positions {
    /// Reads an expression; `None` where it has something that looks around.
    fn read(&mut self, hir: &Hir) -> Option<Part> {
        match hir.kind() {
            HirKind::Empty => Some(Part { nullable: true, ..Part::default() }),
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0).ok()?;
                let parts = text.chars().map(|char| self.add(&[(char, char)])).collect();
                Some(self.in_turn(parts))
            }
            HirKind::Class(Class::Unicode(class)) => {
                let ranges: Vec<_> = class.iter().map(|range| (range.start(), range.end())).collect();
                Some(self.add(&ranges))
            }
            HirKind::Class(Class::Bytes(_)) | HirKind::Look(_) => None,
            HirKind::Repetition(repetition) => {
                let mut part = self.read(&repetition.sub)?;
                if repetition.max != Some(1) {
                    self.link(&part.last, &part.first);
                }
                if repetition.min > 1 && !part.nullable {
                    part.single.clear();
                }
                part.nullable |= repetition.min == 0;
                Some(part)
            }
            HirKind::Capture(capture) => self.read(&capture.sub),
            HirKind::Concat(parts) => {
                let parts = parts.iter().map(|part| self.read(part)).collect::<Option<_>>()?;
                Some(self.in_turn(parts))
            }
            HirKind::Alternation(parts) => parts.iter().try_fold(Part::default(), |mut all, part| {
                let part = self.read(part)?;
                all.nullable |= part.nullable;
                all.first.extend(part.first);
                all.last.extend(part.last);
                all.single.extend(part.single);
                Some(all)
            }),
        }
    }

    /// Adds a position that takes one character of `ranges`.
    fn add(&mut self, ranges: &[(char, char)]) -> Part {
        let position = self.touching.len();
        let touches = |sign: Sign| {
            let (first, last) = sign.bounds();
            ranges.iter().any(|(start, end)| *start <= last && first <= *end)
        };
        let covers = |sign: Sign| {
            let (first, last) = sign.bounds();
            ranges.iter().any(|(start, end)| *start <= first && last <= *end)
        };
        self.touching.push(Signs::which(touches));
        self.covered.push(Signs::which(covers));
        Part { nullable: false, first: vec![position], last: vec![position], single: vec![position] }
    }

    fn in_turn(&mut self, parts: Vec<Part>) -> Part {
        let mut whole = Part { nullable: true, ..Part::default() };
        for part in parts {
            self.link(&whole.last, &part.first);
            if !part.nullable {
                whole.last.clear();
                whole.single.clear();
            }
            if whole.nullable {
                whole.first.extend(&part.first);
                whole.single.extend(&part.single);
            }
            whole.last.extend(&part.last);
            whole.nullable &= part.nullable;
        }
        whole
    }

    fn link(&mut self, before: &[usize], after: &[usize]) {
        self.followers.extend(before.iter().flat_map(|before| after.iter().map(|after| (*before, *after))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const GPT4: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

    fn apart(pattern: &str, pair: &str) -> bool {
        let signs: Vec<_> = pair.chars().map(|char| Sign::of(char).unwrap()).collect();
        analyse(pattern).unwrap().apart.contains(signs[0], signs[1])
    }

    #[test]
    fn a_line_break_before_a_word_is_a_cut_where_line_breaks_are_taken_first() {
        for pattern in [QWEN2, O200K, GPT4] {
            assert!(apart(pattern, "\nx") && apart(pattern, "\n<") && apart(pattern, "\n7"), "{pattern}");
            assert!(!apart(pattern, " x") && !apart(pattern, "\t7") && !apart(pattern, "\n\n"), "{pattern}");
        }
        assert!(!apart(GPT2, "\nx"), "the last of several spaces goes its own way before a word");
    }

    #[test]
    fn a_word_before_a_space_is_a_cut_everywhere() {
        for pattern in [GPT2, QWEN2, O200K, GPT4] {
            assert!(apart(pattern, "x ") && apart(pattern, "7 ") && apart(pattern, ", "), "{pattern}");
            assert!(apart(pattern, "中\u{3002}"), "{pattern}");
            assert!(!apart(pattern, "xy") && !apart(pattern, "中文") && !apart(pattern, "'s"), "{pattern}");
        }
    }

    #[test]
    fn what_only_some_expressions_join_is_seen() {
        assert!(
            apart(QWEN2, "\n/") && !apart(O200K, "\n/"),
            "o200k lets slashes follow a line break after punctuation"
        );
        assert!(apart(QWEN2, "x'") && !apart(O200K, "x'"), "o200k takes 's with its word");
        assert!(apart(QWEN2, "77") && !apart(GPT4, "77"));
    }

    #[test]
    fn what_looks_around_otherwise_is_not_known() {
        for pattern in
            [r"^a|\s", r"a$", r"\ba", r"(?<=a)b", r"a(?!b)", r"a(?=b)", "(a", "a*", r"a|\s*", "[", "[[:alpha:]]"]
        {
            assert!(analyse(pattern).is_none(), "{pattern}");
        }
    }

    #[test]
    fn a_character_that_no_alternative_takes_is_in_no_word() {
        let matched = |pattern, char| analyse(pattern).unwrap().matched.contains(Sign::of(char).unwrap());
        assert!(matched(r"\p{N}{1,3}", '7') && !matched(r"\p{N}{1,3}", 'x'));
        assert!(!matched("'s", 's') && !matched("'s", '\''));
        assert!(!matched("x{2,3}", 'x') && matched("y?x{1,3}", 'x') && !matched("y?x{1,3}", 'y'));
        assert!(matched(QWEN2, '\n') && matched(QWEN2, 'x') && matched(QWEN2, '中') && matched(QWEN2, '!'));
        assert!(!matched(GPT4, 'x'), "a possessive repetition may take a character away");
    }
}
