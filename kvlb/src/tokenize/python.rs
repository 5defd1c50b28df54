//! Jinja as the engine runs it: Python's own, in a sandbox, with the extras that transformers adds.
//!
//! The rule of this file: a filter, test, function or method is here only when it does what Jinja2 3.1 and Python 3 do
//! for every value it accepts. Whatever is missing or refuses its value makes the rendering fail, and the request a
//! miss; nothing renders to something else than the engine's text. Held by `tests/golden/jinja/`. The one exception known:
//! a loop over the letters of a text, which no chat template has, does not know when it is at its end (`loop.last`).

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter, filters, functions, tests};
use minijinja_contrib::pycompat;

use super::date::WallTime;
use super::value::{Style, dumps, number, repr, view};

/// The variable through which [`WallTime`] reaches `strftime_now`. No template can name it.
pub(super) const NOW: &str = " now";

/// How much work one rendering may do: about one unit per instruction and per 64 bytes written.
///
/// A chat of 32 MiB copied four times takes two million; a template that loops without end stops within a second.
pub(super) const FUEL: u64 = 4_000_000;

/// Python's `range` objects are bounded in the sandbox.
///
/// Source: Jinja2 3.1, `MAX_RANGE`.
const MAX_RANGE: i64 = 100_000;

/// What `raise_exception` raises: the template itself refuses the request, and so does the engine.
#[derive(Debug, thiserror::Error)]
#[error("the template refuses the request")]
pub(super) struct Raised;

/// `strftime_now` without a clock to ask.
#[derive(Debug, thiserror::Error)]
#[error("the template asks for the time")]
pub(super) struct NoClock;

/// An environment in which templates mean what they mean to the engine.
pub(super) fn environment(fuel: u64) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_syntax(syntax());
    environment.set_fuel(Some(fuel));
    environment.set_debug(false);
    environment.set_formatter(print);
    environment.set_unknown_method_callback(method);
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment.add_function("range", range);
    environment.add_function("dict", functions::dict);
    environment.add_function("namespace", functions::namespace);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Jinja's syntax with `trim_blocks` and `lstrip_blocks`.
pub(super) fn syntax() -> SyntaxConfig {
    // Only delimiters can be refused, and these are the default ones.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

fn add_filters(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("string", string);
    environment.add_filter("list", list);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("items", items);
    environment.add_filter("join", join);
    environment.add_filter("lower", |value: &Value| string(value).map(|text| text.to_lowercase()));
    environment.add_filter("upper", |value: &Value| string(value).map(|text| text.to_uppercase()));
    environment.add_filter("replace", replace);
    environment.add_filter("capitalize", |value: &Value| capitalize(&string(value)?));
    environment.add_filter("reverse", filters::reverse);
    environment.add_filter("map", filters::map);
    environment.add_filter("select", filters::select);
    environment.add_filter("reject", filters::reject);
    environment.add_filter("selectattr", filters::selectattr);
    environment.add_filter("rejectattr", filters::rejectattr);
}

fn add_tests(environment: &mut Environment<'_>) {
    environment.add_test("defined", tests::is_defined);
    environment.add_test("undefined", tests::is_undefined);
    environment.add_test("none", tests::is_none);
    environment.add_test("boolean", tests::is_boolean);
    environment.add_test("true", |value: &Value| value.kind() == ValueKind::Bool && value.is_true());
    environment.add_test("false", |value: &Value| value.kind() == ValueKind::Bool && !value.is_true());
    environment.add_test("number", tests::is_number);
    environment.add_test("integer", tests::is_integer);
    environment.add_test("float", tests::is_float);
    environment.add_test("string", tests::is_string);
    environment.add_test("mapping", tests::is_mapping);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    for equal in ["eq", "equalto", "=="] {
        environment.add_test(equal, tests::is_eq);
    }
    for unequal in ["ne", "!="] {
        environment.add_test(unequal, tests::is_ne);
    }
    environment.add_test("in", tests::is_in);
    environment.add_test("odd", tests::is_odd);
    environment.add_test("even", tests::is_even);
}

/// Prints a value as Python's `str` does, where it is known.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => escape_formatter(out, state, value),
        _ => out.write_str(&string(value)?).map_err(Error::from),
    }
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is not known to be what Python does"))
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()).with_source(Raised))
}

fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let no_clock = || Error::new(ErrorKind::InvalidOperation, "no clock").with_source(NoClock);
    let now = state.lookup(NOW).and_then(|now| i64::try_from(now).ok()).map(WallTime::from_seconds);
    now.ok_or_else(no_clock)?.format(format).ok_or_else(|| refused("this date format"))
}

fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (from, to) = second.map_or((0, first), |second| (first, second));
    let step = step.unwrap_or(1);
    let length = match step {
        0 => return Err(refused("a range with step 0")),
        1.. => (i128::from(to) - i128::from(from) + i128::from(step) - 1) / i128::from(step),
        _ => (i128::from(to) - i128::from(from) + i128::from(step) + 1) / i128::from(step),
    };
    if length > i128::from(MAX_RANGE) {
        return Err(refused("a range this long"));
    }
    let items = std::iter::successors(Some(from), |item| item.checked_add(step));
    Ok(view(items.take(usize::try_from(length).unwrap_or(0)).map(Value::from).collect()))
}

