//! Each leg, broken one at a time.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::contract::attest::{Contract, Leg};
use crate::contract::{BlockSize, HashAlgo, NoneSeed, TokenId};
use crate::fleet::{CacheConfig, EngineFacts, EventSource, Fact, Keying, Missing, Model, Version};
use crate::state::kv::ReplayState;

const SERIES: [&str; 7] = [
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
];

fn ours() -> Ours {
    Ours {
        block_size: BlockSize::new(16).unwrap(),
        algo: HashAlgo::Sha256Cbor,
        seed: NoneSeed::Text("0".to_owned()),
        keying: Keying::Auto,
        zmq_port: 5557,
        replay_port: Some(6557),
        ranks: None,
        model: Some("m".to_owned()),
    }
}

fn source(port: u16) -> EventSource {
    EventSource {
        enabled: true,
        publisher: "zmq".to_owned(),
        endpoint: Some(format!("tcp://*:{port}")),
        replay_endpoint: Some(format!("tcp://*:{}", port + 1000)),
    }
}

fn model(id: &str, parent: Option<&str>, root: &str) -> Model {
    let parent = parent.map(str::to_owned);
    Model { id: id.to_owned(), parent, root: Some(root.to_owned()), max_model_len: Some(4096) }
}

fn ids() -> Vec<TokenId> {
    [1, 2, 3].map(TokenId).to_vec()
}

/// An engine that agrees with [`ours`] in all that it says.
fn facts() -> EngineFacts {
    EngineFacts {
        version: Fact::Known(Version::from("0.32.0".to_owned())),
        models: Fact::Known(vec![model("m", None, "models/m")]),
        cache: Fact::Known(CacheConfig {
            block_size: Some(16),
            num_gpu_blocks: Some(100),
            hash_algo: Some("sha256_cbor".to_owned()),
            prefix_caching: Some(true),
        }),
        sources: Fact::Known(BTreeMap::from([(0, source(5557))])),
        series: Fact::Known(SERIES.iter().map(|&name| name.to_owned()).collect()),
        engines: Fact::Known(1),
        process_start: Fact::Known(1),
        tokens: SAMPLES.iter().map(|_| Fact::Known(ids())).collect(),
    }
}

fn look() -> Look {
    Look {
        ep_idx: 0,
        endpoint: "a:8000".to_owned(),
        ours: ours(),
        facts: facts(),
        heard: Some(Heard {
            socket: Socket::Open,
            replay: ReplayState::Applied,
            blocks: 3,
            contract: Contract::Verified,
        }),
        tokens: Ok(SAMPLES.iter().map(|_| Ok(ids())).collect()),
    }
}

/// The legs that are not `ok`, with their verdicts.
fn off(ours: &Ours, looks: &[Look]) -> Vec<(&'static str, Verdict)> {
    let looks: Vec<_> = looks.iter().map(|look| Look { ours: ours.clone(), ..look.clone() }).collect();
    let report = preflight(&looks);
    let all = report.endpoints.iter().flat_map(|endpoint| &endpoint.legs).chain(&report.pool);
    all.filter(|row| row.verdict != Verdict::Ok).map(|row| (row.leg, row.verdict)).collect()
}

fn off_one(change: impl FnOnce(&mut Look)) -> Vec<(&'static str, Verdict)> {
    let mut look = look();
    change(&mut look);
    off(&ours(), &[look])
}

fn unverified(look: &mut Look) {
    look.heard.as_mut().unwrap().contract = Contract::Unverified;
}

fn cache(look: &mut Look, change: impl FnOnce(&mut CacheConfig)) {
    let mut config = look.facts.cache.known().unwrap().clone();
    change(&mut config);
    look.facts.cache = Fact::Known(config);
}

fn row(report: &Report, leg: &str) -> Row {
    let all = report.endpoints.iter().flat_map(|endpoint| &endpoint.legs).chain(&report.pool);
    all.into_iter().find(|row| row.leg == leg).unwrap().clone()
}

