//! Does the engine name its blocks as the rule says?
//!
//! Every stored block comes with its tokens, so its name can be recomputed. An [`Attestor`] does so for one endpoint of
//! one rule and keeps the verdict: a [`Contract`]. Where names differ it looks for the way of naming that the engine does
//! use, so that the verdict says which leg is broken and what to change.
//!
//! A name alone proves little: only a chain that begins at `NONE_HASH` proves the seed. So a block is checked when it has
//! no parent, or when the parent's digest was computed here before; a parent sent as bytes proves the algorithm only.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use super::events::{Attention, Medium, Stored, WireHash};
use super::{BlockExtra, BlockHash, BlockSize, Digest, ExtraKey, HashAlgo, Hasher, KeyEra, NoneSeed, TokenId};

/// Checkable events of an engine life that are all checked; a wrong leg shows in the first.
const CHECKED_FIRST: u32 = 32;
/// Of those after, one in this many is checked: an engine's contract does not change while it runs.
const CHECKED_THEN_ONE_IN: u32 = 64;
/// Digests kept so that the children of computed blocks can be checked: 4096 are a prompt of 64K tokens.
const DIGESTS_KEPT: usize = 4096;
/// Failures in a row that an engine which does not announce extra keys is allowed once it is verified: its salted
/// requests look exactly like a wrong seed.
const UNEXPLAINED_MAX: u32 = 8;
/// The seeds that people use.
const COMMON_SEEDS: [&str; 3] = ["0", "42", "1234"];

/// Whether one endpoint's names agree with its rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Contract {
    /// Nothing that can be checked was announced yet.
    #[default]
    Unverified,
    /// Recomputed names agree.
    Verified,
    /// A request's own names met announced ones: tokenizer and template agree too.
    ProvedByRequest,
    /// They disagree.
    Mismatch {
        /// The part of the contract that is broken.
        leg: Leg,
        /// Both sides of it, and what to change.
        detail: String,
    },
}

impl Contract {
    /// The word that REST, CLI and metrics use.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Unverified => "unverified",
            Self::Verified => "verified",
            Self::ProvedByRequest => "proved_by_request",
            Self::Mismatch { .. } => "mismatch",
        }
    }

    /// The broken leg.
    pub const fn leg(&self) -> Option<Leg> {
        match self {
            Self::Mismatch { leg, .. } => Some(*leg),
            _ => None,
        }
    }

    /// What is wrong and what to change.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Mismatch { detail, .. } => Some(detail),
            _ => None,
        }
    }
}

/// A part of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leg {
    /// Tokens per block.
    BlockSize,
    /// The hash algorithm.
    Algorithm,
    /// `PYTHONHASHSEED`.
    Seed,
    /// How salts and the like enter the hash.
    ExtraKeys,
    /// Not found.
    Unknown,
}

impl Leg {
    /// Every leg, for metrics.
    pub const ALL: [Self; 5] = [Self::BlockSize, Self::Algorithm, Self::Seed, Self::ExtraKeys, Self::Unknown];

    /// The word that REST, CLI and metrics use.
    pub const fn label(self) -> &'static str {
        match self {
            Self::BlockSize => "block_size",
            Self::Algorithm => "algorithm",
            Self::Seed => "seed",
            Self::ExtraKeys => "extra_keys",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Leg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// What an engine says of itself in `vllm:cache_config_info`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineLabel {
    /// `prefix_caching_hash_algo`.
    pub hash_algo: Option<String>,
    /// `block_size`.
    pub block_size: Option<u32>,
    /// `num_gpu_blocks`: how many blocks it can hold.
    pub num_gpu_blocks: Option<u64>,
}

/// Checks one endpoint's announcements against its rule.
#[derive(Debug)]
pub struct Attestor {
    hasher: Hasher,
    seed: NoneSeed,
    label: EngineLabel,
    era: KeyEra,
    /// Whether an announcement has shown the era.
    era_shown: bool,
    contract: Contract,
    checkable: u32,
    unexplained: u32,
    /// Set by a name that followed from a parent's bytes.
    algorithm_proved: bool,
    /// The last announcement that disagreed, kept so that a label that arrives later can explain it.
    disagreement: Option<Stored>,
    digests: Digests,
}

/// What one announcement says of the contract.
enum Finding {
    Agrees,
    /// It follows from its parent's bytes, so the algorithm is right; the seed stays open.
    AlgorithmAgrees,
    Disagrees,
    /// It cannot be recomputed.
    Nothing,
}

impl Attestor {
    /// An attestor for an endpoint of a rule that names blocks by `algo`, `seed` and `block_size`.
    pub fn new(algo: HashAlgo, seed: NoneSeed, block_size: BlockSize) -> Self {
        Self {
            hasher: Hasher::new(algo, &seed, block_size),
            seed,
            label: EngineLabel::default(),
            era: KeyEra::default(),
            era_shown: false,
            contract: Contract::Unverified,
            checkable: 0,
            unexplained: 0,
            algorithm_proved: false,
            disagreement: None,
            digests: Digests::default(),
        }
    }