#[expect(clippy::needless_pass_by_value, reason = "filters get their named arguments by value")]
fn tojson(value: &Value, indent: Option<&Value>, kwargs: Kwargs) -> Result<Value, Error> {
    if indent.is_some() {
        // Its second place is `ensure_ascii`, its name `indent`: nobody writes the former by place.
        return Err(refused("tojson with arguments by place"));
    }
    let separators = match kwargs.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => Some(separators(&pair)?),
        _ => None,
    };
    let style = Style {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: kwargs.get::<Option<usize>>("indent")?,
        separators,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    dumps(value, &style).map(Value::from)
}

fn separators(pair: &Value) -> Result<(String, String), Error> {
    let texts: Vec<Value> = pair.try_iter()?.collect();
    match texts.as_slice() {
        [comma, colon] => match (comma.as_str(), colon.as_str()) {
            (Some(comma), Some(colon)) => Ok((comma.to_owned(), colon.to_owned())),
            _ => Err(refused("separators that are not text")),
        },
        _ => Err(refused("separators that are not two")),
    }
}

fn trim(value: &Value, chars: Option<&Value>) -> Result<Value, Error> {
    Ok(strip(&string(value)?, chars, true, true)?.into())
}

/// `str.strip` and its one-sided kin.
fn strip<'t>(text: &'t str, chars: Option<&Value>, left: bool, right: bool) -> Result<&'t str, Error> {
    let set: Option<Vec<char>> = match chars {
        None => None,
        Some(chars) if chars.is_none() => None,
        Some(chars) => Some(chars.as_str().ok_or_else(|| refused("stripping what is not text"))?.chars().collect()),
    };
    let goes = |char: char| set.as_ref().map_or_else(|| is_space(char), |set| set.contains(&char));
    let text = if left { text.trim_start_matches(goes) } else { text };
    Ok(if right { text.trim_end_matches(goes) } else { text })
}

/// What Python's `str.isspace` holds for white space: Unicode's, and four control characters besides.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        // Python's lazy sequences have no length, but what is lazy here may be a list there. Either way the request
        // is refused by the engine or the number is right.
        _ => value.len().ok_or_else(|| refused("the length of this")),
    }
}

/// A value as Python's `str` gives it, where it is known.
fn string(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Number => number(value),
        ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::String => Ok(value.to_string()),
        kind => repr(value).ok_or_else(|| refused(&format!("a {kind} as text"))),
    }
}

/// The value, or another one where it is undefined; with `boolean` also where it is empty or false.
#[expect(clippy::needless_pass_by_value, reason = "filters get their named arguments by value")]
fn default(value: &Value, other: Option<Value>, boolean: Option<bool>, kwargs: Kwargs) -> Result<Value, Error> {
    let boolean = boolean.or(kwargs.get("boolean")?).unwrap_or(false);
    let other = other.or(kwargs.get("default_value")?);
    kwargs.assert_all_used()?;
    let missing = value.is_undefined() || (boolean && !value.is_true());
    Ok(if missing { other.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

/// `str.capitalize` of ASCII text.
fn capitalize(text: &str) -> Result<String, Error> {
    if !text.is_ascii() {
        return Err(refused("capitalising this"));
    }
    let mut text = text.to_ascii_lowercase();
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    Ok(text)
}

/// `str.title` of ASCII text: a letter behind another one is small, any other is a capital.
fn title(text: &str) -> Result<String, Error> {
    if !text.is_ascii() {
        return Err(refused("a title of this"));
    }
    let mut inside = false;
    let letter = |char: char| {
        let written = if inside { char.to_ascii_lowercase() } else { char.to_ascii_uppercase() };
        inside = char.is_ascii_alphabetic();
        written
    };
    Ok(text.chars().map(letter).collect())
}

/// `str.splitlines` of text whose lines end as Python and everybody else agree.
fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let () = from_args(args)?;
    let other_end =
        |char: char| matches!(char, '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let bare_return = || text.replace("\r\n", "").contains('\r');
    if text.contains(other_end) || bare_return() {
        return Err(refused("splitting these lines"));
    }
    Ok(text.lines().map(Value::from).collect::<Vec<_>>().into())
}

fn replace(value: &Value, old: &str, new: &str) -> Result<String, Error> {
    string(value).map(|text| text.replace(old, new))
}

fn list(value: &Value) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => Ok(text.chars().map(|char| Value::from(char.to_string())).collect::<Vec<_>>().into()),
        (ValueKind::None, _) => Err(refused("a list of none")),
        _ => Ok(value.try_iter()?.collect::<Vec<_>>().into()),
    }
}

fn first(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => Ok(text.chars().next().map_or(Value::UNDEFINED, |char| char.to_string().into())),
        None => Ok(value.try_iter()?.next().unwrap_or(Value::UNDEFINED)),
    }
}