#[test]
fn where_all_agrees_every_leg_holds_and_nothing_is_advised() {
    let report = preflight(&[look(), Look { ep_idx: 1, endpoint: "b:8000".to_owned(), ..look() }]);
    assert_eq!(report.verdict, Verdict::Ok);
    let legs: Vec<_> = report.endpoints[0].legs.iter().map(|row| row.leg).collect();
    assert_eq!(
        legs,
        [
            "version",
            "model",
            "tokenizer",
            "chat_template",
            "block_size",
            "algorithm",
            "seed",
            "prefix_caching",
            "events",
            "event_port",
            "ranks",
            "replay",
            "metrics"
        ]
    );
    assert_eq!(
        report.pool.iter().map(|row| row.leg).collect::<Vec<_>>(),
        ["pool_version", "pool_max_model_len", "pool_lora"]
    );
    let all = report.endpoints.iter().flat_map(|endpoint| &endpoint.legs).chain(&report.pool);
    assert!(all.into_iter().all(|row| row.advice.is_none()));
}

#[test]
fn an_endpoint_that_is_not_subscribed_has_no_legs_of_naming() {
    assert_eq!(off_one(|look| look.heard = None), []);
    let report = preflight(&[Look { heard: None, ..look() }]);
    assert!(!report.endpoints[0].legs.iter().any(|row| ["seed", "events", "replay"].contains(&row.leg)));
}

#[test]
fn an_engine_that_does_not_answer_is_unreachable_and_no_more() {
    fn gone<T>() -> Fact<T> {
        Fact::Missing(Missing::Unreachable("connection refused".to_owned()))
    }
    let facts =
        EngineFacts { version: gone(), models: gone(), cache: gone(), sources: gone(), ..EngineFacts::default() };
    let looks = [Look { facts, ..look() }, Look { ep_idx: 1, ..look() }];
    assert_eq!(off(&ours(), &looks), [("http", Verdict::Unreachable)]);
    assert_eq!(preflight(&looks).verdict, Verdict::Unreachable);
}

#[test]
fn what_the_events_prove_wins_over_what_the_labels_say() {
    assert_eq!(off_one(|look| cache(look, |config| config.block_size = Some(64))), [], "a hybrid model's label");
    assert_eq!(
        off_one(|look| look.facts.cache = Fact::Missing(Missing::Status(404))),
        [("prefix_caching", Verdict::Unknown)]
    );
}

#[test]
fn a_block_size_that_differs_is_broken_before_the_first_event() {
    let differs = |look: &mut Look| {
        unverified(look);
        cache(look, |config| config.block_size = Some(128));
    };
    assert_eq!(off_one(differs), [("block_size", Verdict::Broken), ("seed", Verdict::Unknown)]);
    let mut look = look();
    differs(&mut look);
    let found = row(&preflight(std::slice::from_ref(&look)), "block_size");
    assert_eq!((found.engine.as_str(), found.ours.as_str()), ("128", "16"));
    assert!(found.advice.unwrap().contains("kvBlockSize 128"));
    assert_eq!(agree(&ours(), &look.facts).iter().map(|row| row.leg).collect::<Vec<_>>(), ["block_size"]);
}

#[test]
fn an_algorithm_that_differs_is_broken_before_the_first_event() {
    for (algo, advice) in [("sha256", "kvHashAlgo sha256,"), ("md5", "--prefix-caching-hash-algo sha256_cbor")] {
        let mut look = look();
        unverified(&mut look);
        cache(&mut look, |config| config.hash_algo = Some(algo.to_owned()));
        let report = preflight(&[look]);
        let found = row(&report, "algorithm");
        assert_eq!((found.verdict, found.engine.as_str()), (Verdict::Broken, algo));
        assert!(found.advice.as_ref().unwrap().contains(advice), "{found:?}");
    }
}

#[test]
fn what_the_engine_does_not_say_is_unknown_and_says_how_to_find_out() {
    let silent = off_one(|look| {
        unverified(look);
        look.facts.cache = Fact::Missing(Missing::Status(404));
    });
    assert_eq!(
        silent,
        [
            ("block_size", Verdict::Unknown),
            ("algorithm", Verdict::Unknown),
            ("seed", Verdict::Unknown),
            ("prefix_caching", Verdict::Unknown)
        ]
    );
}