    /// The verdict so far.
    pub const fn contract(&self) -> &Contract {
        &self.contract
    }

    /// How the engine writes extra keys, as far as its announcements show.
    pub const fn era(&self) -> KeyEra {
        self.era
    }

    /// Notes how the engine's version writes extra keys, until an announcement shows it.
    pub const fn set_era(&mut self, era: KeyEra) {
        if !self.era_shown {
            self.era = era;
        }
    }

    /// Forgets everything seen: another engine life may run with other flags.
    pub fn new_life(&mut self) {
        *self = Self::new(self.hasher.algo(), self.seed.clone(), self.hasher.block_size());
    }

    /// Notes what the engine says of itself, which may name a leg that was unknown. Says whether the verdict changed.
    pub fn set_label(&mut self, label: EngineLabel) -> bool {
        if self.label == label {
            return false;
        }
        self.label = label;
        self.reconsider()
    }

    /// Notes that the names of a request met announced ones, the strongest proof there is. Says whether the verdict
    /// changed.
    pub fn proved_by_request(&mut self) -> bool {
        self.disagreement = None;
        self.settle(Contract::ProvedByRequest)
    }

    /// Checks one announcement where it is its turn. Says whether the verdict changed.
    pub fn check(&mut self, stored: &Stored) -> bool {
        if !is_checkable(stored) || !self.is_due(stored) {
            return false;
        }
        match self.examine(stored) {
            Finding::Nothing => false,
            Finding::AlgorithmAgrees => {
                self.algorithm_proved = true;
                // It may now be clear which leg an earlier disagreement broke.
                self.reconsider()
            }
            Finding::Agrees => self.agree(stored),
            Finding::Disagrees => self.weigh(stored),
        }
    }

    /// Counts checkable announcements: those without a parent, and those whose parent is known well enough.
    fn is_due(&mut self, stored: &Stored) -> bool {
        let known = |parent: &WireHash| parent.digest.is_some() || self.digests.get(parent.name).is_some();
        let wrong_size = stored.block_size != self.hasher.block_size().get();
        if !wrong_size && !stored.parent.as_ref().is_none_or(known) {
            return false;
        }
        let turn = self.checkable;
        self.checkable = self.checkable.wrapping_add(1);
        turn < CHECKED_FIRST || turn.is_multiple_of(CHECKED_THEN_ONE_IN)
    }

    /// Recomputes an announcement under the rule's contract, in the era known or in the other.
    fn examine(&mut self, stored: &Stored) -> Finding {
        if stored.block_size != self.hasher.block_size().get() {
            return if self.agrees_at_a_coarser_size(stored) { Finding::Agrees } else { Finding::Disagrees };
        }
        let algo = self.hasher.algo();
        let (parent, from_root) = match &stored.parent {
            None => (*self.hasher.none_hash(), true),
            Some(parent) => match (self.digests.get(parent.name), parent.digest) {
                (Some(digest), _) => (digest, true),
                (None, Some(digest)) => (digest, false),
                (None, None) => return Finding::Nothing,
            },
        };
        let mut encodable = false;
        for era in [self.era, other(self.era)] {
            let Some(digests) = chain(algo, parent, stored, self.hasher.block_size(), era) else { continue };
            encodable = true;
            if agree(&digests, &stored.hashes) {
                if stored.has_keys() {
                    self.era = era;
                    self.era_shown = true;
                }
                if !from_root {
                    return Finding::AlgorithmAgrees;
                }
                for digest in digests {
                    self.digests.insert(digest);
                }
                return Finding::Agrees;
            }
            if !stored.has_keys() {
                break;
            }
        }
        if encodable { Finding::Disagrees } else { Finding::Nothing }
    }

