//! What can be read off a template's syntax tree before it ever renders.
//!
//! Source of the content format: vLLM 0.32.0, `_detect_content_format`, whose rules these are, node for node.

use std::ops::Range;

use minijinja::machinery::ast::{Call, CallArg, Expr, ForLoop, Macro, Set, Stmt};
use minijinja::machinery::parse;

use super::outline::Outlines;
use super::python;
use super::value::{ITEM_PREFIX, method_name};

/// The name under which a template is known to the template engine.
pub(super) const NAME: &str = "chat_template";

/// In which form a template takes a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One text: the parts joined by newlines.
    Text,
    /// The list of parts.
    Parts,
}

/// What a template's tree tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) format: ContentFormat,
    /// A construct whose meaning here may silently differ from Jinja2's.
    pub(super) doubt: Option<&'static str>,
    /// The source to compile, in which `x['items']` and its like are told from `x.items`.
    pub(super) source: String,
}

/// Reads the template `source`; and how its chats become outlines, where they can.
///
/// # Errors
/// The template engine's own, when the source is not a template.
pub(super) fn read(source: &str) -> Result<(Reading, Option<Outlines>), minijinja::Error> {
    let root = parse(source, NAME, python::syntax())?;
    let nodes = Nodes::of(&root);
    // A tree that the engine's detection stumbles over counts as text there.
    let format = if nodes.iterates_content().unwrap_or(false) { ContentFormat::Parts } else { ContentFormat::Text };
    let reading = Reading { format, doubt: nodes.doubt, source: with_item_names(source, &nodes.method_keys)? };
    Ok((reading, Outlines::of(source, &root, format)))
}

/// Puts [`ITEM_PREFIX`] and the key, as an attribute, in the place of each `['key']` at one of `places`.
fn with_item_names(source: &str, places: &[(Range<usize>, &str)]) -> Result<String, minijinja::Error> {
    let lost = || minijinja::Error::new(minijinja::ErrorKind::SyntaxError, "a subscript is not where it should be");
    let mut changed = source.to_owned();
    let mut places = places.to_vec();
    // From the back, so that the places before stay where they are.
    places.sort_by_key(|(place, _)| std::cmp::Reverse(place.start));
    for (place, key) in places {
        let (before, after) = (source.get(..place.start).ok_or_else(lost)?, source.get(place.end..).ok_or_else(lost)?);
        let start = before.trim_end().strip_suffix('[').ok_or_else(lost)?.len();
        let end = source.len() - after.trim_start().strip_prefix(']').ok_or_else(lost)?.len();
        changed.replace_range(start..end, &format!(".{ITEM_PREFIX}{key}"));
    }
    Ok(changed)
}

/// The engine's detection gives up: an assignment or a loop whose target is not a plain name.
#[derive(Debug)]
struct GivesUp;

/// The nodes of a tree that matter, each kind in the order of the source.
#[derive(Default)]
struct Nodes<'t, 's> {
    loops: Vec<&'t ForLoop<'s>>,
    sets: Vec<&'t Set<'s>>,
    macros: Vec<&'t Macro<'s>>,
    calls: Vec<&'t Call<'s>>,
    doubt: Option<&'static str>,
    /// Where a constant subscript is a method's name, and the name.
    method_keys: Vec<(Range<usize>, &'static str)>,
    /// Loops inside a macro, with that macro.
    macro_loops: Vec<(&'t ForLoop<'s>, &'t Macro<'s>)>,
    /// The macros around the place being walked.
    inside: Vec<&'t Macro<'s>>,
}

impl<'t, 's> Nodes<'t, 's> {
    fn of(root: &'t Stmt<'s>) -> Self {
        let mut nodes = Self::default();
        nodes.statement(root);
        nodes
    }

    fn doubtful(&mut self, what: &'static str) {
        self.doubt.get_or_insert(what);
    }

    /// Whether a loop runs over the content of a message.
    fn iterates_content(&self) -> Result<bool, GivesUp> {
        let messages = self.message_names()?;
        for each in &self.loops {
            let over_content = messages.iter().any(|name| is_name_or_elements(&each.iter, name, Some("content")));
            let over_parameter = || {
                self.macro_loops.iter().rfind(|(inner, _)| std::ptr::eq(*inner, *each)).is_some_and(|(_, makro)| {
                    self.content_parameters(makro, &messages).iter().any(|name| is_name(&each.iter, name))
                })
            };
            let in_macro = || self.macro_loops.iter().any(|(inner, _)| std::ptr::eq(*inner, *each));
            if over_content || over_parameter() || (!in_macro() && is_name(&each.iter, "content")) {
                return plain_name(&each.target).map(|_name| true);
            }
        }
        Ok(false)
    }

    /// The names under which single messages are known.
    fn message_names(&self) -> Result<Vec<&'s str>, GivesUp> {
        let lists = self.names_of("messages")?;
        let mut names = Vec::new();
        for each in &self.loops {
            if lists.iter().any(|name| is_name_or_elements(&each.iter, name, None)) {
                names.push(plain_name(&each.target)?);
            }
        }
        Ok(names)
    }