#[test]
fn a_seed_is_told_by_announcements_alone() {
    let seed = |contract: Contract, ours: &Ours, version: &str| {
        let mut look = look();
        look.facts.version = Fact::Known(Version::from(version.to_owned()));
        look.heard.as_mut().unwrap().contract = contract;
        row(&preflight(&[Look { ours: ours.clone(), ..look }]), "seed")
    };
    let mismatch = |leg, detail: &str| Contract::Mismatch { leg, detail: detail.to_owned() };
    assert_eq!(seed(Contract::ProvedByRequest, &ours(), "0.32.0").verdict, Verdict::Ok);
    let other = seed(mismatch(Leg::Seed, "engine PYTHONHASHSEED \"42\""), &ours(), "0.32.0");
    assert_eq!(other.verdict, Verdict::Broken);
    let advice = other.advice.unwrap();
    assert!(
        advice.contains("PYTHONHASHSEED \"42\"") && advice.contains("docker exec") && advice.contains("kubectl exec")
    );
    let hidden = seed(mismatch(Leg::Algorithm, "d"), &ours(), "0.32.0");
    assert_eq!((hidden.verdict, hidden.engine.as_str()), (Verdict::Unknown, "hidden behind algorithm"));
    let silent = seed(Contract::Unverified, &ours(), "0.32.0");
    assert_eq!((silent.verdict, silent.engine.as_str()), (Verdict::Unknown, "nothing announced yet"));
    assert!(silent.advice.unwrap().contains("printenv PYTHONHASHSEED"));

    let unset = Ours { seed: NoneSeed::Unset, ..ours() };
    assert!(!seed(Contract::Unverified, &unset, "0.32.0").advice.unwrap().contains("before vLLM 0.29"));
    assert!(seed(Contract::Unverified, &unset, "0.28.0").advice.unwrap().contains("before vLLM 0.29"));
    let random = Ours { algo: HashAlgo::XxhashCbor, ..unset.clone() };
    assert_eq!(seed(Contract::Unverified, &random, "0.32.0").verdict, Verdict::Broken);
    let rehash = Ours { keying: Keying::Rehash, ..random };
    assert_eq!(seed(mismatch(Leg::Seed, "d"), &rehash, "0.28.0").verdict, Verdict::Ok);
}

#[test]
fn prefix_caching_must_be_on() {
    let off = |look: &mut Look| cache(look, |config| config.prefix_caching = Some(false));
    assert_eq!(off_one(off), [("prefix_caching", Verdict::Broken)]);
}

#[test]
fn events_must_be_published_where_somebody_can_listen() {
    let with = |change: fn(&mut EventSource)| {
        off_one(move |look| {
            let mut changed = source(5557);
            change(&mut changed);
            look.facts.sources = Fact::Known(BTreeMap::from([(0, changed)]));
        })
    };
    let events = ("events", Verdict::Broken);
    assert_eq!(with(|source| source.enabled = false), [events]);
    assert_eq!(with(|source| source.publisher = "null".to_owned()), [events]);
    assert_eq!(with(|source| source.endpoint = Some("ipc:///tmp/kv".to_owned())), [events]);
    assert_eq!(off_one(|look| look.facts.sources = Fact::Known(BTreeMap::new())), [events]);
}

#[test]
fn an_old_version_is_judged_by_its_socket() {
    let old = |socket: Socket| {
        off_one(move |look| {
            look.facts.sources = Fact::Missing(Missing::Status(404));
            look.heard.as_mut().unwrap().socket = socket;
        })
    };
    assert_eq!(old(Socket::Open), []);
    let closed = old(Socket::Closed("connection refused".to_owned()));
    assert_eq!(closed, [("events", Verdict::Broken), ("event_port", Verdict::Broken)]);
    let mut look = look();
    look.facts.sources = Fact::Missing(Missing::Status(404));
    assert_eq!(agree(&ours(), &look.facts), []);
}

