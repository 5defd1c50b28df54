//! One leg of one endpoint.

use super::preflight::{Heard, OurTokens, Ours, Socket};
use super::report::{Row, Verdict};
use super::sample::SAMPLES;
use crate::contract::attest::{Contract, Leg};
use crate::contract::{HashAlgo, KeyEra, NoneSeed, TokenId};
use crate::fleet::{EngineFacts, Fact, Keying, Missing};
use crate::state::kv::ReplayState;

use Verdict::{Broken, Ok as Holds, Unknown, Warn};

/// The oldest vLLM whose names of blocks are known: before, digests are chained in other ways.
const OLDEST: (u32, u32) = (0, 10);
/// How events are switched on.
const EVENTS_ON: &str = "start the engine with --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \
                         \"zmq\", \"endpoint\": \"tcp://*:5557\"}'";
/// How a replay socket is opened.
const REPLAY_ON: &str = "to learn at once what an engine holds, add \"replay_endpoint\": \"tcp://*:6557\" to the engine's \
                         --kv-events-config";
/// Our side where we name blocks ourselves.
const NOT_NEEDED: &str = "not needed (kvKeying rehash)";
/// Series that the document's collector needs.
///
/// Source: the source document, section 6.4.
const SERIES: [&str; 4] =
    ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"];
/// Those that some versions register with the first request only.
const SERIES_OF_REQUESTS: [&str; 3] =
    ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket"];
/// What the engine before vLLM's second generation called its cache usage.
const OLD_USAGE: &str = "vllm:gpu_cache_usage_perc";

pub(super) fn version(facts: &EngineFacts) -> Row {
    let version = match &facts.version {
        Fact::Known(version) => version,
        Fact::Missing(why) => {
            return Row::new("version", Warn, why.to_string(), "")
                .advise("how the engine writes extra keys is found from its events instead");
        }
    };
    let era = match facts.era() {
        Some(KeyEra::Tagged) => "extra keys tagged",
        Some(KeyEra::Untagged) => "extra keys untagged",
        None => "extra keys as its events show",
    };
    if version.release.is_some_and(|release| release < OLDEST) {
        return Row::new("version", Broken, &version.text, "0.10.2 and later")
            .advise("older engines name blocks in ways that no rule can ask for: use a newer one");
    }
    Row::new("version", Holds, &version.text, era)
}

pub(super) fn model(ours: &Ours, facts: &EngineFacts) -> Row {
    let wanted = ours.model.as_deref().unwrap_or("any");
    if let Fact::Missing(why) = &facts.models {
        let advice = match why {
            Missing::Status(401 | 403) => "give the engine's --api-key with --engine-key",
            _ => "look at the engine's GET /v1/models",
        };
        return Row::new("model", Unknown, why.to_string(), wanted).advise(advice);
    }
    let listed: Vec<_> = facts.models.known().into_iter().flatten().map(|model| model.id.as_str()).collect();
    let shown = listed.join(", ");
    match &ours.model {
        Some(wanted) if !listed.contains(&wanted.as_str()) => Row::new("model", Broken, shown, wanted)
            .advise("create the rule with the model_name that the engine lists, or start it with --served-model-name"),
        _ if listed.is_empty() => Row::new("model", Unknown, "lists none", wanted),
        _ => Row::new("model", Holds, shown, wanted),
    }
}

pub(super) fn tokenizer(facts: &EngineFacts, ours: &OurTokens) -> Row {
    compare("tokenizer", facts, ours, false)
}

pub(super) fn template(facts: &EngineFacts, ours: &OurTokens) -> Row {
    compare("chat_template", facts, ours, true)
}

/// Both sides' tokens of those samples that are chats, or are none.
fn compare(leg: &'static str, facts: &EngineFacts, ours: &OurTokens, chats: bool) -> Row {
    let ours = match ours {
        Ok(ours) => ours,
        Err(why) => {
            return Row::new(leg, Broken, "", "none staged")
                .advise(format!("{why}; without it no prompt can be named"));
        }
    };
    let pairs = facts.tokens.iter().zip(ours).zip(SAMPLES).enumerate();
    let mut compared = 0;
    let mut unknown: Option<Row> = None;
    for (number, ((engine, ours), sample)) in pairs {
        if sample.is_chat() != chats {
            continue;
        }
        match (engine, ours) {
            (Fact::Known(engine), Ok(ours)) if engine == ours => compared += 1,
            (Fact::Known(engine), Ok(ours)) => return differ(leg, number, engine, ours),
            (Fact::Known(engine), Err(why)) => {
                let advice = if chats {
                    "stage the model's chat_template.jinja or tokenizer_config.json; chats go by the selector until then"
                } else {
                    "stage the tokenizer.json, tokenizer_config.json and config.json of the model; prompts go by the \
                     selector until then"
                };
                return Row::new(leg, Broken, count(engine), format!("no exact tokens ({why})")).advise(advice);
            }
            (Fact::Missing(Missing::Status(400)), Err(_)) if chats => compared += 1,
            (Fact::Missing(why), _) => {
                unknown = Some(
                    Row::new(leg, Unknown, format!("/tokenize: {why}"), "staged")
                        .advise("compare the staged files with the engine's own"),
                );
            }
        }
    }
    let agreed = format!("{compared} texts, same tokens");
    unknown.unwrap_or_else(|| match compared {
        0 => Row::new(leg, Unknown, "/tokenize: not asked", "staged"),
        _ => Row::new(leg, Holds, agreed, "staged"),
    })
}

