//! The guard ladder: each step one guard, each guard one reason.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use super::caller::{Caller, Key};
use super::decision::{Decision, Miss, Observed, PromptShape, Reason, Tier};
use super::remembered::{self, Word};
use crate::contract::{BlockHash, BlockSize, Extra, HashError, KeySpace, Lora, TokenId};
use crate::fleet::{ExactMode, Role, Rule, Score, Selector};
use crate::openai::{self, Input, Prompt};
use crate::policy::{self, Blend, Candidate, Choice, Grounds, Leave, Refusal, Settings, Turn};
use crate::tokenize::{self, Tokenizer};

/// A rule made ready to route by.
#[derive(Clone, Debug)]
pub struct Service {
    /// What the operator wrote.
    pub rule: Arc<Rule>,
    /// The numbers that a choice obeys, without `min_overlap`.
    pub settings: Settings,
    /// Tokens that must match before the KV tier is used (`LLB_KV_MIN_MATCH_TOKENS`).
    pub min_match_tokens: u32,
}

/// The steps of naming a prompt, in order, as metrics and benches tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The body became a prompt.
    Parse,
    /// The prompt became tokens, and these block names.
    Tokenize,
    /// The names were weighed against inventories and load.
    Choose,
}

impl Step {
    /// Every step, in order.
    pub const ALL: [Self; 3] = [Self::Parse, Self::Tokenize, Self::Choose];

    /// The metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Tokenize => "tokenize",
            Self::Choose => "choose",
        }
    }
}

/// One way of naming blocks, and the endpoints of a rule whose blocks have such names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// The way.
    pub key_space: KeySpace,
    /// The adapter that the request asks for, as these endpoints have it.
    pub lora: Option<Lora>,
    /// Positions of the endpoints.
    pub endpoints: Vec<usize>,
}

/// The block names of one request's prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// The ways of naming that its endpoints need, normally one.
    pub spaces: Vec<Space>,
    /// One entry per prompt that is scored.
    pub prompts: Vec<NamedPrompt>,
}

/// The block names of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedPrompt {
    /// How many tokens it has, also beyond the last full block.
    pub tokens: usize,
    /// For each of [`Named::spaces`] its full blocks, in prompt order.
    pub names: Vec<Vec<BlockHash>>,
}

/// How much of a request's prompts an endpoint holds, in blocks of the rule's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Blocks of the leading run that the engine can use.
    pub depth: u32,
    /// Blocks held at all.
    pub count: u32,
    /// The data-parallel rank that holds them, where the endpoint has several.
    pub rank: Option<i64>,
}

/// What endpoints are and hold at the moment of the choice.
pub trait View {
    /// One candidate per endpoint of the rule, in its order. `eligible` says what condition says; role and the tries of
    /// the request are the router's. `overlap` is left 0.
    fn candidates(&self) -> Vec<Candidate>;

    /// How much of the prompts each endpoint has announced to hold, one entry per endpoint of the rule.
    fn held(&self, named: &Named) -> Vec<Overlap>;

    /// How many leading blocks each endpoint is going to hold because requests that are under way there bring them, one entry
    /// per endpoint.
    fn expected(&self, named: &Named) -> Vec<u32>;

    /// A number that grows by one with every call.
    fn turn(&self) -> u64;

    /// How many requests have been placed by what endpoints announced, with this one; `None` where this one is not counted.
    fn hit(&self) -> Option<u64> {
        None
    }

    /// Blocks that an endpoint holds, where its mirror tells.
    fn inventory(&self, _endpoint: usize) -> Option<u64> {
        None
    }

    /// Position of the endpoint where a conversation was. Who remembers nothing says nothing.
    fn conversation(&self, _key: Key) -> Option<usize> {
        None
    }

    /// Position of the endpoint that decoded for a conversation, where another computed its prompts.
    fn partner(&self, _key: Key) -> Option<usize> {
        None
    }

    /// Position of the endpoint where a session was.
    fn session(&self, _key: Key) -> Option<usize> {
        None
    }

    /// Positions of the endpoints that beginnings of a text were sent to, for each beginning of so many bytes or more, the
    /// longest first, and of each the endpoint that got it last first.
    fn known(&self, _text: &[u8], _least: usize) -> Vec<Vec<usize>> {
        Vec::new()
    }
}

/// Names the blocks of a request's prompts.
///
/// `tokenizer` is the one staged for the request's model, or the reason why there is none; `limits` bound it, and carry
/// the time for templates that write it. `spaces` are the ways of naming that the rule's endpoints need, and `memory` knows
/// what earlier prompts began with. `lap` is told when each step is over.
///
/// # Errors
/// The guard that failed, in the document's order.
pub fn name(
    service: &Service,
    prompt: Result<&Prompt, Miss>,
    tokenizer: Result<&Tokenizer, &'static str>,
    limits: &tokenize::Limits,
    (spaces, memory): (Vec<Space>, &dyn tokenize::Memory),
    lap: &mut dyn FnMut(Step),
) -> Result<Named, Miss> {
    if service.rule.kv.mode == ExactMode::Off {
        return Err(Miss::new(Reason::ModeOff));
    }
    let prompt = prompt?;
    let model_known = prompt.model.is_some() || service.rule.key.model.is_some();
    if !model_known {
        return Err(Miss::new(Reason::ModelEmpty));
    }
    let extra = |space: &Space| Extra { cache_salt: prompt.cache_salt.clone(), lora: space.lora.clone() };
    let (spaces, ways): (Vec<_>, Vec<_>) = match nameable(spaces, extra) {
        Ok(spaces) => spaces.into_iter().unzip(),
        // What is not known of the tokens comes first in the document's order.
        Err(miss) => return tokens(prompt, tokenizer, limits).and(Err(miss)),
    };
    let naming = tokenize::Naming { spaces: &ways, memory };
    let names = |input: &Input| match (input, tokenizer) {
        (Input::Tokens(ids), _) if prompt.options.truncate.is_none() => {
            Ok(tokenize::Names::of_tokens(&ids[..ids.len().min(limits.max_tokens)], &ways)?)
        }
        (input, Ok(tokenizer)) => Ok(tokenizer.names(input, &prompt.options, limits, naming)?),
        (_, Err(detail)) => Err(Miss::because(Reason::Tokenize, detail)),
    };
    let prompts = prompt.inputs.iter().map(names).collect::<Result<Vec<_>, Miss>>()?;
    lap(Step::Tokenize);
    let prompts = prompts.into_iter().map(|of| NamedPrompt { tokens: of.tokens, names: of.names }).collect();
    Ok(Named { spaces, prompts })
}