#[test]
fn the_event_port_must_be_the_rules_and_reachable() {
    assert_eq!(off(&Ours { zmq_port: 5558, ..ours() }, &[look()]), [("event_port", Verdict::Broken)]);
    let shut = |look: &mut Look| look.heard.as_mut().unwrap().socket = Socket::Closed("refused".to_owned());
    assert_eq!(off_one(shut), [("event_port", Verdict::Broken)]);
}

#[test]
fn replay_is_a_warning_at_most() {
    let replay = |change: fn(&mut Look)| off_one(change);
    let warned = [("replay", Verdict::Warn)];
    assert_eq!(replay(|look| look.heard.as_mut().unwrap().replay = ReplayState::Pending), []);
    assert_eq!(replay(|look| look.heard.as_mut().unwrap().replay = ReplayState::Unavailable), warned);
    assert_eq!(off(&Ours { replay_port: None, ..ours() }, &[look()]), warned);
    let mut look = look();
    look.heard.as_mut().unwrap().replay = ReplayState::Unavailable;
    let other = preflight(&[Look { ours: Ours { replay_port: Some(7000), ..ours() }, ..look }]);
    assert!(row(&other, "replay").advice.unwrap().contains("kvReplayPort 6557"));
    assert_eq!(other.verdict, Verdict::Warn);
}

#[test]
fn ranks_must_be_counted_where_a_rule_counts_them() {
    let two = |look: &mut Look| {
        look.facts.sources = Fact::Known(BTreeMap::from([(0, source(5557)), (1, source(5558))]));
    };
    assert_eq!(off_one(two), []);
    let mut look = look();
    two(&mut look);
    assert_eq!(off(&Ours { ranks: Some(1), ..ours() }, &[look]), [("ranks", Verdict::Broken)]);
}

#[test]
fn the_rules_model_must_be_listed() {
    assert_eq!(off(&Ours { model: Some("n".to_owned()), ..ours() }, &[look()]), [("model", Verdict::Broken)]);
    assert_eq!(off(&Ours { model: None, ..ours() }, &[look()]), []);
    let locked = off_one(|look| look.facts.models = Fact::Missing(Missing::Status(401)));
    assert_eq!(
        locked,
        [("model", Verdict::Unknown), ("pool_max_model_len", Verdict::Unknown), ("pool_lora", Verdict::Unknown)]
    );
}

#[test]
fn tokens_must_be_the_engines() {
    let tokenizer = ("tokenizer", Verdict::Broken);
    let template = ("chat_template", Verdict::Broken);
    assert_eq!(off_one(|look| look.tokens = Err("no folder".to_owned())), [tokenizer, template]);
    let nth = |number: usize, tokens: Result<Vec<TokenId>, String>| {
        off_one(move |look| look.tokens.as_mut().unwrap()[number] = tokens)
    };
    assert_eq!(nth(1, Ok([1, 2, 4].map(TokenId).to_vec())), [tokenizer]);
    assert_eq!(nth(3, Ok([1, 2].map(TokenId).to_vec())), [tokenizer]);
    assert_eq!(nth(4, Ok([9].map(TokenId).to_vec())), [template]);
    assert_eq!(nth(5, Err("template".to_owned())), [template]);
    let asked = |look: &mut Look| look.facts.tokens[0] = Fact::Missing(Missing::Status(404));
    assert_eq!(off_one(asked), [("tokenizer", Verdict::Unknown)]);
    let no_chat = off_one(|look| {
        for number in (0..SAMPLES.len()).filter(|number| SAMPLES[*number].is_chat()) {
            look.facts.tokens[number] = Fact::Missing(Missing::Status(400));
            look.tokens.as_mut().unwrap()[number] = Err("no_template".to_owned());
        }
    });
    assert_eq!(no_chat, [], "a model without a template has none on either side");
    let mut look = look();
    look.tokens.as_mut().unwrap()[1] = Ok([1, 2, 4].map(TokenId).to_vec());
    let found = row(&preflight(&[look]), "tokenizer");
    assert_eq!(found.engine, "text 1: 3 tokens, token 2 is 3");
    assert_eq!(found.ours, "text 1: 3 tokens, token 2 is 4");
}

