//! What a client may be told, given what the engines say of its request.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::clients::{Ask, Said, Told};
use crate::engine::Seen;

/// Violations that are told in full.
const TOLD_IN_FULL: usize = 20;

/// What one engine says of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fate {
    id: String,
    body_sha256: String,
    status: Option<u16>,
    finished: bool,
}

impl Fate {
    /// None for what no client of the storm sent.
    pub(super) fn of(seen: &Seen) -> Option<Self> {
        let id = seen.header("x-request-id")?.to_owned();
        Some(Self { id, body_sha256: seen.body_sha256.clone(), status: seen.status, finished: seen.finished })
    }

    /// Whether the engine may have begun to compute it: it did not say that it would not.
    fn may_have_run(&self) -> bool {
        matches!(self.status, None | Some(200))
    }
}

/// Both sides of every request.
#[derive(Debug, Default)]
pub(super) struct Judge {
    cases: Mutex<Cases>,
    /// So many engines, the first, compute prompts for the others.
    prefills: usize,
}

#[derive(Debug, Default)]
struct Cases {
    heard: BTreeMap<String, (Ask, Told)>,
    seen: BTreeMap<String, Vec<(usize, Fate)>>,
}

impl Judge {
    pub(super) fn new(prefills: usize) -> Self {
        Self { cases: Mutex::default(), prefills }
    }

    /// A client's side.
    pub(super) fn heard(&self, ask: Ask, told: Told) {
        self.cases().heard.insert(ask.id.clone(), (ask, told));
    }

    /// An engine's side.
    pub(super) fn saw(&self, engine: usize, fates: impl Iterator<Item = Fate>) {
        let mut cases = self.cases();
        for fate in fates {
            cases.seen.entry(fate.id.clone()).or_default().push((engine, fate));
        }
    }

    /// One line on how far it is.
    pub(super) fn progress(&self) -> String {
        let cases = self.cases();
        let whole = cases.heard.values().filter(|(_, told)| told.is_whole()).count();
        format!("{} requests, {whole} answered in full", cases.heard.len())
    }

    /// Requests that were sent for certain, and those whose client left: kvlb may never have read them.
    pub(super) fn requests(&self) -> (usize, usize) {
        let cases = self.cases();
        let left = cases.heard.values().filter(|(_, told)| matches!(told, Told::Left)).count();
        (cases.heard.len() - left, left)
    }

    /// Judges everything.
    pub(super) fn verdicts(&self) -> Verdicts {
        let cases = self.cases();
        let mut verdicts = Verdicts::default();
        for (id, (ask, told)) in &cases.heard {
            let fates = cases.seen.get(id).map_or(&[][..], Vec::as_slice);
            let judged = if self.prefills == 0 { judge(ask, told, fates) } else { self.judge_legs(ask, told, fates) };
            match judged {
                Ok(class) => *verdicts.classes.entry(class).or_default() += 1,
                Err(what) => verdicts.violations.push(format!("{id}: {what}: told {told:?}, engines {fates:?}")),
            }
        }
        let unasked = cases.seen.keys().filter(|id| !cases.heard.contains_key(*id));
        verdicts.violations.extend(unasked.map(|id| format!("{id}: an engine saw it, and no client sent it")));
        verdicts
    }

    /// As [`judge`], for a request in two legs. What a prefill leg computed nobody has seen: it may have been sent to all of
    /// its engines.
    fn judge_legs(&self, ask: &Ask, told: &Told, fates: &[(usize, Fate)]) -> Result<String, &'static str> {
        let is_prefill = |fate: &&(usize, Fate)| fate.0 < self.prefills;
        let prefilled = fates.iter().filter(is_prefill).any(|(_, fate)| fate.may_have_run());
        let decodes: Vec<_> = fates.iter().filter(|fate| !is_prefill(fate)).collect();
        let ran: Vec<_> = decodes.iter().copied().filter(|(_, fate)| fate.may_have_run()).collect();
        let finished = ran.iter().filter(|(_, fate)| fate.finished).count();
        if finished > 1 {
            return Err("it was decoded twice");
        }
        if ran.len() > 2 {
            return Err("its decode leg was sent more often than once again");
        }
        if !decodes.is_empty() && !prefilled {
            return Err("it was decoded, and nobody had computed its prompt");
        }
        let said = match told {
            Told::Left => return Ok("client left".to_owned()),
            Told::Nothing(_) => return Err("the client was told nothing"),
            Told::Answer(said) => said,
        };
        match (said.status, said.code.as_deref()) {
            (504, Some("idle_timeout")) | (_, None) => answered(ask, said, &ran, fates),
            (503, Some("pd_pool_unavailable")) if ran.is_empty() => Ok(class(said)),
            (503, Some("pd_pool_unavailable")) => Err("a decode leg had begun"),
            // Both legs begin anew behind a used connection that ended without a word, once.
            (502, Some("pd_prefill_backend_died")) | (504, Some("pd_prefill_timeout" | "pd_handoff_timeout")) => {
                match (finished, ran.len()) {
                    (0, 0 | 1) => Ok(class(said)),
                    _ => Err("a decode leg was under way"),
                }
            }
            (502, Some("pd_decode_backend_died")) => match finished {
                0 => Ok(class(said)),
                _ => Err("an engine finished it, and the client is told that it died"),
            },
            (504, Some("pd_decode_timeout")) if ran.is_empty() => Err("nobody was waited for"),
            (504, Some("pd_decode_timeout")) => Ok(class(said)),
            _ => Err("not in the table"),
        }
    }

    fn cases(&self) -> MutexGuard<'_, Cases> {
        self.cases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the judge found.