/// A key space, and what enters names there besides tokens.
type Way = (KeySpace, Extra);

/// The key spaces that have names for such a prompt, each with what enters them.
fn nameable(spaces: Vec<Space>, extra: impl Fn(&Space) -> Extra) -> Result<Vec<(Space, Way)>, Miss> {
    if spaces.is_empty() {
        return Err(Miss::because(Reason::Hashes, "unprovable"));
    }
    let mut failed = None;
    let mut kept = Vec::with_capacity(spaces.len());
    for space in spaces {
        let of_space = (space.key_space, extra(&space));
        match space.key_space.begin(&of_space.1) {
            Ok(_) => kept.push((space, of_space)),
            Err(HashError::Extra(_)) => failed = Some(if space.lora.is_some() { "lora_path" } else { "extra_key" }),
        }
    }
    match failed {
        Some(detail) if kept.is_empty() => Err(Miss::because(Reason::Hashes, detail)),
        _ => Ok(kept),
    }
}

/// The tokens of a request's prompts.
///
/// # Errors
/// The guard `tokenize`, with its detail.
pub fn tokens(
    prompt: &Prompt,
    tokenizer: Result<&Tokenizer, &'static str>,
    limits: &tokenize::Limits,
) -> Result<Vec<Vec<TokenId>>, Miss> {
    let of_input = |input: &Input| match (input, tokenizer) {
        // Token ids that are taken as they are need no tokenizer.
        (Input::Tokens(ids), _) if prompt.options.truncate.is_none() => {
            Ok(ids[..ids.len().min(limits.max_tokens)].to_vec())
        }
        (input, Ok(tokenizer)) => Ok(tokenizer.tokens(input, &prompt.options, limits)?),
        (_, Err(detail)) => Err(Miss::because(Reason::Tokenize, detail)),
    };
    prompt.inputs.iter().map(of_input).collect()
}

/// Chooses an endpoint for one request: where its conversation was, or prompts like its own; else by cache affinity; the
/// rule's own selector on a miss.
///
/// `tried` are the endpoints that this request already failed on.
pub fn route(
    service: &Service,
    named: &Result<Named, Miss>,
    view: &dyn View,
    caller: &Caller,
    tried: &[usize],
) -> Decision {
    let candidates = servants(service, view, Part::Prompt, tried);
    let prompts = shapes(named, service.rule.kv.block_size);
    let named = named.as_ref().map_err(|miss| *miss);
    let held = named.map(|named| view.held(named)).unwrap_or_default();
    let word = if caller.is_known() {
        let blocks = prompts.iter().map(|prompt| prompt.blocks).sum();
        guess(service, view, (caller, tried), &candidates, (&held, blocks))
    } else {
        Word::default()
    };
    let decision = match word.choice {
        Some((endpoint, tier)) if !service.rule.kv.observe => {
            // The KV tier was not asked. A guard that failed before it could be is told all the same.
            let miss = named.err().filter(|miss| miss.reason != Reason::ModeOff);
            let known = there(endpoint, &held);
            let held = held.get(endpoint).map_or(0, |held| measure(service, held));
            let uncached_tokens = named.map_or(0, |named| uncached(service, named, held));
            Decision { tier, uncached_tokens, miss, ..known }
        }
        _ => descend(service, named, view, (caller, tried), &held, candidates, word),
    };
    Decision { left: word.left.map(|(_, leave)| leave), prompts, ..decision }
}

/// Every endpoint, and whether this request may be sent there.
fn servants(service: &Service, view: &dyn View, part: Part, tried: &[usize]) -> Vec<Candidate> {
    let mut candidates = view.candidates();
    let serves = serving_role(&service.rule, part);
    for candidate in &mut candidates {
        let role = service.rule.endpoints.get(candidate.endpoint).map(|endpoint| endpoint.role);
        candidate.eligible &= role.is_some_and(&serves) && !tried.contains(&candidate.endpoint);
    }
    candidates
}

/// Tier 1, for prompts of so many `blocks`. Where the KV tier may not choose, nobody yields to what it knows.
fn guess(
    service: &Service,
    view: &dyn View,
    (caller, tried): (&Caller, &[usize]),
    candidates: &[Candidate],
    (held, blocks): (&[Overlap], usize),
) -> Word {
    let held = if service.rule.kv.observe { &[] } else { held };
    let announced: Vec<u32> = held.iter().map(|held| measure(service, held)).collect();
    let min_overlap = min_overlap(service, blocks);
    let grounds = Grounds { candidates, announced: &announced, min_overlap, tried, settings: &service.settings };
    remembered::word(service, view, caller, &grounds)
}

