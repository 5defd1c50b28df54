//! What clients ask, and of which engines: each workload is a function of a seed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use kvlb::contract::BlockHash;

use super::figures::{float, small};
use super::model::Build;
use super::timing::Timing;
use crate::engine::chance::{Chance, mix};

/// One request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Ask {
    /// When it comes, from the beginning of its stage.
    pub(super) at: Duration,
    /// Tokens of its prompt.
    pub(super) tokens: u32,
    /// Tokens of its answer.
    pub(super) output: u32,
    /// The names of all full blocks of prompt and answer.
    pub(super) names: Arc<[BlockHash]>,
    /// Whether the figures tell of it.
    pub(super) counts: bool,
}

/// A number of requests that begins when all before are done.
#[derive(Clone, Debug, Default)]
pub(super) struct Stage {
    /// What plots call it.
    pub(super) label: String,
    /// In order of time.
    pub(super) asks: Vec<Arc<Ask>>,
}

/// Requests, and the engines for them.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    /// Its name.
    pub(super) name: String,
    /// How each engine is built.
    pub(super) build: Build,
    /// Engines.
    pub(super) engines: usize,
    /// Its parts.
    pub(super) stages: Vec<Stage>,
    /// Whether engines begin a new life in the middle of it.
    pub(super) restarts: bool,
}

impl Workload {
    /// Requests.
    pub(super) fn requests(&self) -> usize {
        self.stages.iter().map(|stage| stage.asks.len()).sum()
    }

    /// How long clients go on asking, were everybody answered at once.
    pub(super) fn length(&self) -> Duration {
        let length = |stage: &Stage| stage.asks.last().map_or(Duration::ZERO, |ask| ask.at);
        self.stages.iter().map(length).sum()
    }

    /// The share of prompt tokens that one engine with endless memory would find, in percent, of the requests that count.
    pub(super) fn ceiling(&self) -> f64 {
        let mut seen: HashSet<BlockHash> = HashSet::new();
        let (mut found, mut all) = (0, 0);
        for ask in self.stages.iter().flat_map(|stage| &stage.asks) {
            let usable = (ask.tokens.saturating_sub(1) / self.build.block_size) as usize;
            let run = ask.names.iter().take(usable).take_while(|name| seen.contains(*name)).count();
            if ask.counts {
                found += run * self.build.block_size as usize;
                all += ask.tokens as usize;
            }
            seen.extend(ask.names.iter());
        }
        super::figures::percent(float(found), float(all))
    }
}

/// A piece of text: the same number is the same text.
#[derive(Clone, Copy, Debug)]
struct Text(u64, u32);

/// The names of the full blocks of some texts in a row.
fn names(block_size: u32, texts: &[Text]) -> Arc<[BlockHash]> {
    let mut names = Vec::new();
    let (mut name, mut filled) = (0, 0);
    for &Text(number, tokens) in texts {
        let mut at = 0;
        while at < tokens {
            let piece = (tokens - at).min(block_size - filled);
            name = mix(name ^ mix(number ^ (u64::from(at) << 32) ^ u64::from(piece)));
            (at, filled) = (at + piece, filled + piece);
            if filled == block_size {
                names.push(BlockHash(name));
                filled = 0;
            }
        }
    }
    names.into()
}

/// Makes requests of one workload.
struct Author {
    chance: Chance,
    block_size: u32,
    now: f64,
    asks: Vec<Arc<Ask>>,
    /// Before this, requests do not count.
    counts_from: f64,
}

impl Author {
    fn new(name: &str, seed: u64, build: &Build) -> Self {
        let chance = Chance::new(Chance::seed_of(name, &[seed]));
        Self { chance, block_size: build.block_size, now: 0.0, asks: Vec::new(), counts_from: 0.0 }
    }

    /// Waits as long as until the next of requests that come by chance, so many a second.
    fn wait(&mut self, rate: f64) {
        self.now -= (1.0 - self.chance.unit()).ln() / rate;
    }

    /// A text that nobody has seen.
    fn new_text(&mut self, tokens: u32) -> Text {
        Text(self.chance.next(), tokens)
    }

    fn ask(&mut self, prompt: &[Text], output: u32) {
        let answer = self.new_text(output);
        self.ask_answered(prompt, answer);
    }

    fn ask_answered(&mut self, prompt: &[Text], answer: Text) {
        let texts: Vec<Text> = prompt.iter().copied().chain([answer]).collect();
        let (tokens, at) = (prompt.iter().map(|text| text.1).sum(), Duration::from_secs_f64(self.now));
        let counts = self.now >= self.counts_from;
        let names = names(self.block_size, &texts);
        self.asks.push(Arc::new(Ask { at, tokens, output: answer.1, names, counts }));
    }