fn differ(leg: &'static str, number: usize, engine: &[TokenId], ours: &[TokenId]) -> Row {
    let at = engine.iter().zip(ours).position(|(a, b)| a != b).unwrap_or_else(|| engine.len().min(ours.len()));
    let shown = |ids: &[TokenId]| format!("text {number}: {}, token {at} is {}", count(ids), id_at(ids, at));
    Row::new(leg, Broken, shown(engine), shown(ours)).advise(
        "stage the very files that the engine serves: tokenizer.json, tokenizer_config.json, config.json, template",
    )
}

fn count(ids: &[TokenId]) -> String {
    format!("{} tokens", ids.len())
}

fn id_at(ids: &[TokenId], at: usize) -> String {
    ids.get(at).map_or_else(|| "absent".to_owned(), |id| id.0.to_string())
}

/// What a proof from the engine's own events makes of a leg of naming.
fn proved(leg: &'static str, contract: &Contract, engine: &str, ours: &str) -> Option<Row> {
    let by = match contract {
        Contract::Verified => "its events agree",
        Contract::ProvedByRequest => "a request's names met announced ones",
        Contract::Unverified | Contract::Mismatch { .. } => return None,
    };
    let engine = if engine.is_empty() { by.to_owned() } else { format!("{engine}: {by}") };
    Some(Row::new(leg, Holds, engine, ours))
}

pub(super) fn block_size(ours: &Ours, facts: &EngineFacts, contract: &Contract) -> Row {
    let engine = facts.cache.known().and_then(|cache| cache.block_size);
    let (shown, rule) = (engine.map_or_else(String::new, |size| size.to_string()), ours.block_size.to_string());
    if let Some(row) = proved("block_size", contract, &shown, &rule) {
        return row;
    }
    if let Contract::Mismatch { leg: Leg::BlockSize, detail } = contract {
        return Row::new("block_size", Broken, shown, rule).advise(detail);
    }
    match engine {
        Some(size) if size == ours.block_size.get() => Row::new("block_size", Holds, shown, rule),
        Some(size) => Row::new("block_size", Broken, shown, &rule)
            .advise(format!("create the rule with kvBlockSize {size}, or start the engine with --block-size {rule}")),
        None => Row::new("block_size", Unknown, why(&facts.cache, "does not say"), rule)
            .advise("compare the engine's --block-size with kvBlockSize"),
    }
}

pub(super) fn algorithm(ours: &Ours, facts: &EngineFacts, contract: &Contract) -> Row {
    let engine = facts.cache.known().and_then(|cache| cache.hash_algo.clone());
    let (shown, rule) = (engine.clone().unwrap_or_default(), ours.algo.label());
    if ours.keying == Keying::Rehash {
        return Row::new("algorithm", Holds, shown, NOT_NEEDED);
    }
    if let Some(row) = proved("algorithm", contract, &shown, rule) {
        return row;
    }
    if let Contract::Mismatch { leg: Leg::Algorithm, detail } = contract {
        return Row::new("algorithm", Broken, shown, rule).advise(format!("{detail}{}", meanwhile(ours)));
    }
    match engine {
        Some(algo) if algo == rule => Row::new("algorithm", Holds, shown, rule),
        Some(algo) if algo.parse::<HashAlgo>().is_ok() => Row::new("algorithm", Broken, shown, rule).advise(format!(
            "create the rule with kvHashAlgo {algo}, or start the engine with --prefix-caching-hash-algo {rule}"
        )),
        Some(_) => Row::new("algorithm", Broken, shown, rule)
            .advise(format!("start the engine with --prefix-caching-hash-algo {rule}")),
        None => Row::new("algorithm", Unknown, why(&facts.cache, "does not say"), rule)
            .advise("compare the engine's --prefix-caching-hash-algo with kvHashAlgo"),
    }
}