/// The KV tier, and those who choose where it does not: on a rule that only observes tier 1, if it has a word, else tier 2.
fn descend(
    service: &Service,
    named: Result<&Named, Miss>,
    view: &dyn View,
    (caller, tried): (&Caller, &[usize]),
    held: &[Overlap],
    mut candidates: Vec<Candidate>,
    word: Word,
) -> Decision {
    let decision = match named.and_then(|named| affinity(service, named, view, held, &mut candidates)) {
        Ok(decision) => decision,
        Err(miss) => Decision { miss: Some(miss), ..Decision::default() },
    };
    let observes = service.rule.kv.observe;
    if let Some(endpoint) = decision.endpoint.filter(|_| !observes) {
        let uncached_tokens = candidates.get(endpoint).map_or(0, |candidate| candidate.uncached_tokens);
        return Decision { uncached_tokens, ..decision };
    }
    let by_cost = service.settings.blend == Blend::Cost && named.is_ok() && !observes;
    let chosen = if let Some((endpoint, tier)) = word.choice {
        Decision { tier, ..there(endpoint, held) }
    } else {
        spare_overloaded(word.left, &mut candidates);
        let (endpoint, moved) = if by_cost {
            (policy::cheapest(&candidates).map(|candidate| candidate.endpoint), None)
        } else {
            fallback(service, view, caller, &candidates, tried)
        };
        let known = endpoint.map(|endpoint| there(endpoint, held)).unwrap_or_default();
        Decision { rank: None, moved, ..known }
    };
    let there = chosen.endpoint.and_then(|endpoint| candidates.get(endpoint));
    let chosen = Decision { uncached_tokens: there.map_or(0, |candidate| candidate.uncached_tokens), ..chosen };
    if !observes {
        return Decision {
            endpoint: chosen.endpoint,
            moved: chosen.moved,
            uncached_tokens: chosen.uncached_tokens,
            ..decision
        };
    }
    // A trial: what the tier would choose is told, and others choose.
    let told =
        decision.endpoint.map(|endpoint| Observed { endpoint, depth: decision.depth, expected: decision.expected });
    Decision { observed: told, miss: decision.miss, ..chosen }
}

/// A choice of an endpoint, and what of the prompts it is known to hold.
fn there(endpoint: usize, held: &[Overlap]) -> Decision {
    let held = held.get(endpoint).copied().unwrap_or_default();
    let rank = held.rank.filter(|_| held.depth > 0);
    Decision { endpoint: Some(endpoint), depth: held.depth, count: held.count, rank, ..Decision::default() }
}

/// A selector that knows nothing of load must not give a request back to the endpoint that was left for it.
fn spare_overloaded(left: Option<(usize, Leave)>, candidates: &mut [Candidate]) {
    let Some((overloaded, Leave::Overload)) = left else { return };
    if candidates.iter().any(|c| c.eligible && c.endpoint != overloaded) {
        candidates.iter_mut().filter(|c| c.endpoint == overloaded).for_each(|c| c.eligible = false);
    }
}

/// Tokens of a request's prompts that an endpoint with so many of their blocks has to compute.
pub fn uncached(service: &Service, named: &Named, blocks: u32) -> u64 {
    let size = service.rule.kv.block_size.tokens();
    let tokens: usize = named.prompts.iter().map(|prompt| prompt.tokens).sum();
    // An engine computes the last token of a prompt anew, and with it the block that it is in.
    let most = tokens.saturating_sub(1) / size * size;
    (tokens - (blocks as usize).saturating_mul(size).min(most)) as u64
}

/// Blocks that an endpoint holds, by the rule's measure.
fn measure(service: &Service, held: &Overlap) -> u32 {
    match service.rule.kv.score {
        Score::Prefix => held.depth,
        Score::Count => held.count,
    }
}

/// How long a request's prompts are.
pub fn shapes(named: &Result<Named, Miss>, block_size: BlockSize) -> Vec<PromptShape> {
    let shape =
        |prompt: &NamedPrompt| PromptShape { tokens: prompt.tokens, blocks: prompt.tokens / block_size.tokens() };
    named.as_ref().map(|named| named.prompts.iter().map(shape).collect()).unwrap_or_default()
}

/// Which part of a request an endpoint is chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// Its prompt, and the rest where it is not split.
    #[default]
    Prompt,
    /// What follows the prompt.
    Decode,
    /// All of a request that generates nothing, or that cannot be split: for want of endpoints that compute prompts others do
    /// as well.
    Anything,
}

/// Which roles serve a part: where a rule splits requests, only prefill endpoints compute prompts.
pub fn serving_role(rule: &Rule, part: Part) -> impl Fn(Role) -> bool + use<> {
    let split = rule.endpoints.iter().any(|endpoint| endpoint.role == Role::Prefill);
    move |role| match part {
        _ if !split => true,
        Part::Prompt => role == Role::Prefill,
        Part::Decode => role == Role::Decode,
        Part::Anything => true,
    }
}

/// The endpoint for a decode leg: where its conversation was decoded, else the one with the least load, in turn where loads
/// are equal.
pub fn route_decode(service: &Service, view: &dyn View, caller: &Caller, tried: &[usize]) -> Option<usize> {
    let candidates = servants(service, view, Part::Decode, tried);
    let pinned = caller.conversation.and_then(|key| view.partner(key));
    let grounds =
        Grounds { candidates: &candidates, announced: &[], min_overlap: 1, tried, settings: &service.settings };
    pinned.filter(|endpoint| grounds.allow(*endpoint).is_ok()).or_else(|| least_loaded(view, &candidates))
}

/// The endpoint for a request of a rule that splits, where nobody that computes prompts may be asked: any other, by load.
pub fn route_anywhere(service: &Service, view: &dyn View, tried: &[usize]) -> Option<usize> {
    least_loaded(view, &servants(service, view, Part::Anything, tried))
}