    /// What was asked so far is a stage.
    fn stage(&mut self, label: &str) -> Stage {
        self.now = 0.0;
        Stage { label: label.to_owned(), asks: std::mem::take(&mut self.asks) }
    }
}

/// The small engines of the side-by-side comparison: 50 µs for each new token, one prompt at a time, answers of four tokens.
const SMALL: Build = Build {
    block_size: 16,
    blocks: 16_384,
    step_tokens: 8192,
    sequences: 256,
    prompts: 1,
    timing: Timing::PerToken { overhead_ms: 0.0, token_ms: 0.05, decode_ms: 1.0, crowded: 1.0 },
};
/// Such engines, in the comparison.
const SMALL_ENGINES: usize = 4;
/// Tokens of their answers.
const SHORT: u32 = 4;

/// Qwen3-32B on two H100: cache and prompt tokens a second as llm-d published them, times in Dynamo's proportions, and steps and
/// requests as vLLM has them on such machines.
pub(super) fn large() -> Build {
    Build {
        block_size: 16,
        blocks: 307_328 / 16,
        step_tokens: 8192,
        sequences: 256,
        prompts: usize::MAX,
        timing: Timing::paced_at(PREFILL_32B),
    }
}

/// Prompt tokens a second. Source: llm-d's default for the time that leaving a sticky endpoint costs.
const PREFILL_32B: f64 = 15_928.0;