fn last(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => Ok(text.chars().next_back().map_or(Value::UNDEFINED, |char| char.to_string().into())),
        None => Ok(value.try_iter()?.last().unwrap_or(Value::UNDEFINED)),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(view(Vec::new())),
        ValueKind::Map => pairs(value).map(view),
        _ => Err(refused("the items of what is not a mapping")),
    }
}

fn pairs(value: &Value) -> Result<Vec<Value>, Error> {
    let pair = |key: Value| {
        let item = value.get_item(&key)?;
        Ok(Value::from(Tuple::from([key, item])))
    };
    value.try_iter()?.map(pair).collect()
}

/// `dictsort` without arguments: by key, upper and lower case alike. Only ASCII keys are compared as Python does.
fn dictsort(value: &Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map {
        return Err(refused("sorting what is not a mapping"));
    }
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if !keys.iter().all(|key| key.as_str().is_some_and(str::is_ascii)) {
        return Err(refused("sorting these keys"));
    }
    keys.sort_by_cached_key(|key| key.as_str().map(str::to_ascii_lowercase));
    let sorted: Result<Vec<_>, Error> = keys
        .into_iter()
        .map(|key| {
            let item = value.get_item(&key)?;
            Ok(Value::from(Tuple::from([key, item])))
        })
        .collect();
    sorted.map(Value::from)
}

fn join(value: &Value, separator: Option<&str>) -> Result<Value, Error> {
    let separator = separator.unwrap_or_default();
    let mut joined = String::new();
    let texts = list(value)?;
    for (place, item) in texts.try_iter()?.enumerate() {
        if place > 0 {
            joined.push_str(separator);
        }
        joined.push_str(&string(&item)?);
    }
    Ok(joined.into())
}

/// What has a length and items: text and mappings too, in Python.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
    )
}

fn is_iterable(value: &Value) -> bool {
    is_sequence(value)
}

/// The methods of Python's text, mappings and lists.
fn method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => text_method(state, value, method, args),
        ValueKind::Map => match method {
            "items" => {
                let () = from_args(args)?;
                pairs(value).map(view)
            }
            "keys" | "values" | "get" => pycompat::unknown_method_callback(state, value, method, args),
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        },
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn text_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let text = value.as_str().unwrap_or_default();
    let sides = |left, right| {
        let (chars,): (Option<Value>,) = from_args(args)?;
        strip(text, chars.as_ref(), left, right).map(Value::from)
    };
    match method {
        "strip" => sides(true, true),
        "lstrip" => sides(true, false),
        "rstrip" => sides(false, true),
        "split" => split(text, args),
        "rsplit" => rsplit(text, args),
        "splitlines" => splitlines(text, args),
        "title" | "capitalize" => {
            let () = from_args(args)?;
            if method == "title" { title(text) } else { capitalize(text) }.map(Value::from)
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "startswith" | "endswith" | "replace" | "upper" | "lower" | "find" | "rfind" | "count" => {
            one_way_only(method, args)?;
            pycompat::unknown_method_callback(state, value, method, args)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            join_texts(text, items)
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Refuses arguments that mean more to Python than to the method called here.
fn one_way_only(method: &str, args: &[Value]) -> Result<(), Error> {
    let most = match method {
        "upper" | "lower" => 0,
        "replace" => 2,
        _ => 1,
    };
    // `"".count("")` and its like count places between characters.
    let empty = args.first().is_some_and(|arg| arg.as_str() == Some(""));
    if args.len() > most || (empty && matches!(method, "count" | "replace" | "find" | "rfind")) {
        return Err(refused(method));
    }
    Ok(())
}

fn join_texts(separator: &str, items: &Value) -> Result<Value, Error> {
    let items: Vec<Value> = list(items)?.try_iter()?.collect();
    let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    Ok(texts.ok_or_else(|| refused("joining what is not text"))?.join(separator).into())
}

/// `str.split`, at white space where no separator is given.
fn split(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most) = split_arguments(args)?;
    let parts: Vec<&str> = match (&separator, most) {
        (None, None) => text.split(is_space).filter(|part| !part.is_empty()).collect(),
        (None, Some(_)) => return Err(refused("splitting some of the white space")),
        (Some(separator), None) => text.split(separator.as_str()).collect(),
        (Some(separator), Some(most)) => text.splitn(most + 1, separator.as_str()).collect(),
    };
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// `str.rsplit` at a separator.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most) = split_arguments(args)?;
    let Some(separator) = separator else { return Err(refused("splitting white space from the right")) };
    let mut parts: Vec<&str> = match most {
        None => text.rsplit(separator.as_str()).collect(),
        Some(most) => text.rsplitn(most + 1, separator.as_str()).collect(),
    };
    parts.reverse();
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

fn split_arguments(args: &[Value]) -> Result<(Option<String>, Option<usize>), Error> {
    let (separator, most): (Option<Value>, Rest<Value>) = from_args(args)?;
    let separator = match separator {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => {
            Some(value.as_str().filter(|text| !text.is_empty()).ok_or_else(|| refused("this separator"))?.to_owned())
        }
    };
    let most = match most.first() {
        None => None,
        Some(most) => {
            let most = i64::try_from(most.clone())?;
            usize::try_from(most).ok()
        }
    };
    Ok((separator, most))
}
