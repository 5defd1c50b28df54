//! The guard ladder: each step one guard, each guard one reason.

use std::net::IpAddr;
use std::sync::Arc;

use super::decision::{Decision, Miss, PromptShape, Reason, Tier};
use crate::contract::{BlockHash, Extra, Hasher, KeyEra, TokenId};
use crate::fleet::{ExactMode, Role, Rule, Score, Selector};
use crate::openai::{self, Prompt};
use crate::policy::{self, Candidate, Refusal, Settings, Turn};
use crate::tokenize::Tokenizer;

/// A rule made ready to route by.
#[derive(Clone, Debug)]
pub struct Service {
    /// What the operator wrote.
    pub rule: Arc<Rule>,
    /// Names blocks as the rule's contract says.
    pub hasher: Arc<Hasher>,
    /// The numbers that a choice obeys, without `min_overlap`.
    pub settings: Settings,
    /// Tokens that must match before the KV tier is used (`LLB_KV_MIN_MATCH_TOKENS`).
    pub min_match_tokens: u32,
    /// At most this many tokens of a prompt are named.
    pub max_tokens: usize,
}

/// The steps of naming a prompt, in order, as metrics and benches tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The body became a prompt.
    Parse,
    /// The prompt became tokens.
    Tokenize,
    /// The tokens became block names.
    Hash,
    /// The names were weighed against inventories and load.
    Choose,
}

impl Step {
    /// Every step, in order.
    pub const ALL: [Self; 4] = [Self::Parse, Self::Tokenize, Self::Hash, Self::Choose];

    /// The metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Tokenize => "tokenize",
            Self::Hash => "hash",
            Self::Choose => "choose",
        }
    }
}

/// The block names of one request's prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// One entry per prompt that is scored.
    pub prompts: Vec<NamedPrompt>,
}

/// The block names of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedPrompt {
    /// Its tokens, also those beyond the last full block.
    pub token_ids: Vec<TokenId>,
    /// Its full blocks, in prompt order.
    pub names: Vec<BlockHash>,
}

/// How much of one prompt an endpoint holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Blocks of the leading run that the engine can use.
    pub depth: u32,
    /// Blocks held at all.
    pub count: u32,
}

/// What endpoints are and hold at the moment of the choice.
pub trait View {
    /// One candidate per endpoint of the rule, in its order. `eligible` says what condition says; role and the tries of
    /// the request are the router's. `overlap` is left 0.
    fn candidates(&self) -> Vec<Candidate>;

    /// Adds to `overlaps`, one entry per endpoint, how much of a prompt with these block names each one holds.
    fn overlaps(&self, names: &[BlockHash], overlaps: &mut [Overlap]);

    /// A number that grows by one with every call.
    fn turn(&self) -> u64;
}

/// Names the blocks of a request's prompts.
///
/// `tokenizer` is the one staged for the request's model, or the reason why there is none. `lap` is told when each step
/// is over.
///
/// # Errors
/// The guard that failed, in the document's order.
pub fn name(
    service: &Service,
    prompt: Result<&Prompt, Miss>,
    tokenizer: Result<&Tokenizer, &'static str>,
    era: KeyEra,
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
    let mut tokens = Vec::with_capacity(prompt.inputs.len());
    for input in &prompt.inputs {
        tokens.push(match (input, tokenizer) {
            (openai::Input::Tokens(ids), _) if prompt.options.keeps_all() => ids.clone(),
            (input, Ok(tokenizer)) => {
                tokenizer.tokens(input, &prompt.options, service.max_tokens).map_err(|miss| Miss::from(&miss))?
            }
            (_, Err(detail)) => return Err(Miss::because(Reason::Tokenize, detail)),
        });
    }
    lap(Step::Tokenize);
    if !service.hasher.provable() {
        return Err(Miss::because(Reason::Hashes, "unprovable"));
    }
    let extra = extra(prompt);
    let mut named = Named::default();
    for tokens in tokens {
        let names = service
            .hasher
            .block_hashes(&tokens[..tokens.len().min(service.max_tokens)], &extra, era)
            .map_err(|_error| Miss::because(Reason::Hashes, "extra_key"))?;
        named.prompts.push(NamedPrompt { token_ids: tokens, names });
    }
    lap(Step::Hash);
    Ok(named)
}

/// What else than its tokens enters the names of a prompt's blocks.
pub fn extra(prompt: &Prompt) -> Extra {
    Extra { cache_salt: prompt.cache_salt.clone(), ..Extra::default() }
}

