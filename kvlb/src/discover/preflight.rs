//! The document's preflight: what each engine says and announces, leg by leg against our side.
//!
//! Pure: facts in, report out.
//!
//! Source: the source document, section 6.

use super::legs;
use super::pool;
use super::report::{EndpointReport, Report, Row, Verdict};
use crate::contract::attest::Contract;
use crate::contract::{BlockSize, HashAlgo, NoneSeed, TokenId};
use crate::fleet::{EngineFacts, Keying};
use crate::state::kv::ReplayState;

/// Our side of the contract with one endpoint: a rule's, or what flags and variables say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ours {
    /// `kvBlockSize`.
    pub block_size: BlockSize,
    /// `kvHashAlgo`.
    pub algo: HashAlgo,
    /// `LLB_KV_NONE_HASH_SEED`.
    pub seed: NoneSeed,
    /// `kvKeying`: with `rehash` neither algorithm nor seed matters.
    pub keying: Keying,
    /// `kvZmqPort`.
    pub zmq_port: u16,
    /// The replay port; `None`: no replay is asked for.
    pub replay_port: Option<u16>,
    /// `kvDpRankCount`; `None`: as many as the engine has.
    pub ranks: Option<u8>,
    /// `model_name`.
    pub model: Option<String>,
}

/// What was seen of one endpoint.
#[derive(Clone, Debug)]
pub struct Look {
    /// Its position.
    pub ep_idx: usize,
    /// `HOST:PORT`.
    pub endpoint: String,
    /// Our side.
    pub ours: Ours,
    /// What its engine says.
    pub facts: EngineFacts,
    /// What its engine announces; `None`: a rule like this does not listen to it.
    pub heard: Option<Heard>,
    /// What our staged tokenizer makes of the samples.
    pub tokens: OurTokens,
}

/// Our tokens of each sample, or why there is no tokenizer.
pub type OurTokens = Result<Vec<Result<Vec<TokenId>, String>>, String>;

/// What an engine's event stream has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Whether its publisher can be reached.
    pub socket: Socket,
    /// How its replay fared.
    pub replay: ReplayState,
    /// Blocks that it announced and holds.
    pub blocks: u64,
    /// Whether their names are ours.
    pub contract: Contract,
}

/// Whether an event publisher can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Socket {
    /// It can.
    Open,
    /// It cannot.
    Closed(String),
}

/// Compares every endpoint with our side of it, and the endpoints with each other.
pub fn preflight(looks: &[Look]) -> Report {
    let endpoint =
        |look: &Look| EndpointReport { ep_idx: look.ep_idx, endpoint: look.endpoint.clone(), legs: legs_of(look) };
    Report::new(looks.iter().map(endpoint).collect(), pool::rows(looks))
}

fn legs_of(look: &Look) -> Vec<Row> {
    let (ours, facts) = (&look.ours, &look.facts);
    if let Some(why) = facts.unreachable() {
        let advice = "start the engine, or correct endpointIP and targetPort";
        return vec![Row::new("http", Verdict::Unreachable, why, "").advise(advice)];
    }
    let contract = look.heard.as_ref().map_or(Contract::Unverified, |heard| heard.contract.clone());
    let mut rows = vec![legs::version(facts)];
    rows.extend([legs::model(ours, facts), legs::tokenizer(facts, &look.tokens), legs::template(facts, &look.tokens)]);
    if let Some(heard) = &look.heard {
        rows.extend([
            legs::block_size(ours, facts, &contract),
            legs::algorithm(ours, facts, &contract),
            legs::seed(ours, facts, heard),
            legs::prefix_caching(facts),
            legs::events(facts, Some(&heard.socket)),
            legs::event_port(ours, facts, Some(&heard.socket)),
            legs::ranks(ours, facts),
            legs::replay(ours, facts, heard.replay),
        ]);
    }
    rows.push(legs::metrics(facts));
    rows
}

/// What an engine's own words contradict, before it has announced anything: rows that are broken.
pub fn agree(ours: &Ours, facts: &EngineFacts) -> Vec<Row> {
    if facts.unreachable().is_some() {
        return Vec::new();
    }
    let nothing = Contract::Unverified;
    let rows = [
        legs::version(facts),
        legs::model(ours, facts),
        legs::block_size(ours, facts, &nothing),
        legs::algorithm(ours, facts, &nothing),
        legs::prefix_caching(facts),
        legs::events(facts, None),
        legs::event_port(ours, facts, None),
        legs::ranks(ours, facts),
    ];
    rows.into_iter().filter(|row| row.verdict == Verdict::Broken).collect()
}