#[derive(Clone, Debug, Default)]
pub struct Verdicts {
    /// Requests by what became of them, all as they may.
    pub classes: BTreeMap<String, usize>,
    /// What must not be.
    pub violations: Vec<String>,
}

impl fmt::Display for Verdicts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (class, count) in &self.classes {
            writeln!(f, "{count:8} {class}")?;
        }
        writeln!(f, "{:8} violations", self.violations.len())?;
        for violation in self.violations.iter().take(TOLD_IN_FULL) {
            writeln!(f, "VIOLATION: {violation}")?;
        }
        Ok(())
    }
}

/// The class of a case, or what is wrong with it.
fn judge(ask: &Ask, told: &Told, fates: &[(usize, Fate)]) -> Result<String, &'static str> {
    let read = |fate: &Fate| fate.status.is_none() || fate.body_sha256 == ask.body_sha256;
    if !fates.iter().all(|(_, fate)| read(fate)) {
        return Err("an engine read another body");
    }
    let ran: Vec<_> = fates.iter().filter(|(_, fate)| fate.may_have_run()).collect();
    if ran.iter().filter(|(_, fate)| fate.finished).count() > 1 {
        return Err("it ran twice");
    }
    // A connection that was used before and died without a byte is replaced once: nobody can tell that from one that was
    // closed before the request came. It goes to another endpoint only where the first takes no connection any more.
    if ran.len() > 2 {
        return Err("it was sent more often than once again");
    }
    match told {
        Told::Left => Ok("client left".to_owned()),
        Told::Nothing(_) => Err("the client was told nothing"),
        Told::Answer(said) => answered(ask, said, &ran, fates),
    }
}

fn answered(ask: &Ask, said: &Said, ran: &[&(usize, Fate)], fates: &[(usize, Fate)]) -> Result<String, &'static str> {
    let finished = ran.iter().any(|(_, fate)| fate.finished);
    match (said.status, said.code.as_deref()) {
        (200, None) if said.whole => match () {
            () if said.tokens != ask.expected => Err("wrong tokens"),
            () if !finished => Err("no engine finished it"),
            () => Ok("200, whole".to_owned()),
        },
        (200, None) if ran.is_empty() => Err("an answer from nowhere"),
        (200, None) if !ask.expected.starts_with(&said.tokens) => Err("wrong tokens before the break"),
        (200, None) => Ok("200, broken off as the engine did".to_owned()),
        (status, None) => {
            // A busy engine's own word is the answer also where the one that was asked after it died.
            let said_so = fates.iter().any(|(_, fate)| fate.status == Some(status) && fate.finished);
            if said_so { Ok(format!("{status}, as the engine said")) } else { Err("a status that no engine said") }
        }
        (502, Some("backend_unreachable")) | (503, Some("no_healthy_backend")) => {
            // One that was busy first did not begin.
            if ran.is_empty() {
                Ok(class(said))
            } else {
                Err("an engine began, and the client is told that none was reached")
            }
        }
        (502, Some("backend_died")) => {
            if finished {
                Err("an engine finished it, and the client is told that it died")
            } else {
                Ok(class(said))
            }
        }
        (504, Some("first_byte_timeout" | "idle_timeout")) => {
            if ran.is_empty() {
                Err("nobody was waited for")
            } else {
                Ok(class(said))
            }
        }
        _ => Err("not in the table"),
    }
}