    /// Hybrid models hash at the smallest block size of their KV groups; a coarser group announces every n-th name.
    fn agrees_at_a_coarser_size(&self, stored: &Stored) -> bool {
        let ours = self.hasher.block_size();
        if !stored.block_size.is_multiple_of(ours.get()) || stored.parent.is_some() || stored.has_keys() {
            return false;
        }
        let algo = self.hasher.algo();
        let every = stored.block_size as usize / ours.tokens();
        let digests = chain(algo, *self.hasher.none_hash(), stored, ours, self.era).unwrap_or_default();
        let last_of_each: Vec<_> = digests.chunks_exact(every).map(|group| group[every - 1]).collect();
        agree(&last_of_each, &stored.hashes)
    }

    fn agree(&mut self, stored: &Stored) -> bool {
        self.unexplained = 0;
        match self.contract {
            Contract::Verified | Contract::ProvedByRequest => false,
            // Names without keys say nothing of how keys are written.
            Contract::Mismatch { leg: Leg::ExtraKeys, .. } if !stored.has_keys() => false,
            Contract::Unverified | Contract::Mismatch { .. } => {
                self.disagreement = None;
                self.settle(Contract::Verified)
            }
        }
    }

    /// Decides whether a disagreement is evidence against the contract.
    fn weigh(&mut self, stored: &Stored) -> bool {
        let verified = matches!(self.contract, Contract::Verified | Contract::ProvedByRequest);
        // Placeholder tokens of images and embeddings, and paths of adapters, are not all in the event: agreement
        // proves something, disagreement does not.
        if stored.keys().any(|key| !matches!(key, ExtraKey::CacheSalt(_))) {
            return false;
        }
        if verified && stored.extra_keys.is_none() {
            self.unexplained += 1;
            if self.unexplained < UNEXPLAINED_MAX {
                return false;
            }
        }
        self.disagree(first_block(stored))
    }

    fn disagree(&mut self, first: Stored) -> bool {
        let verdict = self.diagnose(&first);
        self.disagreement = Some(first);
        self.settle(verdict)
    }

    /// Explains the last disagreement again, with what has been learned since.
    fn reconsider(&mut self) -> bool {
        self.disagreement.take().is_some_and(|first| self.disagree(first))
    }

    fn settle(&mut self, contract: Contract) -> bool {
        let changed = self.contract != contract;
        self.contract = contract;
        if changed {
            // What follows a change is worth a closer look.
            self.checkable = 0;
        }
        changed
    }

    /// Finds the leg that explains a disagreement.
    fn diagnose(&self, stored: &Stored) -> Contract {
        let found = self.search(stored);
        let ours = self.hasher.block_size();
        if stored.block_size != ours.get() {
            let engine = stored.block_size;
            let also = found.as_ref().and_then(|found| self.explain(found));
            let also = also.map_or_else(String::new, |(leg, also)| format!("; also {leg}: {also}"));
            let detail = format!(
                "engine block size {engine}, rule kvBlockSize {ours}: create the rule with kvBlockSize {engine} or \
                 start the engine with --block-size {ours}{also}"
            );
            return Contract::Mismatch { leg: Leg::BlockSize, detail };
        }
        let (leg, detail) = match found.as_ref().and_then(|found| self.explain(found)) {
            Some(explained) => explained,
            None => self.unexplained(stored),
        };
        Contract::Mismatch { leg, detail }
    }

    /// The leg and the advice for a way of naming that does explain the announcement; nothing when it is the rule's own.
    fn explain(&self, found: &Naming) -> Option<(Leg, String)> {
        let (algo, rule) = (found.algo, self.hasher.algo());
        let seed = found.seed.as_ref().filter(|seed| **seed != self.seed);
        if algo != rule {
            let seeds = seed.map_or_else(String::new, |seed| {
                format!("; its PYTHONHASHSEED is {} and ours {}", shown(seed), shown(&self.seed))
            });
            return Some((Leg::Algorithm, algorithm_advice(algo, rule) + &seeds));
        }
        seed.map(|seed| (Leg::Seed, seed_advice(seed, &self.seed)))
    }

