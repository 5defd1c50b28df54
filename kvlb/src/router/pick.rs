//! Which of several rules on one VIP serves a request.

use crate::fleet::Rule;

/// What of a request tells its rule.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// The `Host` header, with or without a port.
    pub host: Option<&'a str>,
    /// The path, without the query.
    pub path: &'a str,
    /// The model asked for; `None` where the request names none.
    pub model: Option<&'a str>,
}

/// How well a rule fits a request; larger is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Match {
    host: bool,
    path: usize,
    model: ModelMatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ModelMatch {
    /// The request names no model and the rule wants one: served by the oldest such rule where no wildcard is.
    Unnamed,
    /// The rule takes any model.
    Wildcard,
    /// The rule's engines list it as an adapter of the rule's model.
    Adapter,
    /// The rule's own model.
    Exact,
}

/// How well `rule` fits, or `None` where it does not serve such requests. `adapter` says whether a model is an adapter
/// that the rule's engines list.
///
/// The most specific host wins, then the longest path, then the model.
pub fn rank(rule: &Rule, lookup: &Lookup<'_>, adapter: impl Fn(&str) -> bool) -> Option<Match> {
    let host = match lookup.host.map(without_port) {
        _ if rule.key.host.is_empty() => false,
        Some(host) if host.eq_ignore_ascii_case(&rule.key.host) => true,
        _ => return None,
    };
    if !path_matches(&rule.key.path_prefix, lookup.path) {
        return None;
    }
    let model = match (&rule.key.model, lookup.model) {
        (None, _) => ModelMatch::Wildcard,
        (Some(_), None) => ModelMatch::Unnamed,
        (Some(own), Some(asked)) if own == asked => ModelMatch::Exact,
        (Some(_), Some(asked)) if adapter(asked) => ModelMatch::Adapter,
        _ => return None,
    };
    Some(Match { host, path: rule.key.path_prefix.len(), model })
}

/// Whether `path` is `prefix` or lies below it: `/v1` covers `/v1` and `/v1/models`, not `/v10`. Without a prefix every
/// path is covered, also the asterisk of `OPTIONS`.
fn path_matches(prefix: &str, path: &str) -> bool {
    let prefix = prefix.trim_end_matches('/');
    prefix.is_empty() || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A host without its port; an IPv6 literal keeps its brackets.
fn without_port(host: &str) -> &str {
    match host.rfind(':') {
        Some(colon)
            if !host[colon..].contains(']') && host[..colon].find(':').is_none_or(|_| host.starts_with('[')) =>
        {
            &host[..colon]
        }
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::fixtures::rule;

    fn lookup(model: Option<&str>) -> Lookup<'_> {
        Lookup { host: Some("llm.example:8080"), path: "/v1/completions", model }
    }

    #[test]
    fn the_exact_model_beats_an_adapter_beats_the_wildcard() {
        let mut exact = rule();
        exact.key.model = Some("m".to_owned());
        let mut base = rule();
        base.key.model = Some("base".to_owned());
        let wildcard = rule();
        let asked = lookup(Some("m"));
        let exact = rank(&exact, &asked, |_| false);
        let adapter = rank(&base, &asked, |model| model == "m");
        let any = rank(&wildcard, &asked, |_| false);
        assert!(exact > adapter && adapter > any && any.is_some());
        assert_eq!(rank(&base, &asked, |_| false), None);
    }

    #[test]
    fn a_request_without_a_model_goes_to_the_wildcard_else_to_a_named_rule() {
        let mut named = rule();
        named.key.model = Some("m".to_owned());
        assert!(rank(&rule(), &lookup(None), |_| false) > rank(&named, &lookup(None), |_| false));
        assert!(rank(&named, &lookup(None), |_| false).is_some());
    }

    #[test]
    fn host_and_path_narrow_a_rule() {
        let mut narrow = rule();
        narrow.key.host = "LLM.example".to_owned();
        narrow.key.path_prefix = "/v1/".to_owned();
        assert!(rank(&narrow, &lookup(None), |_| false) > rank(&rule(), &lookup(None), |_| false));
        let elsewhere = Lookup { host: Some("other"), ..lookup(None) };
        assert_eq!(rank(&narrow, &elsewhere, |_| false), None);
        let longer = Lookup { path: "/v10/completions", ..lookup(None) };
        assert_eq!(rank(&narrow, &longer, |_| false), None);
        let server = Lookup { path: "*", ..lookup(None) };
        assert_eq!(rank(&narrow, &server, |_| false), None);
        assert!(rank(&rule(), &server, |_| false).is_some(), "OPTIONS * is about the whole server");
    }

    #[test]
    fn ports_are_cut_from_hosts_and_ipv6_literals_stay_whole() {
        assert_eq!(without_port("a.b:80"), "a.b");
        assert_eq!(without_port("[::1]:80"), "[::1]");
        assert_eq!(without_port("[::1]"), "[::1]");
        assert_eq!(without_port("::1"), "::1");
        assert_eq!(without_port("a"), "a");
    }
}