/// The seed, which no engine tells: its announcements do.
pub(super) fn seed(ours: &Ours, facts: &EngineFacts, heard: &Heard) -> Row {
    let rule = match &ours.seed {
        NoneSeed::Text(text) => format!("LLB_KV_NONE_HASH_SEED {text:?}"),
        NoneSeed::Unset => "LLB_KV_NONE_HASH_SEED unset".to_owned(),
    };
    if ours.keying == Keying::Rehash {
        return Row::new("seed", Holds, "any", NOT_NEEDED);
    }
    if let Some(row) = proved("seed", &heard.contract, "", &rule) {
        return row;
    }
    match &heard.contract {
        Contract::Mismatch { leg: Leg::Seed, detail } => {
            let advice = format!("{detail}{}; {}", meanwhile(ours), how_to_see_the_seed());
            return Row::new("seed", Broken, "another", rule).advise(advice);
        }
        Contract::Mismatch { leg, detail } => {
            return Row::new("seed", Unknown, format!("hidden behind {leg}"), rule)
                .advise(format!("{detail}; mend {leg} first; {}", how_to_see_the_seed()));
        }
        _ => {}
    }
    if ours.seed == NoneSeed::Unset && ours.algo.label().starts_with("xxhash") {
        return Row::new("seed", Broken, "random in every life unless PYTHONHASHSEED is set", rule).advise(format!(
            "start the engine with PYTHONHASHSEED=0 and kvlb with LLB_KV_NONE_HASH_SEED=0: with {} an unset seed is \
             random",
            ours.algo
        ));
    }
    let unset = match (&ours.seed, facts.fixes_unset_seed()) {
        (NoneSeed::Unset, Some(false)) => {
            "; before vLLM 0.29 an unset PYTHONHASHSEED is random: set it, and LLB_KV_NONE_HASH_SEED, to the same text"
        }
        _ => "",
    };
    let size = ours.block_size;
    Row::new("seed", Unknown, "nothing announced yet", rule).advise(format!(
        "no engine tells its seed over HTTP, its first block does: send it a prompt of more than {size} tokens and run \
         this again, or {}{unset}",
        how_to_see_the_seed()
    ))
}

/// What becomes of an endpoint whose names are disproved.
fn meanwhile(ours: &Ours) -> &'static str {
    match ours.keying {
        Keying::Auto => "; until then kvKeying auto names its blocks in our own way (rehash)",
        Keying::Parity | Keying::Rehash => "",
    }
}

fn how_to_see_the_seed() -> &'static str {
    "look: `docker exec ENGINE printenv PYTHONHASHSEED`, or `kubectl exec POD -- printenv PYTHONHASHSEED` (no output: \
     unset)"
}

pub(super) fn prefix_caching(facts: &EngineFacts) -> Row {
    let on = facts.cache.known().and_then(|cache| cache.prefix_caching);
    match on {
        Some(true) => Row::new("prefix_caching", Holds, "on", "needed"),
        Some(false) => Row::new("prefix_caching", Broken, "off", "needed")
            .advise("start the engine with --enable-prefix-caching: without it there is nothing to route to"),
        None => Row::new("prefix_caching", Unknown, why(&facts.cache, "does not say"), "needed")
            .advise("look for --enable-prefix-caching among the engine's flags"),
    }
}

/// Whether events are published; `socket` is what a connection found.
pub(super) fn events(facts: &EngineFacts, socket: Option<&Socket>) -> Row {
    let row = |verdict, engine: &str| Row::new("events", verdict, engine, "needed");
    match &facts.sources {
        Fact::Known(sources) => match sources.values().find(|source| !source.is_open()) {
            None if sources.is_empty() => row(Broken, "off").advise(EVENTS_ON),
            None => row(Holds, "on"),
            Some(source) if !source.enabled => row(Broken, "off").advise(EVENTS_ON),
            Some(source) if source.publisher != "zmq" => {
                row(Broken, &format!("on, publisher {:?}", source.publisher)).advise(EVENTS_ON)
            }
            Some(source) => row(Broken, &format!("on, at {}", source.endpoint.as_deref().unwrap_or("no address")))
                .advise("let the engine bind a TCP port: \"endpoint\": \"tcp://*:5557\" in its --kv-events-config"),
        },
        Fact::Missing(why) => match socket {
            Some(Socket::Open) => row(Holds, "on (heard)"),
            Some(Socket::Closed(_)) => row(Broken, "nobody publishes").advise(EVENTS_ON),
            None => row(Unknown, &format!("/kv_event_sources: {why}")).advise("vLLM tells from 0.31 on"),
        },
    }
}