/// Chooses an endpoint for one request: cache affinity first, the rule's own selector on a miss.
///
/// `tried` are the endpoints that this request already failed on.
pub fn route(
    service: &Service,
    named: &Result<Named, Miss>,
    view: &dyn View,
    client: Option<IpAddr>,
    tried: &[usize],
) -> Decision {
    let mut candidates = view.candidates();
    let serves = serving_role(&service.rule);
    for candidate in &mut candidates {
        let role = service.rule.endpoints.get(candidate.endpoint).map(|endpoint| endpoint.role);
        candidate.eligible &= role.is_some_and(serves) && !tried.contains(&candidate.endpoint);
    }
    let prompts = shapes(named);
    match affinity(service, named, view, &mut candidates) {
        Ok((choice, held)) => Decision {
            endpoint: Some(choice.endpoint),
            tier: Tier::Overlap,
            depth: held.depth,
            count: held.count,
            spill: choice.spill,
            miss: None,
            prompts,
        },
        Err(miss) => {
            Decision { endpoint: fallback(service, view, client, &candidates), miss: Some(miss), ..nobody(prompts) }
        }
    }
}

fn nobody(prompts: Vec<PromptShape>) -> Decision {
    Decision { endpoint: None, tier: Tier::Selector, depth: 0, count: 0, spill: false, miss: None, prompts }
}

fn shapes(named: &Result<Named, Miss>) -> Vec<PromptShape> {
    let shape = |prompt: &NamedPrompt| PromptShape { tokens: prompt.token_ids.len(), blocks: prompt.names.len() };
    named.as_ref().map(|named| named.prompts.iter().map(shape).collect()).unwrap_or_default()
}

/// Which roles may be asked first: where a rule has prefill endpoints, only those compute prompts.
fn serving_role(rule: &Rule) -> impl Fn(Role) -> bool {
    let split = rule.endpoints.iter().any(|endpoint| endpoint.role == Role::Prefill);
    move |role| if split { role == Role::Prefill } else { true }
}

fn affinity(
    service: &Service,
    named: &Result<Named, Miss>,
    view: &dyn View,
    candidates: &mut [Candidate],
) -> Result<(policy::Choice, Overlap), Miss> {
    let named = named.as_ref().map_err(|miss| *miss)?;
    let held = weigh(service.rule.kv.score, named, view, candidates);
    let blocks: usize = named.prompts.iter().map(|prompt| prompt.names.len()).sum();
    let longest = named.prompts.iter().map(|prompt| prompt.token_ids.len()).max().unwrap_or_default();
    let too_short = longest < service.min_match_tokens as usize;
    let min_overlap = min_overlap(service, blocks);
    let choice = policy::choose(candidates, &Settings { min_overlap, ..service.settings }).map_err(|refusal| {
        match refusal {
            Refusal::NoWorker if too_short => Miss::because(Reason::Shallow, "prompt"),
            Refusal::NoWorker => Miss::new(Reason::NoWorker),
            Refusal::Excluded => Miss::new(Reason::Excluded),
            Refusal::Shallow => Miss::because(Reason::Shallow, "match"),
        }
    })?;
    if too_short {
        return Err(Miss::because(Reason::Shallow, "prompt"));
    }
    Ok((choice, held.get(choice.endpoint).copied().unwrap_or_default()))
}

/// Fills in each candidate's overlap; returns what each endpoint holds, by position.
fn weigh(score: Score, named: &Named, view: &dyn View, candidates: &mut [Candidate]) -> Vec<Overlap> {
    let mut held = vec![Overlap::default(); candidates.len()];
    for prompt in &named.prompts {
        view.overlaps(&prompt.names, &mut held);
    }
    for candidate in candidates {
        if let Some(held) = held.get(candidate.endpoint) {
            candidate.overlap = match score {
                Score::Prefix => held.depth,
                Score::Count => held.count,
            };
        }
    }
    held
}

/// Blocks that must match: as many as hold `min_match_tokens`, though never more than the prompts have.
fn min_overlap(service: &Service, blocks: usize) -> u32 {
    let wanted = service.min_match_tokens.div_ceil(service.rule.kv.block_size.get());
    wanted.min(u32::try_from(blocks).unwrap_or(u32::MAX)).max(1)
}

/// Tier 2. A split rule asks the least loaded prefill endpoint, in turn where loads are equal; a pool asks its selector.
fn fallback(
    service: &Service,
    view: &dyn View,
    client: Option<IpAddr>,
    candidates: &[Candidate],
) -> Option<usize> {
    let turn = Turn { number: view.turn(), client };
    if service.rule.kv.mode != ExactMode::PrefillDecode {
        return policy::select(service.rule.selector, candidates, turn);
    }
    let least = candidates.iter().filter(|c| c.eligible).map(|c| c.load).min()?;
    let mut idlest = candidates.to_vec();
    idlest.iter_mut().for_each(|c| c.eligible &= c.load == least);
    policy::select(Selector::RoundRobin, &idlest, turn)
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