#[test]
fn a_missing_metric_is_told_and_a_cold_engine_is_not_blamed() {
    let without = |names: &[&str]| {
        let series: BTreeSet<String> =
            SERIES.iter().filter(|name| !names.contains(*name)).map(|&name| name.to_owned()).collect();
        off_one(move |look| look.facts.series = Fact::Known(series))
    };
    assert_eq!(without(&["vllm:kv_cache_usage_perc"]), [("metrics", Verdict::Broken)]);
    assert_eq!(without(&["vllm:time_to_first_token_seconds_bucket"]), [("metrics", Verdict::Broken)]);
    assert_eq!(without(&SERIES[4..]), [("metrics", Verdict::Unknown)]);
    let silent = off_one(|look| look.facts.series = Fact::Missing(Missing::Status(404)));
    assert_eq!(silent, [("metrics", Verdict::Unknown)]);
}

#[test]
fn versions_must_be_known_ones_and_equal_in_a_pool() {
    let version = |text: &str| Fact::Known(Version::from(text.to_owned()));
    assert_eq!(off_one(|look| look.facts.version = version("0.9.2")), [("version", Verdict::Broken)]);
    let told = |look: &mut Look| look.facts.version = Fact::Missing(Missing::Status(404));
    assert_eq!(off_one(told), [("version", Verdict::Warn), ("pool_version", Verdict::Unknown)]);
    let mut other = Look { ep_idx: 1, endpoint: "b:8000".to_owned(), ..look() };
    other.facts.version = version("0.33.0");
    let report = preflight(&[look(), other]);
    let found = row(&report, "pool_version");
    assert_eq!((found.verdict, found.engine.as_str()), (Verdict::Broken, "0.32.0: a:8000; 0.33.0: b:8000"));
}

#[test]
fn lengths_and_adapters_must_be_equal_in_a_pool() {
    let with = |models: Vec<Model>| Look { facts: EngineFacts { models: Fact::Known(models), ..facts() }, ..look() };
    let base = || model("m", None, "models/m");
    let short = with(vec![Model { max_model_len: Some(1), ..base() }]);
    assert_eq!(off(&ours(), &[look(), short]), [("pool_max_model_len", Verdict::Broken)]);
    let adapter = |root: &str| with(vec![base(), model("a", Some("m"), root)]);
    let second = Look { endpoint: "b:8000".to_owned(), ..adapter("/a") };
    assert_eq!(off(&ours(), &[adapter("/a"), second]), []);
    let of = |looks: &[Look]| off(&ours(), looks);
    let lost = Look { endpoint: "b:8000".to_owned(), ..look() };
    assert_eq!(of(&[adapter("/a"), lost]), [("pool_lora", Verdict::Broken)]);
    let moved = || Look { endpoint: "b:8000".to_owned(), ..adapter("/b") };
    assert_eq!(of(&[adapter("/a"), moved()]), [("pool_lora", Verdict::Broken)]);
    let old = |mut look: Look| {
        look.facts.version = Fact::Known(Version::from("0.30.0".to_owned()));
        look
    };
    assert_eq!(of(&[old(adapter("/a")), old(moved())]), [("pool_lora", Verdict::Warn)], "only the name is hashed");
}

#[test]
fn the_report_has_the_shape_that_scripts_read() {
    let mut look = look();
    cache(&mut look, |config| config.prefix_caching = Some(false));
    let report = serde_json::to_value(preflight(&[look])).unwrap();
    assert_eq!(report["verdict"], "broken");
    assert_eq!((&report["endpoints"][0]["ep_idx"], &report["endpoints"][0]["endpoint"]), (&0.into(), &"a:8000".into()));
    let leg = &report["endpoints"][0]["legs"][7];
    let keys: Vec<_> = leg.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, ["leg", "engine", "ours", "verdict", "advice"]);
    assert_eq!((&leg["leg"], &leg["verdict"]), (&"prefix_caching".into(), &"broken".into()));
}