    /// The leg when no known way of naming fits.
    fn unexplained(&self, stored: &Stored) -> (Leg, String) {
        let rule = self.hasher.algo();
        let claimed = self.label.hash_algo.as_deref();
        if let Some(claimed) = claimed.filter(|claimed| *claimed != rule.label()) {
            let advice = claimed.parse().map_or_else(
                |()| format!("the engine says prefix_caching_hash_algo {claimed}, the rule kvHashAlgo {rule}"),
                |algo| algorithm_advice(algo, rule),
            );
            return (Leg::Algorithm, advice);
        }
        if let Some(WireHash { digest: Some(digest), .. }) = stored.hashes.first()
            && std::mem::discriminant(digest) != std::mem::discriminant(self.hasher.none_hash())
        {
            let engine = match digest {
                Digest::Sha256(_) => "a sha256",
                Digest::Xxh3(_) => "an xxhash",
            };
            let detail = format!(
                "engine digests are those of {engine} algorithm, rule kvHashAlgo {rule}: start the engine with \
                 --prefix-caching-hash-algo {rule}"
            );
            return (Leg::Algorithm, detail);
        }
        if !self.hasher.provable() {
            return (Leg::Unknown, unprovable_advice(rule));
        }
        let verified = matches!(self.contract, Contract::Verified | Contract::ProvedByRequest);
        if verified && stored.has_keys() {
            let detail = "names of requests with a cache_salt differ in every known form while others agree: the engine's \
                          version writes extra keys in a form that this one does not know";
            return (Leg::ExtraKeys, detail.to_owned());
        }
        if stored.parent.is_none() && (claimed.is_some() || self.algorithm_proved) {
            return (Leg::Seed, unknown_seed_advice(rule, &self.seed));
        }
        let detail = format!(
            "no known algorithm and seed explains the engine's names (tried PYTHONHASHSEED {}): compare \
             --prefix-caching-hash-algo with kvHashAlgo {rule}, and PYTHONHASHSEED with LLB_KV_NONE_HASH_SEED {}",
            self.tried(),
            shown(&self.seed),
        );
        (Leg::Unknown, detail)
    }

    fn tried(&self) -> String {
        self.seeds().iter().map(shown).collect::<Vec<_>>().join(", ")
    }

    fn seeds(&self) -> Vec<NoneSeed> {
        let mut seeds = vec![self.seed.clone(), NoneSeed::Unset];
        seeds.extend(COMMON_SEEDS.map(|seed| NoneSeed::Text(seed.to_owned())));
        let mut distinct = Vec::with_capacity(seeds.len());
        for seed in seeds {
            if !distinct.contains(&seed) {
                distinct.push(seed);
            }
        }
        distinct
    }

    /// Tries every known way of naming on an announcement's first block.
    fn search(&self, first: &Stored) -> Option<Naming> {
        let size = BlockSize::new(first.block_size)?;
        let fits = |algo: HashAlgo, parent: Digest| {
            [KeyEra::Tagged, KeyEra::Untagged]
                .into_iter()
                .filter_map(|era| chain(algo, parent, first, size, era))
                .any(|digests| agree(&digests, &first.hashes))
        };
        if let Some(parent) = &first.parent {
            let parent = parent.digest?;
            let algo = HashAlgo::ALL.into_iter().find(|&algo| fits(algo, parent))?;
            return Some(Naming { algo, seed: None });
        }
        let seeds = self.seeds();
        let namings = HashAlgo::ALL.into_iter().flat_map(|algo| seeds.iter().map(move |seed| (algo, seed)));
        let mut known = namings.filter_map(|(algo, seed)| Some((algo, seed, algo.none_hash(seed)?)));
        let (algo, seed, _) = known.find(|&(algo, _, none_hash)| fits(algo, none_hash))?;
        Some(Naming { algo, seed: Some(seed.clone()) })
    }
}

/// A way of naming; without a seed where the announcement does not depend on it.
struct Naming {
    algo: HashAlgo,
    seed: Option<NoneSeed>,
}

impl Stored {
    fn keys(&self) -> impl Iterator<Item = &ExtraKey> {
        self.extra_keys.iter().flatten().flatten()
    }

    fn has_keys(&self) -> bool {
        self.keys().next().is_some()
    }

    fn block_extra(&self, block: usize) -> BlockExtra<'_> {
        let keys = self.extra_keys.as_ref().and_then(|blocks| blocks.get(block));
        let lookahead = self.lookahead.as_ref().and_then(|blocks| blocks.get(block));
        BlockExtra {
            keys: keys.map_or(&[][..], Vec::as_slice),
            lookahead: lookahead.map_or(&[][..], Vec::<TokenId>::as_slice),
        }
    }
}

/// Whether an announcement holds all that its names are made of.
fn is_checkable(stored: &Stored) -> bool {
    let adapter = stored.lora_name.is_some() || stored.lora_id.is_some();
    stored.medium == Medium::Gpu
        && stored.attention != Attention::Partial
        && !stored.hashes.is_empty()
        && !stored.tokens.is_empty()
        && stored.is_complete()
        // An adapter is part of the name; before 0.17 the event does not show how.
        && (!adapter || stored.has_keys())
}

