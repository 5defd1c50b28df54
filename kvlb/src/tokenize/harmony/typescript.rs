//! Tools as Harmony shows them: JSON schemas as the types of a TypeScript namespace.
//!
//! Source: what `oss-harmony` 0.0.11 prints, which vLLM 0.32.0 renders gpt-oss chats with. Its oddities (comments
//! without indentation of their own, schemas that say nothing as `any`) are part of the prompt.

use std::collections::HashSet;
use std::fmt::Write as _;

use crate::openai::{Json, plain_float};
use crate::tokenize::miss::Miss;

/// Bytes that tools may become. Nested types are indented, so a body can ask for much more text than it has itself; no
/// model takes as much as this.
const MAX_BYTES: usize = 8 << 20;

/// How far the members of an object are moved to the right, and the alternatives of a `oneOf`.
const MEMBER: usize = 4;
const ALTERNATIVE: usize = 3;

/// The namespace of `tools`, which are functions as the engine's request model writes them.
///
/// # Errors
/// [`Miss`] where a number would be printed in another way, and beyond [`MAX_BYTES`].
pub(super) fn namespace(tools: &[Json]) -> Result<String, Miss> {
    let mut printer = Printer { out: "## functions\n\nnamespace functions {\n\n".to_owned() };
    for tool in tools {
        printer.function(tool.get("function").unwrap_or(&Json::Null))?;
    }
    printer.out.push_str("} // namespace functions");
    Ok(printer.out)
}

struct Printer {
    out: String,
}

impl Printer {
    fn function(&mut self, function: &Json) -> Result<(), Miss> {
        let text = |key: &str| function.get(key).and_then(Json::as_text).unwrap_or_default();
        for line in text("description").lines() {
            self.print(format_args!("// {line}\n"))?;
        }
        match function.get("parameters") {
            None | Some(Json::Null) => self.print(format_args!("type {} = () => any;\n\n", text("name"))),
            Some(parameters) => {
                self.print(format_args!("type {} = (_: ", text("name")))?;
                self.type_of(parameters, 0)?;
                self.print(format_args!(") => any;\n\n"))
            }
        }
    }

    fn type_of(&mut self, schema: &Json, indent: usize) -> Result<(), Miss> {
        if let Some(Json::List(alternatives)) = schema.get("oneOf") {
            return alternatives.iter().try_for_each(|schema| self.top_alternative(schema, indent));
        }
        match schema.get("type") {
            Some(Json::List(names)) => self.print(format_args!("{}", union(names).as_deref().unwrap_or("any"))),
            Some(Json::Text(name)) => self.named_type(name, schema, indent),
            _ => self.print(format_args!("any")),
        }
    }

    fn named_type(&mut self, name: &str, schema: &Json, indent: usize) -> Result<(), Miss> {
        match (name, schema.get("items")) {
            ("object", _) => self.object(schema, indent),
            ("string", _) => self.print(format_args!("{}", choices(schema).as_deref().unwrap_or("string"))),
            ("number" | "integer", _) => self.print(format_args!("number")),
            ("boolean", _) => self.print(format_args!("boolean")),
            ("array", Some(items)) => {
                self.type_of(items, indent)?;
                self.print(format_args!("[]"))
            }
            ("array", None) => self.print(format_args!("Array<any>")),
            _ => self.print(format_args!("any")),
        }
    }

    fn object(&mut self, schema: &Json, indent: usize) -> Result<(), Miss> {
        if let Some(description) = text(schema, "description") {
            self.comment(indent, description)?;
        }
        self.print(format_args!("{{\n"))?;
        if let Some(Json::Map(properties)) = schema.get("properties") {
            let required: HashSet<&str> = match schema.get("required") {
                Some(Json::List(names)) => names.iter().filter_map(Json::as_text).collect(),
                _ => HashSet::new(),
            };
            for (name, property) in properties {
                let optional = if required.contains(name.as_str()) { "" } else { "?" };
                self.property_comments(property, indent)?;
                match property.get("oneOf") {
                    Some(Json::List(alternatives)) => {
                        self.member_of_alternatives(&format!("{name}{optional}"), property, alternatives, indent)?;
                    }
                    _ => self.member(&format!("{name}{optional}"), property, indent)?,
                }
            }
        }
        self.print(format_args!("{:indent$}}}", ""))
    }

    fn property_comments(&mut self, property: &Json, indent: usize) -> Result<(), Miss> {
        if let Some(title) = text(property, "title") {
            self.comment(indent, title)?;
            self.print(format_args!("{:indent$}//\n", ""))?;
        }
        if let (None, Some(description)) = (property.get("oneOf"), text(property, "description")) {
            self.comment(indent, description)?;
        }
        if let Some(Json::List(examples)) = property.get("examples")
            && !examples.is_empty()
        {
            self.comment(indent, "Examples:")?;
            for example in examples.iter().filter_map(Json::as_text) {
                self.print(format_args!("{:indent$}// - \"{example}\"\n", ""))?;
            }
        }
        Ok(())
    }

    fn member(&mut self, name: &str, schema: &Json, indent: usize) -> Result<(), Miss> {
        self.print(format_args!("{:indent$}{name}: ", ""))?;
        self.nullable(schema, indent + MEMBER)?;
        self.print(format_args!(","))?;
        if let (None, Some(default)) = (schema.get("oneOf"), default_of(schema)?) {
            self.print(format_args!(" // {default}"))?;
        }
        self.print(format_args!("\n"))
    }

