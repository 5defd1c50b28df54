//! Which texts a template cannot tell from one another, read off its syntax tree.
//!
//! Every value that may have the text of a message in it is followed through the template: assignments, loops, macros and
//! attributes of namespaces, without regard to their order. Such a text may be printed, and joined with others to be printed.
//! It may be asked whether it has a constant in it, at its start or its end, and have characters stripped, a constant
//! replaced, or itself split at one: all of that does the same to any two texts that have none of these constants in them and
//! the same of these characters at their ends. Anything else that is done to one, or with a list or object that has one, and
//! nothing is known of the template.

use std::collections::HashMap;
use std::ops::Range;

use aho_corasick::AhoCorasick;
use minijinja::machinery::ast::{
    BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, ForLoop, Macro, Stmt, UnaryOpKind,
};

use super::super::python;
use super::super::syntax::ContentFormat;
use super::{MARK, is_of_marks};

/// What makes a text one of those that a template cannot tell from one another.
#[derive(Debug)]
pub(super) struct Opaque {
    /// Texts that none of them has in it.
    inside: AhoCorasick,
    /// Characters that may be stripped from their ends.
    ends: Vec<char>,
    /// Whether white space is among these.
    spaces: bool,
}

impl Opaque {
    /// Those of the template whose syntax tree is `root`, or `None` where that is not known.
    pub(super) fn read(root: &Stmt<'_>, format: ContentFormat) -> Option<Self> {
        let mut reader = Reader::new(format);
        // What is known of a name only ever grows, by at most two steps.
        loop {
            reader.statement(root)?;
            if !std::mem::take(&mut reader.changed) {
                break;
            }
        }
        let constants = reader.inside.iter().flat_map(|text| text.chars()).chain(reader.ends.iter().copied());
        if constants.into_iter().any(is_of_marks) {
            return None;
        }
        reader.inside.push(MARK.to_string());
        let inside = AhoCorasick::new(&reader.inside).ok()?;
        Some(Self { inside, ends: reader.ends, spaces: reader.spaces })
    }

    /// The part of `text` in the place of which any other might stand; `None` where there is no such part.
    pub(super) fn part(&self, text: &str) -> Option<Range<usize>> {
        let stripped = |char: char| self.ends.contains(&char) || self.spaces && python::is_space(char);
        let start = text.len() - text.trim_start_matches(stripped).len();
        let part = start..start + text[start..].trim_end_matches(stripped).len();
        (!part.is_empty() && !self.inside.is_match(text)).then_some(part)
    }
}

/// What a value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Nothing that has a message's text in it.
    Plain,
    /// A text of a message.
    Text,
    /// Such texts and others, joined: only to be printed.
    Printed,
    /// What a text becomes when it is split: itself alone.
    Pieces,
    /// What a message says, where the template takes parts: a list of them, or a text that is not one of ours.
    Body,
    Part,
    Message,
    Messages,
    /// A namespace, whose attributes are followed by their names.
    Namespace,
}

impl Kind {
    /// A value that may be either; `None` where nothing is known of such a value.
    fn or(self, other: Self) -> Option<Self> {
        match (self, other) {
            _ if self == other => Some(self),
            (Self::Plain, some) | (some, Self::Plain) => Some(some),
            (Self::Text, Self::Printed) | (Self::Printed, Self::Text) => Some(Self::Printed),
            _ => None,
        }
    }

    /// Two values joined to one text.
    fn joined(self, other: Self) -> Option<Self> {
        let printable = |kind| matches!(kind, Self::Plain | Self::Text | Self::Printed | Self::Body);
        match (self, other) {
            (Self::Plain, Self::Plain) => Some(Self::Plain),
            _ => (printable(self) && printable(other)).then_some(Self::Printed),
        }
    }

    fn only_plain(self) -> Option<Self> {
        (self == Self::Plain).then_some(self)
    }

    /// Whether it is a text, or something that behaves the same whichever texts are in it when it is asked for one.
    const fn asks_like_text(self) -> bool {
        matches!(self, Self::Text | Self::Body)
    }
}

/// Tests that look at nothing but a value's type.
const TYPE_TESTS: [&str; 13] = [
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "number",
    "integer",
    "float",
    "string",
    "mapping",
    "sequence",
    "iterable",
];