/// What the KV tier chooses, given what each endpoint holds; the prompts' shapes are left to the caller.
fn affinity(
    service: &Service,
    named: &Named,
    view: &dyn View,
    held: &[Overlap],
    candidates: &mut [Candidate],
) -> Result<Decision, Miss> {
    let announced = |endpoint: usize| held.get(endpoint).map_or(0, |held| measure(service, held));
    let expected = view.expected(named);
    let size = service.rule.kv.block_size.tokens();
    let blocks: usize = named.prompts.iter().map(|prompt| prompt.tokens / size).sum();
    for candidate in &mut *candidates {
        let coming = expected.get(candidate.endpoint).copied().unwrap_or_default();
        candidate.overlap = announced(candidate.endpoint).max(coming);
        candidate.uncached_tokens = uncached(service, named, candidate.overlap);
    }
    let longest = named.prompts.iter().map(|prompt| prompt.tokens).max().unwrap_or_default();
    let too_short = longest < service.min_match_tokens as usize;
    let min_overlap = min_overlap(service, blocks);
    let choice =
        policy::choose(candidates, &Settings { min_overlap, ..service.settings }).map_err(|refusal| match refusal {
            Refusal::NoWorker if too_short => Miss::because(Reason::Shallow, "prompt"),
            Refusal::NoWorker => Miss::new(Reason::NoWorker),
            Refusal::Excluded => Miss::new(Reason::Excluded),
            Refusal::Shallow => Miss::because(Reason::Shallow, "match"),
        })?;
    if too_short {
        return Err(Miss::because(Reason::Shallow, "prompt"));
    }
    // A hit is what was announced. Blocks that are only on their way steer the choice and are no hit: else names that never
    // agree would look healthy in every burst.
    let somewhere = candidates.iter().filter(|c| c.eligible).map(|c| announced(c.endpoint)).max().unwrap_or_default();
    let expected =
        announced(choice.endpoint) < min_overlap && (choice.overlap >= min_overlap || somewhere < min_overlap);
    let seed = if expected || service.rule.kv.observe { None } else { cold_seed(service, view, candidates, choice) };
    let endpoint = seed.unwrap_or(choice.endpoint);
    let overlap = held.get(endpoint).copied().unwrap_or_default();
    Ok(Decision {
        endpoint: Some(endpoint),
        tier: Tier::Overlap,
        depth: overlap.depth,
        count: overlap.count,
        rank: overlap.rank,
        spill: choice.spill && seed.is_none(),
        seeded: seed.is_some(),
        expected,
        miss: expected.then_some(Miss::because(Reason::NoWorker, "expected")),
        ..Decision::default()
    })
}

/// The cold endpoint that gets this hit instead, where it is one's turn.
fn cold_seed(service: &Service, view: &dyn View, candidates: &mut [Candidate], choice: Choice) -> Option<usize> {
    let settings = &service.settings;
    let hit = view.hit()?;
    if settings.seed_every == 0 || !hit.is_multiple_of(settings.seed_every.into()) {
        return None;
    }
    for candidate in &mut *candidates {
        candidate.inventory = view.inventory(candidate.endpoint);
    }
    policy::cold_seed(candidates, settings, choice.endpoint, hit)
}

/// Blocks that must match: as many as hold `min_match_tokens`, though never more than the prompts have.
fn min_overlap(service: &Service, blocks: usize) -> u32 {
    let wanted = service.min_match_tokens.div_ceil(service.rule.kv.block_size.get());
    wanted.min(u32::try_from(blocks).unwrap_or(u32::MAX)).max(1)
}

/// Tier 2, and why a session that the selector keeps moved. A split rule asks the least loaded prefill endpoint, in turn where
/// loads are equal; a pool asks its selector.
fn fallback(
    service: &Service,
    view: &dyn View,
    caller: &Caller,
    candidates: &[Candidate],
    tried: &[usize],
) -> (Option<usize>, Option<Leave>) {
    if service.rule.is_split() {
        return (least_loaded(view, candidates), None);
    }
    let mut moved = None;
    if let Some(endpoint) = caller.session.and_then(|key| view.session(key)) {
        if candidates.iter().any(|c| c.eligible && c.endpoint == endpoint) {
            return (Some(endpoint), None);
        }
        moved = Some(if tried.contains(&endpoint) { Leave::Tried } else { Leave::Out });
    }
    // To selectors a session is what a client is: somebody with an address.
    let turn = Turn {
        number: view.turn(),
        client: caller.session.map(|key| IpAddr::V6(Ipv6Addr::from_bits(key.0))).or(caller.client),
        prefix: caller.prefix,
        load_factor: service.rule.hash_load_factor,
    };
    (policy::select(service.rule.selector, candidates, turn), moved)
}

/// The least load; of equals the one that has waited longest for a request. Turns alone would not do: both legs of a request
/// take one, so that of two endpoints each leg would always find the same one.
fn least_loaded(view: &dyn View, candidates: &[Candidate]) -> Option<usize> {
    let turn = Turn { number: view.turn(), ..Turn::default() };
    let rank = |c: &Candidate| (c.load, c.last_chosen);
    let least = candidates.iter().filter(|c| c.eligible).map(rank).min()?;
    let mut idlest = candidates.to_vec();
    for candidate in &mut idlest {
        candidate.eligible &= rank(candidate) == least;
    }
    policy::select(Selector::RoundRobin, &idlest, turn)
}

impl From<tokenize::Miss> for Miss {
    fn from(miss: tokenize::Miss) -> Self {
        Self::because(Reason::Tokenize, miss.detail())
    }
}

impl From<tokenize::NameError> for Miss {
    fn from(error: tokenize::NameError) -> Self {
        match error {
            tokenize::NameError::Tokens(miss) => miss.into(),
            tokenize::NameError::Hash(_) => Self::because(Reason::Hashes, "extra_key"),
        }
    }
}