    fn member_of_alternatives(
        &mut self,
        name: &str,
        schema: &Json,
        alternatives: &[Json],
        indent: usize,
    ) -> Result<(), Miss> {
        let description = text(schema, "description");
        let of_first = alternatives.first().and_then(|first| text(first, "description"));
        let above = description.filter(|_| description != of_first);
        if let Some(description) = above {
            self.comment(indent, description)?;
        }
        if let Some(default) = default_of(schema)? {
            self.comment(indent, &default)?;
        }
        self.print(format_args!("{:indent$}{name}:\n", ""))?;
        for (place, schema) in alternatives.iter().enumerate() {
            self.print(format_args!("{:indent$} | ", ""))?;
            self.nullable(schema, indent + ALTERNATIVE)?;
            // What the property says of itself is not said again.
            let own = text(schema, "description").filter(|own| Some(*own) != description);
            let own = own.filter(|_| place > 0 || above.is_none());
            self.trailing_comment(own, default_of(schema)?)?;
            self.print(format_args!("\n"))?;
        }
        self.print(format_args!("{:indent$},\n", ""))
    }

    /// An alternative of a schema that is nothing else.
    fn top_alternative(&mut self, schema: &Json, indent: usize) -> Result<(), Miss> {
        self.print(format_args!("\n{:indent$} | ", ""))?;
        self.nullable(schema, indent + ALTERNATIVE)?;
        // Here the default is always in quotes when it is text.
        let default = schema.get("default").map(|value| {
            Ok::<_, Miss>(match (value, has_choices(schema)) {
                (Json::Text(text), false) => format!("default: \"{text}\""),
                _ => format!("default: {}", compact(value)?),
            })
        });
        self.trailing_comment(text(schema, "description"), default.transpose()?)
    }

    fn trailing_comment(&mut self, description: Option<&str>, default: Option<String>) -> Result<(), Miss> {
        match (description, default) {
            (None, None) => Ok(()),
            (Some(text), None) => self.print(format_args!(" // {text}")),
            (None, Some(default)) => self.print(format_args!(" // {default}")),
            (Some(text), Some(default)) => self.print(format_args!(" // {text} {default}")),
        }
    }

    fn nullable(&mut self, schema: &Json, indent: usize) -> Result<(), Miss> {
        let start = self.out.len();
        self.type_of(schema, indent)?;
        let nullable = schema.get("nullable") == Some(&Json::Bool(true));
        if nullable && !self.out[start..].contains("null") {
            self.print(format_args!(" | null"))?;
        }
        Ok(())
    }

    fn comment(&mut self, indent: usize, text: &str) -> Result<(), Miss> {
        self.print(format_args!("{:indent$}// {text}\n", ""))
    }

    fn print(&mut self, what: std::fmt::Arguments<'_>) -> Result<(), Miss> {
        // Writing to a string cannot fail.
        self.out.write_fmt(what).unwrap_or_default();
        if self.out.len() <= MAX_BYTES { Ok(()) } else { Err(Miss::TooLong) }
    }
}

fn text<'j>(schema: &'j Json, key: &str) -> Option<&'j str> {
    schema.get(key).and_then(Json::as_text)
}

/// Several types at once.
fn union(names: &[Json]) -> Option<String> {
    let names: Vec<&str> =
        names.iter().filter_map(Json::as_text).map(|name| if name == "integer" { "number" } else { name }).collect();
    (!names.is_empty()).then(|| names.join(" | "))
}

/// The texts that a string may be.
fn choices(schema: &Json) -> Option<String> {
    let Some(Json::List(values)) = schema.get("enum") else { return None };
    let texts: Vec<String> = values.iter().filter_map(Json::as_text).map(|text| format!("\"{text}\"")).collect();
    (!texts.is_empty()).then(|| texts.join(" | "))
}

fn has_choices(schema: &Json) -> bool {
    matches!(schema.get("enum"), Some(Json::List(values)) if !values.is_empty())
}

/// The default of a member, as its comment says it.
fn default_of(schema: &Json) -> Result<Option<String>, Miss> {
    Ok(match schema.get("default") {
        None => None,
        Some(Json::Text(text)) if has_choices(schema) => Some(format!("default: {text}")),
        Some(Json::Text(text)) => Some(format!("default: \"{text}\"")),
        Some(value) => Some(format!("default: {}", compact(value)?)),
    })
}

/// A value as JSON without spaces.
fn compact(value: &Json) -> Result<String, Miss> {
    let list = |items: Vec<String>| items.join(",");
    Ok(match value {
        Json::Null => "null".to_owned(),
        Json::Bool(flag) => flag.to_string(),
        Json::Int(int) => int.to_string(),
        Json::Float(float) => format!("{:?}", plain_float(*float).ok_or(Miss::Number)?),
        Json::Text(text) => quoted(text),
        Json::List(items) => format!("[{}]", list(items.iter().map(compact).collect::<Result<_, _>>()?)),
        Json::Map(entries) => {
            let entry = |(key, value): &(String, Json)| Ok(format!("{}:{}", quoted(key), compact(value)?));
            format!("{{{}}}", list(entries.iter().map(entry).collect::<Result<_, Miss>>()?))
        }
    })
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