struct Reader<'t, 's> {
    format: ContentFormat,
    names: HashMap<&'s str, Kind>,
    attributes: HashMap<&'s str, Kind>,
    macros: HashMap<&'s str, &'t Macro<'s>>,
    /// Macros around the place being read.
    depth: usize,
    /// Whether some macro prints a text.
    macro_prints: bool,
    /// Whether more is known since the tree was last begun.
    changed: bool,
    inside: Vec<String>,
    ends: Vec<char>,
    spaces: bool,
}

impl<'t, 's> Reader<'t, 's> {
    fn new(format: ContentFormat) -> Self {
        Self {
            format,
            names: HashMap::from([("messages", Kind::Messages)]),
            attributes: HashMap::new(),
            macros: HashMap::new(),
            depth: 0,
            macro_prints: false,
            changed: false,
            inside: Vec::new(),
            ends: Vec::new(),
            spaces: false,
        }
    }

    fn statements(&mut self, list: &'t [Stmt<'s>]) -> Option<()> {
        list.iter().try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &'t Stmt<'s>) -> Option<()> {
        match statement {
            Stmt::Template(node) => self.statements(&node.children),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Some(()),
            Stmt::EmitExpr(node) => {
                let kind = self.expression(&node.expr)?.joined(Kind::Plain)?;
                self.changed |= self.depth > 0 && kind != Kind::Plain && !self.macro_prints;
                self.macro_prints |= self.depth > 0 && kind != Kind::Plain;
                Some(())
            }
            Stmt::ForLoop(node) => self.for_loop(node),
            Stmt::IfCond(node) => {
                self.expression(&node.expr)?;
                self.statements(&node.true_body)?;
                self.statements(&node.false_body)
            }
            Stmt::WithBlock(node) => {
                for (target, value) in &node.assignments {
                    let kind = self.expression(value)?;
                    self.assign(target, kind)?;
                }
                self.statements(&node.body)
            }
            Stmt::Set(node) => {
                let kind = self.expression(&node.expr)?;
                self.assign(&node.target, kind)
            }
            Stmt::SetBlock(node) if node.filter.is_none() => {
                self.statements(&node.body)?;
                self.assign(&node.target, Kind::Printed)
            }
            Stmt::Macro(node) => self.macro_body(node),
            _ => None,
        }
    }

    fn for_loop(&mut self, node: &'t ForLoop<'s>) -> Option<()> {
        if node.recursive {
            return None;
        }
        let each = match self.expression(&node.iter)? {
            Kind::Plain => Kind::Plain,
            Kind::Messages => Kind::Message,
            Kind::Body => Kind::Part,
            _ => return None,
        };
        self.assign(&node.target, each)?;
        node.filter_expr.iter().try_for_each(|filter| self.expression(filter).map(|_kind| ()))?;
        self.statements(&node.body)?;
        self.statements(&node.else_body)
    }

    fn macro_body(&mut self, node: &'t Macro<'s>) -> Option<()> {
        if self.macros.insert(node.name, node).is_none_or(|known| !std::ptr::eq(known, node)) {
            self.changed = true;
        }
        for (parameter, default) in node.args.iter().rev().zip(node.defaults.iter().rev()) {
            let kind = self.expression(default)?;
            self.assign(parameter, kind)?;
        }
        self.depth += 1;
        self.statements(&node.body)?;
        self.depth -= 1;
        Some(())
    }

    fn assign(&mut self, target: &Expr<'s>, kind: Kind) -> Option<()> {
        let (known, name) = match target {
            Expr::Var(node) => (&mut self.names, node.id),
            Expr::GetAttr(node) => (&mut self.attributes, node.name),
            Expr::Tuple(node) => {
                kind.only_plain()?;
                return node.items.iter().try_for_each(|item| self.assign(item, kind));
            }
            Expr::List(node) => {
                kind.only_plain()?;
                return node.items.iter().try_for_each(|item| self.assign(item, kind));
            }
            _ => return None,
        };
        let before = known.get(name).copied();
        let after = before.unwrap_or(Kind::Plain).or(kind)?;
        self.changed |= before != Some(after);
        known.insert(name, after);
        Some(())
    }

    fn expression(&mut self, expr: &'t Expr<'s>) -> Option<Kind> {
        match expr {
            Expr::Const(_) => Some(Kind::Plain),
            // Under another name it would not be known as a macro.
            Expr::Var(node) if self.macros.contains_key(node.id) => None,
            Expr::Var(node) => Some(self.names.get(node.id).copied().unwrap_or(Kind::Plain)),
            Expr::Slice(node) => {
                for part in [&node.start, &node.stop, &node.step].into_iter().flatten() {
                    self.plain(part)?;
                }
                let of = self.expression(&node.expr)?;
                matches!(of, Kind::Plain | Kind::Messages | Kind::Body).then_some(of)
            }
            Expr::UnaryOp(node) => match node.op {
                UnaryOpKind::Not => self.expression(&node.expr).map(|_any| Kind::Plain),
                UnaryOpKind::Neg => self.plain(&node.expr),
            },
            Expr::BinOp(node) => self.operation(node.op, &node.left, &node.right),
            Expr::Compare(node) => {
                let mut left = &node.expr;
                for op in &node.ops {
                    match op.op {
                        CompareOpKind::Eq | CompareOpKind::Ne => self.equal(left, &op.expr)?,
                        CompareOpKind::In | CompareOpKind::NotIn => self.inside(left, &op.expr)?,
                        CompareOpKind::Lt | CompareOpKind::Lte | CompareOpKind::Gt | CompareOpKind::Gte => {
                            self.plain(left)?;
                            self.plain(&op.expr)?
                        }
                    };
                    left = &op.expr;
                }
                Some(Kind::Plain)
            }
            Expr::IfExpr(node) => {
                self.expression(&node.test_expr)?;
                let yes = self.expression(&node.true_expr)?;
                let no = node.false_expr.as_ref().map_or(Some(Kind::Plain), |expr| self.expression(expr))?;
                yes.or(no)
            }
            Expr::Filter(node) => self.filter(node),
            Expr::Test(node) => {
                let kind = self.expression(&node.expr)?;
                if TYPE_TESTS.contains(&node.name) && node.args.is_empty() {
                    return Some(Kind::Plain);
                }
                kind.only_plain()?;
                self.plain_arguments(&node.args)
            }
            Expr::GetAttr(node) => {
                let of = self.expression(&node.expr)?;
                self.attribute(of, node.name)
            }
            Expr::GetItem(node) => {
                let of = self.expression(&node.expr)?;
                if let Some(name) = text_of(&node.subscript_expr) {
                    return self.attribute(of, name);
                }
                self.plain(&node.subscript_expr)?;
                match of {
                    Kind::Plain => Some(Kind::Plain),
                    Kind::Messages => Some(Kind::Message),
                    Kind::Pieces => Some(Kind::Text),
                    Kind::Body => Some(Kind::Part),
                    _ => None,
                }
            }
            Expr::Call(node) => self.call(node),
            Expr::List(node) => self.all_plain(&node.items),
            Expr::Tuple(node) => self.all_plain(&node.items),
            Expr::Map(node) => {
                self.all_plain(&node.keys)?;
                self.all_plain(&node.values)
            }
        }
    }

    fn plain(&mut self, expr: &'t Expr<'s>) -> Option<Kind> {
        self.expression(expr)?.only_plain()
    }

    fn all_plain(&mut self, items: &'t [Expr<'s>]) -> Option<Kind> {
        items.iter().try_for_each(|item| self.plain(item).map(|_plain| ()))?;
        Some(Kind::Plain)
    }

    fn plain_arguments(&mut self, args: &'t [CallArg<'s>]) -> Option<Kind> {
        for arg in args {
            self.plain(value_of(arg))?;
        }
        Some(Kind::Plain)
    }

    fn operation(&mut self, op: BinOpKind, left: &'t Expr<'s>, right: &'t Expr<'s>) -> Option<Kind> {
        match op {
            BinOpKind::Eq | BinOpKind::Ne => self.equal(left, right),
            BinOpKind::In => self.inside(left, right),
            BinOpKind::ScAnd | BinOpKind::ScOr => self.expression(left)?.or(self.expression(right)?),
            BinOpKind::Add | BinOpKind::Concat => self.expression(left)?.joined(self.expression(right)?),
            _ => {
                self.plain(left)?;
                self.plain(right)
            }
        }
    }

    fn equal(&mut self, left: &'t Expr<'s>, right: &'t Expr<'s>) -> Option<Kind> {
        match (self.expression(left)?, self.expression(right)?) {
            (Kind::Plain, Kind::Plain) => {}
            (kind, Kind::Plain) if kind.asks_like_text() => self.never(right)?,
            (Kind::Plain, kind) if kind.asks_like_text() => self.never(left)?,
            _ => return None,
        }
        Some(Kind::Plain)
    }

    fn inside(&mut self, part: &'t Expr<'s>, whole: &'t Expr<'s>) -> Option<Kind> {
        self.plain(part)?;
        match self.expression(whole)? {
            Kind::Plain => {}
            kind if kind.asks_like_text() => self.never(part)?,
            // Which keys there are.
            Kind::Message | Kind::Part => {}
            _ => return None,
        }
        Some(Kind::Plain)
    }

    /// Notes that what `expr` stands for, a constant, is looked for in texts.
    fn never(&mut self, expr: &Expr<'s>) -> Option<()> {
        let Expr::Const(constant) = expr else { return None };
        // Whatever is no text is in none, and nothing is in all.
        if let Some(text) = constant.value.as_str().filter(|text| !text.is_empty())
            && !self.inside.iter().any(|known| known == text)
        {
            self.inside.push(text.to_owned());
        }
        Some(())
    }

    /// Notes which characters are stripped from texts.
    fn stripped(&mut self, args: &'t [CallArg<'s>]) -> Option<()> {
        match args {
            [] => self.spaces = true,
            [CallArg::Pos(chars)] => self.ends.extend(text_of(chars)?.chars()),
            _ => return None,
        }
        Some(())
    }

    /// What `key` of a value is.
    fn attribute(&self, of: Kind, key: &str) -> Option<Kind> {
        match (of, key) {
            (Kind::Message, "content") => Some(match self.format {
                ContentFormat::Text => Kind::Text,
                ContentFormat::Parts => Kind::Body,
            }),
            (Kind::Part, "text") => Some(Kind::Text),
            (Kind::Message | Kind::Part, _) => Some(Kind::Plain),
            // Neighbours in a loop, of whatever is looped over.
            (_, "previtem" | "nextitem") => None,
            (Kind::Plain | Kind::Namespace, _) => Some(self.attributes.get(key).copied().unwrap_or(Kind::Plain)),
            _ => None,
        }
    }

    fn filter(&mut self, node: &'t Filter<'s>) -> Option<Kind> {
        let of = self.expression(node.expr.as_ref()?)?;
        match (node.name, of) {
            ("default" | "d", _) => {
                let mut kind = of;
                for arg in &node.args {
                    kind = kind.or(self.expression(value_of(arg))?)?;
                }
                Some(kind)
            }
            ("trim", Kind::Text | Kind::Printed) => self.stripped(&node.args).map(|()| of),
            ("trim", Kind::Body) => self.stripped(&node.args).map(|()| Kind::Printed),
            ("length" | "count", Kind::Messages | Kind::Body | Kind::Pieces) => Some(Kind::Plain),
            ("first" | "last", Kind::Messages) => Some(Kind::Message),
            ("first" | "last", Kind::Body) => Some(Kind::Part),
            ("first" | "last", Kind::Pieces) => Some(Kind::Text),
            // Where that happens to a text, it is noted as it happens.
            ("tojson", Kind::Text | Kind::Body | Kind::Part | Kind::Message | Kind::Messages) => {
                self.plain_arguments(&node.args).map(|_plain| Kind::Printed)
            }
            ("string", Kind::Text) if node.args.is_empty() => Some(of),
            ("list", Kind::Messages | Kind::Body) | ("reverse", Kind::Messages) => Some(of),
            ("selectattr" | "rejectattr", Kind::Messages | Kind::Body) => {
                let [CallArg::Pos(key), rest @ ..] = node.args.as_slice() else { return None };
                // A path may lead into what is followed here.
                text_of(key).filter(|key| !key.contains("content") && !key.contains("text"))?;
                self.plain_arguments(rest).map(|_plain| of)
            }
            (_, Kind::Plain) => self.plain_arguments(&node.args),
            _ => None,
        }
    }

    fn call(&mut self, node: &'t Call<'s>) -> Option<Kind> {
        match &node.expr {
            Expr::Var(callee) => self.function(callee.id, &node.args),
            Expr::GetAttr(callee) => {
                let of = self.expression(&callee.expr)?;
                self.method(of, callee.name, &node.args)
            }
            _ => None,
        }
    }

    fn function(&mut self, name: &'s str, args: &'t [CallArg<'s>]) -> Option<Kind> {
        if let Some(makro) = self.macros.get(name).copied() {
            return self.macro_call(makro, args);
        }
        match name {
            "namespace" => {
                for arg in args {
                    let CallArg::Kwarg(key, value) = arg else { return None };
                    let kind = self.expression(value)?;
                    let before = self.attributes.get(key).copied();
                    let after = before.unwrap_or(Kind::Plain).or(kind)?;
                    self.changed |= before != Some(after);
                    self.attributes.insert(key, after);
                }
                Some(Kind::Namespace)
            }
            // Nothing comes of a request that is refused.
            "raise_exception" => {
                args.iter().try_for_each(|arg| self.expression(value_of(arg)).map(|_any| ()))?;
                Some(Kind::Plain)
            }
            "strftime_now" => match args {
                [CallArg::Pos(format)] if tells_days(text_of(format)?) => Some(Kind::Plain),
                _ => None,
            },
            "loop" | "caller" => None,
            _ => self.plain_arguments(args),
        }
    }

    fn macro_call(&mut self, makro: &'t Macro<'s>, args: &'t [CallArg<'s>]) -> Option<Kind> {
        let mut places = makro.args.iter();
        for arg in args {
            match arg {
                CallArg::Pos(value) => {
                    let kind = self.expression(value)?;
                    match places.next() {
                        Some(parameter) => self.assign(parameter, kind)?,
                        None => return None,
                    }
                }
                CallArg::Kwarg(name, value) => {
                    let kind = self.expression(value)?;
                    let parameter = makro.args.iter().find(|arg| matches!(arg, Expr::Var(node) if node.id == *name))?;
                    self.assign(parameter, kind)?;
                }
                CallArg::PosSplat(_) | CallArg::KwargSplat(_) => return None,
            }
        }
        Some(if self.macro_prints { Kind::Printed } else { Kind::Plain })
    }

    fn method(&mut self, of: Kind, name: &str, args: &'t [CallArg<'s>]) -> Option<Kind> {
        match (of, name) {
            (Kind::Text | Kind::Printed, "strip" | "lstrip" | "rstrip") => self.stripped(args).map(|()| of),
            (Kind::Body, "strip" | "lstrip" | "rstrip") => self.stripped(args).map(|()| Kind::Text),
            (Kind::Text | Kind::Body, "startswith" | "endswith" | "find" | "rfind" | "count") => match args {
                [CallArg::Pos(constant)] => self.never(constant).map(|()| Kind::Plain),
                _ => None,
            },
            (Kind::Text | Kind::Body, "removeprefix" | "removesuffix") => match args {
                [CallArg::Pos(constant)] => self.never(constant).map(|()| Kind::Text),
                _ => None,
            },
            (Kind::Text | Kind::Body, "split" | "rsplit") => {
                let [CallArg::Pos(separator), rest @ ..] = args else { return None };
                // Without a separator it is split at white space.
                text_of(separator)?;
                self.never(separator)?;
                self.plain_arguments(rest).map(|_plain| Kind::Pieces)
            }
            (Kind::Text | Kind::Body, "replace") => {
                let [CallArg::Pos(from), CallArg::Pos(to)] = args else { return None };
                self.never(from)?;
                self.plain(to).map(|_plain| Kind::Text)
            }
            (Kind::Message | Kind::Part, "get") => {
                let [CallArg::Pos(key), rest @ ..] = args else { return None };
                let key = text_of(key)?;
                self.plain_arguments(rest)?;
                self.attribute(of, key)
            }
            (Kind::Message | Kind::Part, "keys") => Some(Kind::Plain),
            (Kind::Plain, _) => self.plain_arguments(args),
            _ => None,
        }
    }
}

/// Whether a date written like this is the same all day.
fn tells_days(format: &str) -> bool {
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char == '%' && !chars.next().is_some_and(|what| "YmdyBbAaj%".contains(what)) {
            return false;
        }
    }
    true
}

fn text_of<'e>(expr: &'e Expr<'_>) -> Option<&'e str> {
    match expr {
        Expr::Const(constant) => constant.value.as_str(),
        _ => None,
    }
}

fn value_of<'t, 's>(arg: &'t CallArg<'s>) -> &'t Expr<'s> {
    match arg {
        CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value) => value,
    }
}