    /// `root` and the names that its value, or a slice or filtered form of it, is given by assignments.
    fn names_of(&self, root: &'s str) -> Result<Vec<&'s str>, GivesUp> {
        let mut names = vec![root];
        let mut next = 0;
        while let Some(name) = names.get(next).copied() {
            next += 1;
            for set in &self.sets {
                if is_name_or_elements(&set.expr, name, None) {
                    let target = plain_name(&set.target)?;
                    if !names.contains(&target) {
                        names.push(target);
                    }
                }
            }
        }
        Ok(names)
    }

    /// The parameters of a macro that some call gives a message's content.
    fn content_parameters(&self, makro: &Macro<'s>, messages: &[&str]) -> Vec<&'s str> {
        let parameters: Vec<&'s str> = makro.args.iter().filter_map(|arg| plain_name(arg).ok()).collect();
        let is_content = |arg: &Expr<'_>| messages.iter().any(|name| is_name_or_elements(arg, name, Some("content")));
        let mut found = Vec::new();
        for call in self.calls.iter().filter(|call| is_name(&call.expr, makro.name)) {
            let mut places = parameters.iter();
            for arg in &call.args {
                match arg {
                    CallArg::Pos(value) => {
                        if let Some(parameter) = places.next()
                            && is_content(value)
                        {
                            found.push(*parameter);
                        }
                    }
                    CallArg::Kwarg(name, value) if parameters.contains(name) && is_content(value) => found.push(name),
                    _ => {}
                }
            }
        }
        found
    }

    fn statements(&mut self, list: &'t [Stmt<'s>]) {
        for statement in list {
            self.statement(statement);
        }
    }

    fn statement(&mut self, statement: &'t Stmt<'s>) {
        match statement {
            Stmt::Template(node) => self.statements(&node.children),
            Stmt::EmitExpr(node) => self.expression(&node.expr),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(node) => self.for_loop(node),
            Stmt::IfCond(node) => {
                self.expression(&node.expr);
                self.statements(&node.true_body);
                self.statements(&node.false_body);
            }
            Stmt::WithBlock(node) => {
                node.assignments.iter().for_each(|(_target, value)| self.expression(value));
                self.statements(&node.body);
            }
            Stmt::Set(node) => {
                self.sets.push(node);
                self.expression(&node.expr);
            }
            Stmt::SetBlock(node) => {
                node.filter.iter().for_each(|filter| self.expression(filter));
                self.statements(&node.body);
            }
            Stmt::FilterBlock(node) => {
                self.expression(&node.filter);
                self.statements(&node.body);
            }
            Stmt::Macro(node) => self.macro_body(node),
            Stmt::CallBlock(node) => {
                self.call(&node.call);
                self.statements(&node.macro_decl.body);
            }
            Stmt::AutoEscape(_) => self.doubtful("autoescape"),
            Stmt::Do(_) => self.doubtful("do"),
            Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                self.doubtful("other templates");
            }
        }
    }

    fn for_loop(&mut self, node: &'t ForLoop<'s>) {
        self.loops.push(node);
        for makro in self.inside.clone() {
            self.macro_loops.push((node, makro));
        }
        self.expression(&node.iter);
        node.filter_expr.iter().for_each(|filter| self.expression(filter));
        self.statements(&node.body);
        self.statements(&node.else_body);
    }

    fn macro_body(&mut self, node: &'t Macro<'s>) {
        self.macros.push(node);
        node.defaults.iter().for_each(|default| self.expression(default));
        self.inside.push(node);
        self.statements(&node.body);
        self.inside.pop();
    }

    fn call(&mut self, call: &'t Call<'s>) {
        self.calls.push(call);
        match &call.expr {
            // A method: its name is not an attribute that could also be a key.
            Expr::GetAttr(node) => self.expression(&node.expr),
            callee => self.expression(callee),
        }
        self.arguments(&call.args);
    }