/// The part of an announcement that a diagnosis needs.
fn first_block(stored: &Stored) -> Stored {
    Stored {
        hashes: stored.hashes.iter().take(1).copied().collect(),
        parent: stored.parent,
        tokens: stored.tokens.iter().take(stored.block_size as usize).copied().collect(),
        block_size: stored.block_size,
        extra_keys: stored.extra_keys.as_ref().map(|blocks| blocks.iter().take(1).cloned().collect()),
        lookahead: stored.lookahead.as_ref().map(|blocks| blocks.iter().take(1).cloned().collect()),
        ..Stored::default()
    }
}

/// The digests of an announcement's blocks under one way of naming; nothing when a key has no encoding in it.
fn chain(algo: HashAlgo, parent: Digest, stored: &Stored, size: BlockSize, era: KeyEra) -> Option<Vec<Digest>> {
    let mut parent = parent;
    let blocks = stored.tokens.chunks_exact(size.tokens()).enumerate();
    blocks
        .map(|(block, tokens)| {
            parent = algo.step(&parent, tokens, stored.block_extra(block), era).ok()?;
            Some(parent)
        })
        .collect()
}

fn agree(digests: &[Digest], announced: &[WireHash]) -> bool {
    digests.len() == announced.len()
        && digests.iter().zip(announced).all(|(ours, theirs)| match theirs.digest {
            Some(digest) => *ours == digest,
            None => ours.name() == theirs.name,
        })
}

const fn other(era: KeyEra) -> KeyEra {
    match era {
        KeyEra::Tagged => KeyEra::Untagged,
        KeyEra::Untagged => KeyEra::Tagged,
    }
}

fn shown(seed: &NoneSeed) -> String {
    match seed {
        NoneSeed::Text(text) => format!("\"{text}\""),
        NoneSeed::Unset => "unset".to_owned(),
    }
}

fn algorithm_advice(engine: HashAlgo, rule: HashAlgo) -> String {
    format!(
        "engine algorithm {engine}, rule kvHashAlgo {rule}: create the rule with kvHashAlgo {engine} or start the engine \
         with --prefix-caching-hash-algo {rule}"
    )
}

fn seed_advice(engine: &NoneSeed, ours: &NoneSeed) -> String {
    let set_ours = match engine {
        NoneSeed::Text(text) => format!("set LLB_KV_NONE_HASH_SEED={text} here"),
        NoneSeed::Unset => "unset LLB_KV_NONE_HASH_SEED here".to_owned(),
    };
    let set_theirs = match ours {
        NoneSeed::Text(text) => format!("start the engine with PYTHONHASHSEED={text}"),
        NoneSeed::Unset => "start the engine without PYTHONHASHSEED".to_owned(),
    };
    format!(
        "engine PYTHONHASHSEED {}, LLB_KV_NONE_HASH_SEED {}: {set_ours} or {set_theirs}",
        shown(engine),
        shown(ours)
    )
}

fn unknown_seed_advice(rule: HashAlgo, ours: &NoneSeed) -> String {
    let set_theirs = match ours {
        NoneSeed::Text(text) => format!("start the engine with PYTHONHASHSEED={text}"),
        NoneSeed::Unset => "set PYTHONHASHSEED on the engine and LLB_KV_NONE_HASH_SEED here to one text".to_owned(),
    };
    format!(
        "the engine hashes with {rule} as the rule says, but from another PYTHONHASHSEED than LLB_KV_NONE_HASH_SEED {}, \
         or from random bytes (vLLM before 0.29 without PYTHONHASHSEED): {set_theirs}",
        shown(ours)
    )
}

fn unprovable_advice(rule: HashAlgo) -> String {
    format!(
        "unprovable: {rule} without LLB_KV_NONE_HASH_SEED starts from random bytes in every engine: set PYTHONHASHSEED on \
         the engine and LLB_KV_NONE_HASH_SEED here to one text, for instance 0"
    )
}

/// The last digests computed, by name.
#[derive(Debug, Default)]
struct Digests {
    by_name: HashMap<BlockHash, Digest>,
    order: VecDeque<BlockHash>,
}

impl Digests {
    fn get(&self, name: BlockHash) -> Option<Digest> {
        self.by_name.get(&name).copied()
    }

    fn insert(&mut self, digest: Digest) {
        if self.by_name.insert(digest.name(), digest).is_some() {
            return;
        }
        self.order.push_back(digest.name());
        if self.order.len() > DIGESTS_KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_name.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests;