pub(super) fn event_port(ours: &Ours, facts: &EngineFacts, socket: Option<&Socket>) -> Row {
    let rule = ours.zmq_port.to_string();
    let told = facts.first_source().and_then(crate::fleet::EventSource::port);
    let shown = told.map_or_else(|| "not told".to_owned(), |port| port.to_string());
    match (told, socket) {
        (Some(port), _) if port != ours.zmq_port => Row::new("event_port", Broken, shown, rule)
            .advise(format!("create the rule with kvZmqPort {port}, or let the engine publish at {}", ours.zmq_port)),
        (_, Some(Socket::Open)) => Row::new("event_port", Holds, "reached", rule),
        (_, Some(Socket::Closed(why))) => Row::new("event_port", Broken, format!("not reached: {why}"), rule).advise(
            format!("on the engine's host, `ss -tln | grep :{}` must show a listener; open the port", ours.zmq_port),
        ),
        (Some(_), None) => Row::new("event_port", Holds, shown, rule),
        (None, None) => Row::new("event_port", Unknown, shown, rule),
    }
}

pub(super) fn ranks(ours: &Ours, facts: &EngineFacts) -> Row {
    let rule = ours.ranks.map_or_else(|| "as many as there are".to_owned(), |ranks| ranks.to_string());
    let Some(engine) = facts.ranks() else {
        return Row::new("ranks", Warn, "does not say", rule)
            .advise("compare the engine's --data-parallel-size with kvDpRankCount");
    };
    let shown = engine.to_string();
    if ours.ranks.is_some_and(|ranks| usize::from(ranks) != engine) {
        return Row::new("ranks", Broken, shown, rule)
            .advise(format!("create the rule with kvDpRankCount {engine}: each rank is a cache of its own"));
    }
    Row::new("ranks", Holds, shown, rule)
}

/// Replay is a convenience: without it an inventory fills with what is announced from now on.
pub(super) fn replay(ours: &Ours, facts: &EngineFacts, replay: ReplayState) -> Row {
    let Some(port) = ours.replay_port else {
        return Row::new("replay", Warn, "", "off").advise("LLB_KV_REPLAY_PORT_OFFSET or kvReplayPort turns it on");
    };
    let told = facts.first_source().and_then(crate::fleet::EventSource::replay_port);
    let rule = port.to_string();
    match (replay, told) {
        (ReplayState::Applied, _) => Row::new("replay", Holds, "answered", rule),
        (_, Some(told)) if told != port => {
            Row::new("replay", Warn, told.to_string(), rule).advise(format!("create the rule with kvReplayPort {told}"))
        }
        (ReplayState::Unavailable, _) => Row::new("replay", Warn, "does not answer", rule).advise(REPLAY_ON),
        (_, Some(told)) => Row::new("replay", Holds, told.to_string(), rule),
        (_, None) => Row::new("replay", Warn, "has not answered yet", rule).advise(REPLAY_ON),
    }
}

pub(super) fn metrics(facts: &EngineFacts) -> Row {
    let needed = format!("{} families", SERIES.len() + SERIES_OF_REQUESTS.len());
    let series = match &facts.series {
        Fact::Known(series) => series,
        Fact::Missing(why) => {
            return Row::new("metrics", Unknown, format!("/metrics: {why}"), needed)
                .advise("the engine's queue and cache size stay unknown without them");
        }
    };
    let missing = |names: &[&'static str]| -> Vec<&'static str> {
        names.iter().copied().filter(|name| !series.contains(*name)).collect()
    };
    let (always, of_requests) = (missing(&SERIES), missing(&SERIES_OF_REQUESTS));
    if !always.is_empty() {
        let old = if series.contains(OLD_USAGE) { "; gpu_cache_usage_perc is the V0 engine's name" } else { "" };
        return Row::new("metrics", Broken, format!("without {}", always.join(", ")), needed)
            .advise(format!("use an engine that reports them{old}"));
    }
    match of_requests.len() {
        0 => Row::new("metrics", Holds, "all", needed),
        n if n == SERIES_OF_REQUESTS.len() => {
            Row::new("metrics", Unknown, format!("without {}", of_requests.join(", ")), needed)
                .advise("some versions register them with their first request: send one and run this again")
        }
        _ => Row::new("metrics", Broken, format!("without {}", of_requests.join(", ")), needed)
            .advise("use an engine that reports them"),
    }
}

fn why<T>(fact: &Fact<T>, otherwise: &str) -> String {
    fact.missing().map_or_else(|| otherwise.to_owned(), ToString::to_string)
}