impl From<HashError> for Miss {
    fn from(_: HashError) -> Self {
        Self::because(Reason::Hashes, "extra_key")
    }
}

impl From<&openai::Miss> for Miss {
    fn from(miss: &openai::Miss) -> Self {
        let reason = match miss.reason() {
            "text_empty" => Reason::TextEmpty,
            "model_empty" => Reason::ModelEmpty,
            _ => Reason::Tokenize,
        };
        Self::because(reason, miss.detail())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::contract::{Hasher, KeyEra, NoneSeed};
    use crate::fleet::fixtures::{endpoint, rule};
    use crate::fleet::{Pinning, TrieRule};
    use crate::openai::Request;

    /// Remembers nothing.
    struct Forgetful;

    impl tokenize::Memory for Forgetful {
        fn shape(&self, _key: u128) -> Option<Arc<tokenize::Shape>> {
            None
        }
        fn keep_shape(&self, _key: u128, _shape: Arc<tokenize::Shape>) {}
        fn seed(&self) -> u64 {
            0
        }

        fn recall(&self, _: u128) -> Option<Arc<tokenize::Link>> {
            None
        }

        fn keep(&self, _: u128, _: Arc<tokenize::Link>) {}
    }

    /// Endpoints as sets of names, without metrics, locks or sockets.
    #[derive(Default)]
    struct Fleet {
        held: Vec<BTreeSet<BlockHash>>,
        load: Vec<u32>,
        coming: Vec<u32>,
        out: Vec<usize>,
        turns: AtomicU64,
        /// Where every conversation, and every session, was.
        conversation: Option<usize>,
        session: Option<usize>,
        /// Who was sent beginnings of every text, and how long these are.
        texts: Vec<(usize, Vec<usize>)>,
    }

    impl View for Fleet {
        fn candidates(&self) -> Vec<Candidate> {
            let candidate = |endpoint: usize| Candidate {
                endpoint,
                eligible: !self.out.contains(&endpoint),
                load: self.load.get(endpoint).copied().unwrap_or_default(),
                capacity: 1,
                ..Candidate::default()
            };
            (0..self.held.len()).map(candidate).collect()
        }

        fn held(&self, named: &Named) -> Vec<Overlap> {
            let mut overlaps = vec![Overlap::default(); self.held.len()];
            for names in named.prompts.iter().map(|prompt| &prompt.names[0]) {
                for (overlap, held) in overlaps.iter_mut().zip(&self.held) {
                    let run = names.iter().take_while(|name| held.contains(name)).count();
                    overlap.depth += u32::try_from(run).unwrap();
                    overlap.count += u32::try_from(names.iter().filter(|name| held.contains(name)).count()).unwrap();
                }
            }
            overlaps
        }

        fn expected(&self, _: &Named) -> Vec<u32> {
            self.coming.clone()
        }

        fn turn(&self) -> u64 {
            self.turns.fetch_add(1, Ordering::Relaxed)
        }

        fn conversation(&self, _: Key) -> Option<usize> {
            self.conversation
        }

        fn session(&self, _: Key) -> Option<usize> {
            self.session
        }

        fn known(&self, _: &[u8], least: usize) -> Vec<Vec<usize>> {
            let known = self.texts.iter().filter(|(matched, _)| *matched >= least);
            known.map(|(_, endpoints)| endpoints.clone()).collect()
        }
    }

    /// Who belongs to a conversation.
    fn talker() -> Caller {
        Caller { conversation: Some(Key(1)), ..Caller::default() }
    }

    fn service(mode: ExactMode, roles: &[Role]) -> Service {
        let mut rule = rule();
        rule.kv.mode = mode;
        rule.endpoints = roles.iter().zip(1..).map(|(role, octet)| endpoint(octet, *role)).collect();
        Service { rule: Arc::new(rule), settings: Settings::default(), min_match_tokens: 16 }
    }

    /// How the rule says that blocks are named.
    fn key_space(service: &Service, era: KeyEra) -> KeySpace {
        let kv = &service.rule.kv;
        Hasher::new(kv.algo, &NoneSeed::Text("0".to_owned()), kv.block_size).key_space(era)
    }

    /// All endpoints name blocks as the rule says.
    fn spaces(service: &Service) -> Vec<Space> {
        let endpoints = (0..service.rule.endpoints.len()).collect();
        vec![Space { key_space: key_space(service, KeyEra::Tagged), lora: None, endpoints }]
    }

    fn pool(endpoints: usize) -> (Service, Fleet) {
        let fleet = Fleet { held: vec![BTreeSet::new(); endpoints], ..Fleet::default() };
        (service(ExactMode::SinglePool, &vec![Role::Any; endpoints]), fleet)
    }

    /// A prompt of these token ids; no tokenizer is needed for them.
    fn named(service: &Service, ids: &[u32]) -> Result<Named, Miss> {
        let body = serde_json::json!({"model": "m", "prompt": ids}).to_string();
        ask(service, body.as_bytes())
    }

    fn ask(service: &Service, body: &[u8]) -> Result<Named, Miss> {
        ask_in(service, spaces(service), body)
    }

    fn ask_in(service: &Service, spaces: Vec<Space>, body: &[u8]) -> Result<Named, Miss> {
        let request = Request { method: "POST", path: "/v1/completions", model_header: None, body };
        let prompt = openai::parse(&request).map_err(|miss| Miss::from(&miss));
        let limits = tokenize::Limits::default();
        name(
            service,
            prompt.as_ref().map_err(|miss| *miss),
            Err("not_staged"),
            &limits,
            (spaces, &Forgetful),
            &mut |_| (),
        )
    }

    fn ids(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    fn preamble_and(question: std::ops::Range<u32>) -> Vec<u32> {
        ids(1..33).into_iter().chain(question).collect()
    }

    #[test]
    fn the_documents_worked_example_two_to_zero() {
        // Two endpoints that compute prompts and one that does not, blocks of 16, a shared preamble of exactly 32 tokens.
        let service = service(ExactMode::PrefillDecode, &[Role::Prefill, Role::Decode, Role::Prefill]);
        let mut fleet = Fleet { held: vec![BTreeSet::new(); 3], ..Fleet::default() };
        let prompt_a = named(&service, &preamble_and(1000..1008));
        let size = BlockSize::new(16).unwrap();
        let shape = |named: &Result<Named, Miss>| (shapes(named, size)[0].tokens, shapes(named, size)[0].blocks);
        assert_eq!(shape(&prompt_a), (40, 2));
        let cold = route(&service, &prompt_a, &fleet, &Caller::default(), &[]);
        assert_eq!((cold.endpoint, cold.tier, cold.miss), (Some(0), Tier::Selector, Some(Miss::new(Reason::NoWorker))));
        fleet.held[0].extend(&prompt_a.unwrap().prompts[0].names[0]);
        let prompt_b = named(&service, &preamble_and(2000..2006));
        assert_eq!(shape(&prompt_b), (38, 2));
        let warm = route(&service, &prompt_b, &fleet, &Caller::default(), &[]);
        assert_eq!((warm.endpoint, warm.tier, warm.depth, warm.count), (Some(0), Tier::Overlap, 2, 2));
        // The coda: the owner refuses, and nobody else holds anything; the fallback stays among prefill endpoints.
        let again = route(&service, &prompt_b, &fleet, &Caller::default(), &[0]);
        assert_eq!((again.endpoint, again.miss), (Some(2), Some(Miss::new(Reason::Excluded))));
        // With a second holder the second-best overlap wins.
        let first_block = named(&service, &ids(1..17)).unwrap().prompts[0].names[0].clone();
        fleet.held[2].extend(&first_block);
        let second = route(&service, &prompt_b, &fleet, &Caller::default(), &[0]);
        assert_eq!((second.endpoint, second.tier, second.depth), (Some(2), Tier::Overlap, 1));
    }

    #[test]
    fn each_guard_has_its_reason() {
        let (mut service, fleet) = pool(2);
        let why = |service: &Service, body: &[u8]| ask(service, body).err().map(|miss| miss.reason);
        assert_eq!(why(&service, b"not json"), Some(Reason::ModelEmpty));
        assert_eq!(why(&service, br#"{"model":"m"}"#), Some(Reason::TextEmpty));
        assert_eq!(why(&service, br#"{"prompt":[1,2,3]}"#), Some(Reason::ModelEmpty));
        assert_eq!(why(&service, br#"{"model":"m","prompt":"text"}"#), Some(Reason::Tokenize));
        let cold = route(&service, &named(&service, &ids(0..32)), &fleet, &Caller::default(), &[]);
        assert_eq!(cold.miss, Some(Miss::new(Reason::NoWorker)));
        let short = route(&service, &named(&service, &ids(0..15)), &fleet, &Caller::default(), &[]);
        assert_eq!(short.miss, Some(Miss::because(Reason::Shallow, "prompt")));
        let mut off = rule();
        off.kv.mode = ExactMode::Off;
        service.rule = Arc::new(off);
        assert_eq!(why(&service, br#"{"model":"m","prompt":[1]}"#), Some(Reason::ModeOff));
        service.rule = Arc::new(rule());
        let unprovable = ask_in(&service, Vec::new(), br#"{"model":"m","prompt":[1]}"#);
        assert_eq!(unprovable, Err(Miss::because(Reason::Hashes, "unprovable")));
    }

    #[test]
    fn a_match_below_the_minimum_is_shallow_but_a_prompt_of_one_block_goes_back_to_its_holder() {
        let (mut service, mut fleet) = pool(2);
        service.min_match_tokens = 40;
        let prompt = named(&service, &ids(0..64));
        fleet.held[1].extend(&prompt.as_ref().unwrap().prompts[0].names[0][..2]);
        let shallow = route(&service, &prompt, &fleet, &Caller::default(), &[]);
        assert_eq!(shallow.miss, Some(Miss::because(Reason::Shallow, "match")));
        fleet.held[1].extend(&prompt.as_ref().unwrap().prompts[0].names[0][..3]);
        assert_eq!(route(&service, &prompt, &fleet, &Caller::default(), &[]).endpoint, Some(1));
        service.min_match_tokens = 16;
        let one_block = named(&service, &ids(500..516));
        fleet.held[1].extend(&one_block.as_ref().unwrap().prompts[0].names[0]);
        let back = route(&service, &one_block, &fleet, &Caller::default(), &[]);
        assert_eq!((back.endpoint, back.tier, back.depth), (Some(1), Tier::Overlap, 1));
    }

    #[test]
    fn prefix_believes_the_leading_run_and_count_believes_the_number() {
        let (mut service, mut fleet) = pool(2);
        service.settings.blend = Blend::Off;
        let prompt = named(&service, &ids(0..160));
        let names = prompt.as_ref().unwrap().prompts[0].names[0].clone();
        fleet.held[0].extend(&names[4..]);
        fleet.held[1].extend(&names[..3]);
        assert_eq!(route(&service, &prompt, &fleet, &Caller::default(), &[]).endpoint, Some(1));
        let mut counting = rule();
        counting.kv.score = Score::Count;
        counting.endpoints.clone_from(&service.rule.endpoints);
        service.rule = Arc::new(counting);
        assert_eq!(route(&service, &prompt, &fleet, &Caller::default(), &[]).endpoint, Some(0));
    }

    #[test]
    fn a_batch_goes_where_most_of_all_its_prompts_is() {
        let (service, mut fleet) = pool(2);
        let body = serde_json::json!({"model": "m", "prompt": [ids(0..32), ids(100..164)]}).to_string();
        let batch = ask(&service, body.as_bytes());
        let prompts = &batch.as_ref().unwrap().prompts;
        fleet.held[0].extend(&prompts[0].names[0]);
        fleet.held[1].extend(&prompts[1].names[0]);
        let decision = route(&service, &batch, &fleet, &Caller::default(), &[]);
        assert_eq!((decision.endpoint, decision.depth), (Some(1), 4));
    }

    #[test]
    fn a_prompt_follows_one_like_it_that_is_under_way_and_that_is_no_hit() {
        let (service, mut fleet) = pool(3);
        fleet.coming = vec![0, 0, 2];
        let prompt = named(&service, &ids(0..64));
        let follows = route(&service, &prompt, &fleet, &Caller::default(), &[]);
        assert_eq!(
            (follows.endpoint, follows.tier, follows.depth, follows.expected),
            (Some(2), Tier::Overlap, 0, true)
        );
        assert_eq!(follows.miss.map(|miss| miss.reason), Some(Reason::NoWorker));
        fleet.held[2].extend(&prompt.as_ref().unwrap().prompts[0].names[0][..1]);
        let hit = route(&service, &prompt, &fleet, &Caller::default(), &[]);
        assert_eq!((hit.endpoint, hit.depth, hit.expected, hit.miss), (Some(2), 1, false, None));
        fleet.held[0].extend(&prompt.as_ref().unwrap().prompts[0].names[0][..3]);
        assert_eq!(
            route(&service, &prompt, &fleet, &Caller::default(), &[]).endpoint,
            Some(0),
            "three announced beat two expected"
        );
    }

    #[test]
    fn a_rule_that_observes_tells_what_the_tier_would_choose_and_lets_the_selector_choose() {
        let (mut service, mut fleet) = pool(2);
        let prompt = named(&service, &ids(0..64));
        fleet.held[1].extend(&prompt.as_ref().unwrap().prompts[0].names[0]);
        let mut observing = (*service.rule).clone();
        observing.kv.observe = true;
        service.rule = Arc::new(observing);
        let chosen: Vec<_> = (0..4).map(|_| route(&service, &prompt, &fleet, &Caller::default(), &[])).collect();
        assert_eq!(chosen.iter().map(|d| d.endpoint).collect::<Vec<_>>(), [Some(0), Some(1), Some(0), Some(1)]);
        let would = Observed { endpoint: 1, depth: 4, expected: false };
        assert!(chosen.iter().all(|d| d.tier == Tier::Selector && d.observed == Some(would)));
        assert_eq!((chosen[0].depth, chosen[1].depth), (0, 4));
    }

    #[test]
    fn a_conversation_goes_where_it_was_unless_much_more_is_known_elsewhere() {
        let (service, mut fleet) = pool(3);
        fleet.conversation = Some(1);
        let prompt = named(&service, &ids(0..160));
        let names = prompt.as_ref().unwrap().prompts[0].names[0].clone();
        fleet.held[1].extend(&names[..1]);
        fleet.held[2].extend(&names[..9]);
        let stays = route(&service, &prompt, &fleet, &talker(), &[]);
        assert_eq!((stays.endpoint, stays.tier, stays.depth, stays.miss), (Some(1), Tier::Conversation, 1, None));
        assert_eq!(stays.prompts.len(), 1, "the prompt is told all the same");
        fleet.held[2].extend(&names[9..]);
        let yields = route(&service, &prompt, &fleet, &talker(), &[]);
        assert_eq!((yields.endpoint, yields.tier, yields.left), (Some(2), Tier::Overlap, Some(Leave::Deeper)));
        let nobody = route(&service, &prompt, &fleet, &Caller::default(), &[]);
        assert_eq!((nobody.endpoint, nobody.left), (Some(2), None));
    }

    #[test]
    fn a_conversation_whose_endpoint_is_out_or_over_its_bound_goes_on_down_the_ladder() {
        let (service, mut fleet) = pool(3);
        fleet.conversation = Some(0);
        let miss: Result<Named, Miss> = Err(Miss::new(Reason::ModeOff));
        let tried = route(&service, &miss, &fleet, &talker(), &[0]);
        assert_eq!((tried.endpoint, tried.tier, tried.left), (Some(1), Tier::Selector, Some(Leave::Tried)));
        fleet.load = vec![4, 4, 0];
        let over: Vec<_> = (0..3).map(|_| route(&service, &miss, &fleet, &talker(), &[])).collect();
        assert!(over.iter().all(|d| d.left.is_none()), "ceil(1.75 * 9 / 3) = 6");
        fleet.load = vec![9, 0, 0];
        let over: Vec<_> = (0..4).map(|_| route(&service, &miss, &fleet, &talker(), &[])).collect();
        assert!(over.iter().all(|d| d.left == Some(Leave::Overload) && d.endpoint != Some(0)), "{over:?}");
        fleet.out = vec![1, 2];
        assert_eq!(route(&service, &miss, &fleet, &talker(), &[]).endpoint, Some(0), "nobody else is there");
    }

    #[test]
    fn texts_have_a_word_from_their_threshold_on_while_loads_are_even() {
        let (mut service, mut fleet) = pool(3);
        let mut remembering = (*service.rule).clone();
        let trie = TrieRule { threshold: 50, balance: 3 };
        remembering.pinning = Pinning { trie: Some(trie), ..Pinning::default() };
        service.rule = Arc::new(remembering);
        let body = br#"{"model": "m", "prompt": "ten bytes."}"#;
        let prompt = openai::parse(&Request { method: "POST", path: "/v1/completions", model_header: None, body });
        let text = crate::router::Text::of(&prompt.unwrap());
        let marked = text.bytes().len() - 10;
        let caller = Caller { text: Some(text), ..Caller::default() };
        let miss: Result<Named, Miss> = Err(Miss::new(Reason::ModeOff));
        fleet.texts = vec![(marked + 4, vec![2])];
        assert_eq!(route(&service, &miss, &fleet, &caller, &[]).tier, Tier::Selector);
        fleet.texts = vec![(marked + 5, vec![2])];
        let known = route(&service, &miss, &fleet, &caller, &[]);
        assert_eq!((known.endpoint, known.tier), (Some(2), Tier::Trie));
        fleet.load = vec![0, 0, 3];
        assert_eq!(route(&service, &miss, &fleet, &caller, &[]).tier, Tier::Trie);
        fleet.load = vec![0, 0, 4];
        assert_eq!(route(&service, &miss, &fleet, &caller, &[]).tier, Tier::Selector);
        fleet.load = vec![0, 0, 0];
        fleet.texts = vec![(marked + 9, vec![2]), (marked + 6, vec![1])];
        let next = route(&service, &miss, &fleet, &caller, &[2]);
        assert_eq!((next.endpoint, next.tier), (Some(1), Tier::Trie), "the shorter one serves where the longer cannot");
        fleet.conversation = Some(0);
        let both = Caller { conversation: Some(Key(1)), ..caller };
        assert_eq!(route(&service, &miss, &fleet, &both, &[]).tier, Tier::Conversation);
    }

    #[test]
    fn a_selector_keeps_its_session_while_its_endpoint_may_be_asked() {
        let (service, mut fleet) = pool(3);
        fleet.session = Some(2);
        let caller = Caller { session: Some(Key(9)), ..Caller::default() };
        let miss: Result<Named, Miss> = Err(Miss::new(Reason::ModeOff));
        fleet.load = vec![0, 0, 90];
        let kept = route(&service, &miss, &fleet, &caller, &[]);
        assert_eq!((kept.endpoint, kept.tier, kept.moved), (Some(2), Tier::Selector, None));
        fleet.out = vec![2];
        let moved = route(&service, &miss, &fleet, &caller, &[]);
        assert_eq!((moved.endpoint, moved.moved), (Some(0), Some(Leave::Out)));
    }

    #[test]
    fn a_rule_that_observes_goes_by_the_conversation_and_never_by_blocks() {
        let (mut service, mut fleet) = pool(2);
        let prompt = named(&service, &ids(0..320));
        fleet.held[1].extend(&prompt.as_ref().unwrap().prompts[0].names[0]);
        let mut observing = (*service.rule).clone();
        observing.kv.observe = true;
        service.rule = Arc::new(observing);
        fleet.conversation = Some(0);
        let chosen = route(&service, &prompt, &fleet, &talker(), &[]);
        assert_eq!((chosen.endpoint, chosen.tier, chosen.left), (Some(0), Tier::Conversation, None));
        assert_eq!(chosen.observed.map(|observed| observed.endpoint), Some(1));
    }

    #[test]
    fn a_way_of_naming_without_names_for_a_prompt_leaves_the_others() {
        let (service, _) = pool(2);
        let lora = Some(Lora { name: "a".to_owned(), path: None, number: None });
        let tagged = key_space(&service, KeyEra::Tagged);
        let untagged = key_space(&service, KeyEra::Untagged);
        let space = |key_space, endpoint| Space { key_space, lora: lora.clone(), endpoints: vec![endpoint] };
        let body = serde_json::json!({"model": "a", "prompt": ids(0..32)}).to_string();
        let ask = |spaces| ask_in(&service, spaces, body.as_bytes());
        let some = ask(vec![space(tagged, 0), space(untagged, 1)]).unwrap();
        assert_eq!(some.spaces.iter().map(|space| space.endpoints.clone()).collect::<Vec<_>>(), [[1]]);
        assert_eq!(some.prompts[0].names.len(), 1);
        assert_eq!(ask(vec![space(tagged, 0)]), Err(Miss::because(Reason::Hashes, "lora_path")));
    }

    #[test]
    fn with_nobody_left_there_is_no_endpoint() {
        let (service, fleet) = pool(2);
        let decision = route(&service, &named(&service, &ids(0..32)), &fleet, &Caller::default(), &[0, 1]);
        assert_eq!(decision.endpoint, None);
    }

    #[test]
    fn a_split_rule_falls_back_to_the_least_loaded_prefill_endpoint_in_turn() {
        let service = service(ExactMode::PrefillDecode, &[Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode]);
        let fleet = Fleet { held: vec![BTreeSet::new(); 4], load: vec![1, 3, 1, 0], ..Fleet::default() };
        let got: Vec<_> = (0..4)
            .map(|n| {
                route(&service, &named(&service, &ids(n * 100..n * 100 + 32)), &fleet, &Caller::default(), &[]).endpoint
            })
            .collect();
        assert_eq!(got, [Some(0), Some(2), Some(0), Some(2)]);
    }

    #[test]
    fn a_salt_keeps_equal_prompts_apart() {
        let (service, _) = pool(1);
        let with = |salt: &str| {
            let body = serde_json::json!({"model": "m", "prompt": ids(0..32), "cache_salt": salt}).to_string();
            ask(&service, body.as_bytes()).unwrap().prompts[0].names[0].clone()
        };
        assert_ne!(with("a"), with("b"));
        assert_eq!(with(""), named(&service, &ids(0..32)).unwrap().prompts[0].names[0]);
    }
}