fn class(said: &Said) -> String {
    format!("{} {}", said.status, said.code.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(status: Option<u16>, finished: bool) -> Fate {
        Fate { id: "1".to_owned(), body_sha256: "b".to_owned(), status, finished }
    }

    fn said(status: u16, code: Option<&str>, tokens: &[u32]) -> Told {
        let code = code.map(str::to_owned);
        Told::Answer(Said { status, code, whole: tokens.len() == 3 || status != 200, tokens: tokens.to_vec() })
    }

    fn judged(told: &Told, fates: &[(usize, Fate)]) -> Result<String, &'static str> {
        judge(&Ask::example("1", &[1, 2, 3], "b"), told, fates)
    }

    #[test]
    fn what_may_be_is_named_and_what_may_not_is_found() {
        let whole = said(200, None, &[1, 2, 3]);
        judged(&whole, &[(0, fate(Some(200), true))]).unwrap();
        judged(&whole, &[(1, fate(Some(503), true)), (0, fate(Some(200), true))]).unwrap();
        judged(&whole, &[(0, fate(None, false)), (0, fate(Some(200), true))]).unwrap();
        for (told, fates) in [
            (&whole, &[][..]),
            (&whole, &[(0, fate(Some(200), false))][..]),
            (&whole, &[(0, fate(Some(200), true)), (1, fate(Some(200), true))][..]),
            (&whole, &[(0, fate(None, false)), (0, fate(None, false)), (1, fate(Some(200), true))][..]),
            (&whole, &[(0, Fate { body_sha256: "c".to_owned(), ..fate(Some(200), true) })][..]),
            (&said(200, None, &[1, 3, 2]), &[(0, fate(Some(200), true))][..]),
            (&said(200, None, &[2]), &[(0, fate(Some(200), false))][..]),
            (&said(200, None, &[1]), &[][..]),
            (&said(500, None, &[]), &[(0, fate(Some(200), false))][..]),
            (&said(502, Some("backend_unreachable"), &[]), &[(0, fate(None, false))][..]),
            (&said(502, Some("backend_died"), &[]), &[(0, fate(Some(200), true))][..]),
            (&said(504, Some("idle_timeout"), &[]), &[][..]),
            (&said(502, Some("backend_bad_answer"), &[]), &[(0, fate(None, false))][..]),
            (&Told::Nothing("closed".to_owned()), &[][..]),
        ] {
            judged(told, fates).unwrap_err();
        }
        judged(&said(200, None, &[1]), &[(0, fate(Some(200), false))]).unwrap();
        judged(&said(503, None, &[]), &[(0, fate(Some(503), true))]).unwrap();
        judged(&said(503, None, &[]), &[(0, fate(Some(503), true)), (1, fate(None, false))]).unwrap();
        judged(&said(502, Some("backend_died"), &[]), &[(0, fate(None, false))]).unwrap();
        judged(&said(502, Some("backend_died"), &[]), &[]).unwrap();
        judged(&Told::Left, &[(0, fate(Some(200), false))]).unwrap();
    }

    #[test]
    fn a_prefill_leg_is_no_run_and_a_decode_leg_is_one() {
        let judge = Judge::new(2);
        let ask = Ask::example("1", &[1, 2, 3], "b");
        let judged = |told: &Told, fates: &[(usize, Fate)]| judge.judge_legs(&ask, told, fates);
        let whole = said(200, None, &[1, 2, 3]);
        let ok = || fate(Some(200), true);
        judged(&whole, &[(0, ok()), (1, ok()), (2, ok())]).unwrap();
        judged(&whole, &[(0, ok()), (3, fate(Some(503), true)), (2, ok())]).unwrap();
        judged(&whole, &[(2, ok())]).unwrap_err();
        judged(&whole, &[(0, ok()), (2, ok()), (3, ok())]).unwrap_err();
        judged(&whole, &[(0, ok())]).unwrap_err();
        judged(&said(200, None, &[1, 3, 2]), &[(0, ok()), (2, ok())]).unwrap_err();
        judged(&said(504, Some("pd_prefill_timeout"), &[]), &[(0, fate(None, false))]).unwrap();
        judged(
            &said(504, Some("pd_prefill_timeout"), &[]),
            &[(0, ok()), (2, fate(None, false)), (1, fate(None, false))],
        )
        .unwrap();
        judged(&said(504, Some("pd_handoff_timeout"), &[]), &[(0, ok()), (2, ok())]).unwrap_err();
        judged(&said(503, Some("pd_pool_unavailable"), &[]), &[(0, ok()), (2, fate(None, false))]).unwrap_err();
        judged(&said(502, Some("pd_decode_backend_died"), &[]), &[(0, ok()), (2, ok())]).unwrap_err();
        judged(&said(502, Some("backend_died"), &[]), &[(0, ok())]).unwrap_err();
        judged(&Told::Left, &[(0, ok())]).unwrap();
    }

    #[test]
    fn a_request_that_no_client_sent_is_a_violation() {
        let judge = Judge::default();
        judge.saw(0, [fate(Some(200), true)].into_iter());
        assert_eq!(judge.verdicts().violations.len(), 1);
        judge.heard(Ask::example("1", &[1, 2, 3], "b"), said(200, None, &[1, 2, 3]));
        assert!(judge.verdicts().violations.is_empty());
    }
}