    fn arguments(&mut self, args: &'t [CallArg<'s>]) {
        for arg in args {
            match arg {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => {
                    self.expression(value);
                }
            }
        }
    }

    /// Notes a subscript that is a method's name.
    fn subscript(&mut self, expr: &Expr<'_>) {
        if let Expr::Const(constant) = expr
            && let Some(name) = constant.value.as_str().and_then(method_name)
        {
            let span = constant.span();
            self.method_keys.push((span.start_offset as usize..span.end_offset as usize, name));
        }
    }

    fn expression(&mut self, expr: &'t Expr<'s>) {
        match expr {
            Expr::Var(node) if GLOBALS.contains(&node.id) => self.doubtful("a global of Jinja2"),
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(node) => {
                self.expression(&node.expr);
                [&node.start, &node.stop, &node.step].into_iter().flatten().for_each(|part| self.expression(part));
            }
            Expr::UnaryOp(node) => self.expression(&node.expr),
            Expr::BinOp(node) => {
                self.expression(&node.left);
                self.expression(&node.right);
            }
            Expr::Compare(node) => {
                self.expression(&node.expr);
                node.ops.iter().for_each(|op| self.expression(&op.expr));
            }
            Expr::IfExpr(node) => {
                self.expression(&node.test_expr);
                self.expression(&node.true_expr);
                node.false_expr.iter().for_each(|expr| self.expression(expr));
            }
            Expr::Filter(node) => {
                node.expr.iter().for_each(|expr| self.expression(expr));
                self.arguments(&node.args);
            }
            Expr::Test(node) => {
                self.expression(&node.expr);
                self.arguments(&node.args);
            }
            Expr::GetAttr(node) => self.expression(&node.expr),
            Expr::GetItem(node) => {
                self.subscript(&node.subscript_expr);
                self.expression(&node.expr);
                self.expression(&node.subscript_expr);
            }
            Expr::Call(node) => self.call(node),
            Expr::List(node) => node.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(node) => node.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(node) => {
                if node.keys.iter().any(|key| !matches!(key, Expr::Const(constant) if !is_method_name(&constant.value)))
                {
                    self.doubtful("an object with a method's name as a key");
                }
                node.keys.iter().for_each(|key| self.expression(key));
                node.values.iter().for_each(|value| self.expression(value));
            }
        }
    }
}

/// Globals of Jinja2 that are not defined here.
const GLOBALS: [&str; 4] = ["cycler", "joiner", "lipsum", "self"];

fn is_method_name(key: &minijinja::Value) -> bool {
    key.as_str().is_some_and(|key| method_name(key).is_some())
}

fn plain_name<'s>(expr: &Expr<'s>) -> Result<&'s str, GivesUp> {
    match expr {
        Expr::Var(node) => Ok(node.id),
        _ => Err(GivesUp),
    }
}

fn is_name(expr: &Expr<'_>, name: &str) -> bool {
    matches!(expr, Expr::Var(node) if node.id == name)
}

fn is_attribute(expr: &Expr<'_>, name: &str, key: &str) -> bool {
    match expr {
        Expr::GetAttr(node) => node.name == key && is_name(&node.expr, name),
        Expr::GetItem(node) => {
            is_name(&node.expr, name)
                && matches!(&node.subscript_expr, Expr::Const(constant) if constant.value.as_str() == Some(key))
        }
        _ => false,
    }
}

/// Whether `expr` is the variable (or its `key`), or a filtered, tested or sliced form of that.
fn is_name_or_elements(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match expr {
        Expr::Filter(node) => node.expr.as_ref().is_some_and(|inner| is_name_or_elements(inner, name, key)),
        Expr::Test(node) => is_name_or_elements(&node.expr, name, key),
        Expr::Slice(node) => is_name_or_elements(&node.expr, name, key),
        _ => key.map_or_else(|| is_name(expr, name), |key| is_attribute(expr, name, key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(source: &str) -> ContentFormat {
        read(source).unwrap().0.format
    }

    #[test]
    fn a_template_that_loops_over_content_takes_parts() {
        for parts in [
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for c in m['content'] | list %}{{ c.text }}{% endfor %}{% endfor %}",
            "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
            "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(c=m['content']) }}{% endfor %}",
        ] {
            assert_eq!(format(parts), ContentFormat::Parts, "{parts}");
        }
    }

    #[test]
    fn a_template_that_prints_content_takes_text() {
        for text in [
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "{% for m in messages %}{% for c in m.tool_calls %}{{ c.name }}{% endfor %}{% endfor %}",
            "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(messages) }}",
            "{% for c in other.content %}{% endfor %}",
            // The engine's detection stops at a target that is not a plain name.
            "{% set ns.all = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
        ] {
            assert_eq!(format(text), ContentFormat::Text, "{text}");
        }
    }

    #[test]
    fn a_subscript_that_is_a_method_s_name_is_told_from_the_attribute() {
        let source = |source: &str| read(source).unwrap().0.source;
        assert_eq!(source("{{ x['items'] }}"), "{{ x.kvlb_item_items }}");
        assert_eq!(source("{{ x[ \"keys\" ]['get'].y['a'] }}"), "{{ x.kvlb_item_keys.kvlb_item_get.y['a'] }}");
        for same in [
            "{{ x.items }}",
            "{{ x.items() }}",
            "{{ 'items' in x }}",
            "x['items']",
            "{{ \"x['items']\" }}",
            "{{ ['items'] }}",
        ] {
            assert_eq!(source(same), same);
        }
        assert!(read("{{ {'items': 1} }}").unwrap().0.doubt.is_some());
    }

    #[test]
    fn what_the_engine_knows_and_this_does_not_is_doubtful() {
        for source in ["{{ joiner('x') }}", "{% autoescape true %}{% endautoescape %}", "{% include 'x' %}"] {
            assert!(read(source).unwrap().0.doubt.is_some(), "{source}");
        }
    }
}