/// A workload by its name, and what it is.
pub(super) struct Entry {
    /// Its name.
    pub(super) name: &'static str,
    /// What it is.
    pub(super) about: &'static str,
    make: fn(&'static str, u64) -> Workload,
}

impl Entry {
    /// The workload of a seed.
    pub(super) fn make(&self, seed: u64) -> Workload {
        (self.make)(self.name, seed)
    }
}

/// Every workload that needs no file.
pub(super) const ALL: &[Entry] = &[
    Entry {
        name: "groups",
        about: "32 prefixes of 2400 tokens + 200 new ones, 25/s, 4 small engines whose caches hold all",
        make: |name, seed| groups(name, seed, SMALL, 300),
    },
    Entry {
        name: "groups-tight",
        about: "the same, with caches of 1600 blocks, which is too small",
        make: |name, seed| groups(name, seed, Build { blocks: 1600, ..SMALL }, 400),
    },
    Entry {
        name: "groups-restart",
        about: "groups, and every engine begins a new life in the middle",
        make: |name, seed| Workload { restarts: true, ..groups(name, seed, SMALL, 600) },
    },
    Entry {
        name: "hot-idle",
        about: "one prefix of 2400 tokens + 200 new ones at a tenth of what one small engine can do, 4 of them",
        make: |name, seed| hot(name, seed, 10.0, 300),
    },
    Entry {
        name: "hot",
        about: "the same at twice what one can do; the first 5 s do not count",
        make: |name, seed| hot(name, seed, 200.0, 4000),
    },
    Entry {
        name: "chats",
        about: "60 conversations of five turns under one system prompt, 25/s, 4 small engines",
        make: |name, seed| chats(name, seed, SMALL, 300),
    },
    Entry {
        name: "chats-tight",
        about: "the same, with caches of 1600 blocks",
        make: |name, seed| chats(name, seed, Build { blocks: 1600, ..SMALL }, 360),
    },
    Entry { name: "unique", about: "prompts of 2400 tokens that share nothing, 20/s, 4 small engines", make: unique },
    Entry {
        name: "b2b",
        about: "llm-d's benchmark: 150 prefixes of 6000 tokens, 5 questions of 1200 each, answers of 1000, 3 to 60/s, 8 large engines",
        make: b2b,
    },
    Entry {
        name: "agents",
        about: "40 agents under 4 long system prompts, each step adds 600 tokens and waits for its answer's time, 8 large engines",
        make: agents,
    },
    Entry {
        name: "mixed",
        about: "half long documents that are asked about three times, half short chats that share little, 8 large engines near their limit",
        make: mixed,
    },
];

fn groups(name: &str, seed: u64, build: Build, requests: usize) -> Workload {
    let mut author = Author::new(name, seed, &build);
    let prefixes: Vec<Text> = (0..32).map(|_| author.new_text(2400)).collect();
    for _ in 0..requests {
        author.wait(25.0);
        let prefix = prefixes[author.chance.below(prefixes.len())];
        let question = author.new_text(200);
        author.ask(&[prefix, question], SHORT);
    }
    one_stage(name, build, SMALL_ENGINES, author)
}

fn hot(name: &str, seed: u64, rate: f64, requests: usize) -> Workload {
    let mut author = Author::new(name, seed, &SMALL);
    author.counts_from = 5.0;
    let prefix = author.new_text(2400);
    for _ in 0..requests {
        author.wait(rate);
        let question = author.new_text(200);
        author.ask(&[prefix, question], SHORT);
    }
    one_stage(name, SMALL, SMALL_ENGINES, author)
}

fn chats(name: &str, seed: u64, build: Build, requests: usize) -> Workload {
    const TURNS: usize = 5;
    let mut author = Author::new(name, seed, &build);
    let system = author.new_text(1000);
    let mut open: Vec<Vec<Text>> = vec![vec![system]; requests / TURNS];
    while !open.is_empty() {
        author.wait(25.0);
        let chat = author.chance.below(open.len());
        let question = author.new_text(400);
        open[chat].push(question);
        let answer = author.new_text(SHORT);
        author.ask_answered(&open[chat], answer);
        open[chat].push(answer);
        if open[chat].len() > 2 * TURNS {
            open.swap_remove(chat);
        }
    }
    one_stage(name, build, SMALL_ENGINES, author)
}

fn unique(name: &str, seed: u64) -> Workload {
    let mut author = Author::new(name, seed, &SMALL);
    for _ in 0..200 {
        author.wait(20.0);
        let prompt = author.new_text(2400);
        author.ask(&[prompt], SHORT);
    }
    one_stage(name, SMALL, SMALL_ENGINES, author)
}

/// The rates of llm-d's benchmark, in requests a second, and how many seconds each lasts. The first warms caches up.
///
/// Source: the load stages in the benchmark report of llm-d's guide for the same workload.
const B2B_STAGES: [(u32, u32); 17] = [
    (15, 50),
    (3, 20),
    (10, 20),
    (15, 20),
    (20, 38),
    (22, 34),
    (25, 30),
    (30, 25),
    (35, 21),
    (40, 38),
    (43, 36),
    (46, 33),
    (49, 30),
    (52, 29),
    (55, 27),
    (57, 26),
    (60, 25),
];

/// Source: llm-d's blog on precise scheduling (September 2025); lengths of answers and stages from its guide's report. Its load
/// generator begins a rate when all requests of the one before are answered, and goes through the prompts in turn.
fn b2b(name: &str, seed: u64) -> Workload {
    let build = large();
    let mut author = Author::new(name, seed, &build);
    let prefixes: Vec<Text> = (0..150).map(|_| author.new_text(6000)).collect();
    let mut prompts: Vec<[Text; 2]> = Vec::new();
    for prefix in prefixes {
        for _ in 0..5 {
            prompts.push([prefix, author.new_text(1200)]);
        }
    }
    for at in (1..prompts.len()).rev() {
        prompts.swap(at, author.chance.below(at + 1));
    }
    let mut next = 0;
    let stages = B2B_STAGES.iter().enumerate().map(|(number, &(rate, seconds))| {
        author.counts_from = if number == 0 { f64::INFINITY } else { 0.0 };
        for _ in 0..rate * seconds {
            author.wait(f64::from(rate));
            author.ask(&prompts[next % prompts.len()], 1000);
            next += 1;
        }
        author.stage(&rate.to_string())
    });
    Workload { name: name.to_owned(), build, engines: 8, stages: stages.collect(), restarts: false }
}

/// Agents call tools: a prompt grows by what the tool said, every few seconds, and nearly all of it was seen before.
fn agents(name: &str, seed: u64) -> Workload {
    const AGENTS: usize = 40;
    const STEPS: usize = 20;
    let build = large();
    let mut author = Author::new(name, seed, &build);
    let systems: Vec<Text> = (0..4).map(|_| author.new_text(8000)).collect();
    let fresh = |at: usize| vec![systems[at % systems.len()]];
    let mut agents: Vec<Vec<Text>> = (0..AGENTS).map(fresh).collect();
    let mut begun = AGENTS;
    for _ in 0..AGENTS * STEPS * 2 {
        author.wait(10.0);
        let agent = author.chance.below(AGENTS);
        let said = author.new_text(600);
        agents[agent].push(said);
        let answer = author.new_text(150);
        author.ask_answered(&agents[agent], answer);
        agents[agent].push(answer);
        if agents[agent].len() > 2 * STEPS {
            agents[agent] = fresh(begun);
            begun += 1;
        }
    }
    one_stage(name, build, 8, author)
}

/// What hurts a choice by affinity alone: prompts of very different length.
fn mixed(name: &str, seed: u64) -> Workload {
    let build = large();
    let mut author = Author::new(name, seed, &build);
    let system = author.new_text(512);
    let mut documents: Vec<(Text, u32)> = Vec::new();
    for _ in 0..1500 {
        author.wait(10.0);
        let question = author.new_text(200);
        if author.chance.happens(0.5) {
            author.ask(&[system, question], 200);
            continue;
        }
        if documents.len() < 30 {
            let document = author.new_text(30_000);
            documents.push((document, 3));
        }
        let at = author.chance.below(documents.len());
        author.ask(&[system, documents[at].0, question], 200);
        documents[at].1 -= 1;
        if documents[at].1 == 0 {
            documents.swap_remove(at);
        }
    }
    one_stage(name, build, 8, author)
}

fn one_stage(name: &str, build: Build, engines: usize, mut author: Author) -> Workload {
    let stages = vec![author.stage("")];
    Workload { name: name.to_owned(), build, engines, stages, restarts: false }
}

/// A small one with everything in it, for many seeds: some shared prefixes, some chats, some new prompts.
pub(super) fn scrap(seed: u64) -> Workload {
    let build = Build { blocks: 400, sequences: 8, step_tokens: 1024, ..SMALL };
    let mut author = Author::new("scrap", seed, &build);
    let prefixes: Vec<Text> = (0..6).map(|_| author.new_text(320)).collect();
    let mut chat = vec![prefixes[0]];
    for _ in 0..120 {
        author.wait(60.0);
        let tokens = small(author.chance.below(300)) + 1;
        let new = author.new_text(tokens);
        let output = small(author.chance.below(20)) + 1;
        match author.chance.below(4) {
            0 => author.ask(&[new], output),
            1 => {
                chat.push(new);
                let answer = author.new_text(output);
                author.ask_answered(&chat, answer);
                chat.push(answer);
                if chat.len() > 8 {
                    chat.truncate(1);
                }
            }
            _ => {
                let prefix = prefixes[author.chance.below(prefixes.len())];
                author.ask(&[prefix, new], output);
            }
        }
    }
    let engines = 2 + author.chance.below(4);
    one_stage("scrap", build, engines, author)
}

/// Requests in order of time, from somebody's record.
pub(super) fn recorded(name: &str, build: Build, engines: usize, asks: Vec<Ask>) -> Workload {
    let asks = asks.into_iter().map(Arc::new).collect();
    let stages = vec![Stage { label: String::new(), asks }];
    Workload { name: name.to_owned(), build, engines, stages, restarts: false }
}

/// Names for a prompt of numbered blocks, each standing for itself and all before it, and for an answer that is new.
pub(super) fn numbered(blocks: &[u64], answer: usize, unique: u64) -> Arc<[BlockHash]> {
    let prompt = blocks.iter().map(|number| BlockHash(mix(*number)));
    let answer = (0..answer as u64).map(|at| BlockHash(mix(mix(unique) ^ at)));
    prompt.chain(answer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_workload_and_another_seed_another() {
        for entry in ALL.iter().filter(|entry| entry.name != "b2b") {
            let [one, same, other] = [1, 1, 2].map(|seed| entry.make(seed).stages);
            let asks = |stages: &[Stage]| stages.iter().flat_map(|stage| stage.asks.clone()).collect::<Vec<_>>();
            assert_eq!(asks(&one), asks(&same), "{}", entry.name);
            assert_ne!(asks(&one), asks(&other), "{}", entry.name);
            assert!(asks(&one).windows(2).all(|pair| pair[0].at <= pair[1].at), "{}", entry.name);
        }
    }

    #[test]
    fn equal_beginnings_have_equal_names_wherever_texts_are_cut() {
        let (one, other) = (Text(1, 40), Text(2, 40));
        let [both, first] = [&[one, other][..], &[one][..]].map(|texts| names(16, texts));
        assert_eq!((both.len(), first.len()), (5, 2));
        assert_eq!(both[..2], first[..]);
        assert_ne!(both[2], names(16, &[one, Text(3, 40)])[2]);
        assert_ne!(names(16, &[one])[0], names(16, &[other])[0]);
    }

    #[test]
    fn groups_are_those_of_the_comparison() {
        let groups = ALL[0].make(1);
        assert_eq!(groups.requests(), 300);
        assert!((groups.ceiling() - 82.5).abs() < 0.1, "{}", groups.ceiling());
    }

    #[test]
    fn the_b2b_demand_is_73_percent_of_the_caches() {
        let b2b = ALL.iter().find(|entry| entry.name == "b2b").unwrap().make(1);
        let warm_up = &b2b.stages[0].asks;
        let block = b2b.build.block_size;
        let prompts: HashSet<_> = warm_up.iter().flat_map(|ask| &ask.names[..(ask.tokens / block) as usize]).collect();
        let demand = float(prompts.len()) / float(8 * b2b.build.blocks as usize);
        assert!((demand - 0.73).abs() < 0.01, "{demand}");
    }
}
