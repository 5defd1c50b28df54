//! Conversations, sessions and texts: who was somewhere goes there again, while nothing speaks against it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet;

use std::collections::BTreeSet;

use kvlb_tests::harness::http::{Answer, Client};
use kvlb_tests::harness::{eventually, temp_dir, until_some};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Duration, sleep};

use fleet::trio::{all_quiet, completions};
use fleet::{BLOCK, Fleet, PATH, SOON, Setup, Talker, completion, quick};

const FIELD: &str = "X-Conversation-Id";

async fn three(rule: Value) -> Fleet {
    let engines = ["a", "b", "c"].map(quick).to_vec();
    Fleet::start(Setup { engines, rule, ..Setup::default() }).await.unwrap()
}

/// Three engines that nobody asks for their blocks.
async fn plain(rule: Value) -> Fleet {
    let mut off = rule;
    off["kvExactMode"] = json!(0);
    let fleet = three(json!({})).await;
    fleet.put_rule(|body| add(body, &off)).await.unwrap();
    fleet
}

fn add(body: &mut Value, fields: &Value) {
    for (name, value) in fields.as_object().unwrap() {
        body["serviceArguments"][name] = value.clone();
    }
}

/// Too short for any block.
fn short(number: u32) -> Value {
    completion(&[number, 7, 7], 1)
}

async fn say(fleet: &Fleet, conversation: &str, body: &Value) -> Answer {
    fleet.ask_with(&[(FIELD, conversation)], body).await.unwrap()
}

fn tier(answer: &Answer) -> &str {
    answer.head.header("x-kvlb-tier").unwrap_or_default()
}

fn repin(answer: &Answer) -> Option<&str> {
    answer.head.header("x-kvlb-repin")
}

async fn chosen_by(fleet: &Fleet, tier: &str) -> u64 {
    fleet.count(&format!("kvlb_tier_choices_total{{service=\"{}\",tier=\"{tier}\"}}", fleet.id())).await.unwrap()
}

async fn repinned(fleet: &Fleet, kind: &str, reason: &str) -> u64 {
    let labels = format!("kind=\"{kind}\",reason=\"{reason}\",service=\"{}\"", fleet.id());
    fleet.count(&format!("kvlb_session_repins_total{{{labels}}}")).await.unwrap()
}

async fn remembered(fleet: &Fleet, kind: &str) -> u64 {
    fleet.count(&format!("kvlb_sessions{{kind=\"{kind}\",service=\"{}\"}}", fleet.id())).await.unwrap()
}

/// The engines that some requests went to.
async fn engines_of(fleet: &Fleet, times: u32, headers: &[(&str, &str)], more: &Value) -> BTreeSet<usize> {
    let mut engines = BTreeSet::new();
    for number in 0..times {
        let mut body = short(number);
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        engines.insert(fleet.who(&fleet.ask_with(headers, &body).await.unwrap()).unwrap());
    }
    engines
}

#[tokio::test]
async fn a_conversation_stays_where_it_began() {
    let fleet = plain(json!({})).await;
    let mut homes = Vec::new();
    for name in ["one", "two", "three"] {
        let first = say(&fleet, name, &short(0)).await;
        assert_eq!(tier(&first), "2", "{name} is new");
        homes.push((name, fleet.who(&first)));
    }
    assert_eq!(homes.iter().map(|(_, home)| home).collect::<BTreeSet<_>>().len(), 3, "the selector goes in turn");
    for number in 1..5 {
        for (name, home) in &homes {
            let next = say(&fleet, name, &short(number)).await;
            assert_eq!((fleet.who(&next), tier(&next), repin(&next)), (*home, "1", None));
        }
    }
    assert_eq!((chosen_by(&fleet, "1").await, chosen_by(&fleet, "2").await), (12, 3));
    assert_eq!(remembered(&fleet, "conversation").await, 3);
    assert_eq!(engines_of(&fleet, 3, &[], &json!({})).await.len(), 3, "who names none goes in turn");
    // Neither what a gateway made up for each request, nor a request's own id, is a conversation.
    assert_eq!(engines_of(&fleet, 3, &[(FIELD, "auto-12-34")], &json!({})).await.len(), 3);
    assert_eq!(engines_of(&fleet, 3, &[("X-Request-Id", "one")], &json!({})).await.len(), 3);
    assert_eq!(remembered(&fleet, "conversation").await, 3);
    // A change of the rule leaves conversations where they are.
    fleet.put_rule(|body| add(body, &json!({"kvExactMode": 0, "pd_session_ttl_sec": 9}))).await.unwrap();
    let next = say(&fleet, "one", &short(9)).await;
    assert_eq!((fleet.who(&next), tier(&next)), (homes[0].1, "1"));
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn a_user_is_a_conversation_where_the_rule_says_so() {
    let fleet = plain(json!({})).await;
    let user = json!({"user": "somebody"});
    assert_eq!(engines_of(&fleet, 3, &[], &user).await.len(), 3);
    fleet.put_rule(|body| add(body, &json!({"kvExactMode": 0, "session_from_user": true}))).await.unwrap();
    assert_eq!(engines_of(&fleet, 6, &[], &user).await.len(), 1);
    assert_eq!(engines_of(&fleet, 3, &[], &json!({})).await.len(), 3);
    // Also of a body that is no prompt; the header goes first.
    let image = json!({"user": "somebody", "prompt_embeds": "x"});
    assert_eq!(engines_of(&fleet, 3, &[], &image).await, engines_of(&fleet, 1, &[], &user).await);
    let named = [say(&fleet, "x", &short(0)).await, say(&fleet, "x", &short(1)).await].map(|answer| fleet.who(&answer));
    assert_eq!(named[0], named[1]);
    assert_eq!(remembered(&fleet, "conversation").await, 2);
}

#[tokio::test]
async fn in_a_prefill_decode_rule_a_user_is_a_conversation_without_being_asked_for() {
    let fleet = three(json!({})).await;
    fleet
        .put_rule(|body| {
            body["serviceArguments"]["kvExactMode"] = json!(1);
            for (endpoint, role) in [(0, 1), (1, 1), (2, 2)] {
                body["endpoints"][endpoint]["ep_role"] = json!(role);
            }
        })
        .await
        .unwrap();
    // Another engine decodes; which one computed the prompt is told beside it.
    let computed_by = async |more: &Value| {
        let mut engines = BTreeSet::new();
        for number in 0..4 {
            let mut body = short(number);
            more.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
            let answer = fleet.ask_with(&[], &body).await.unwrap();
            assert_eq!(fleet.who(&answer), Some(2));
            engines.insert(answer.head.header("x-kvlb-prefill-endpoint").unwrap().to_owned());
        }
        engines
    };
    assert_eq!(computed_by(&json!({})).await.len(), 2, "loads are equal: in turn");
    assert_eq!(computed_by(&json!({"user": "somebody"})).await.len(), 1);
}

#[tokio::test]
async fn the_access_log_tells_who_chose_and_why_a_conversation_moved() {
    let dir = temp_dir().unwrap();
    let log: &'static str = dir.path().join("access.log").display().to_string().leak();
    let (engines, rule) = (["a", "b"].map(quick).to_vec(), json!({"cb_enable": false}));
    let args = vec!["--access-log", "full", "--access-log-file", log];
    let mut fleet = Fleet::start(Setup { engines, rule, args, ..Setup::default() }).await.unwrap();
    let home = fleet.who(&say(&fleet, "x", &short(0)).await).unwrap();
    say(&fleet, "x", &short(1)).await;
    fleet.engines[home].kill().await;
    say(&fleet, "x", &short(2)).await;
    let lines = until_some(SOON, "three lines are written", async || {
        let text = std::fs::read_to_string(log).ok()?;
        let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        (lines.len() == 3).then_some(lines)
    });
    let lines = lines.await.unwrap();
    let told: Vec<_> = lines.iter().map(|line| (line["tier"].as_str(), line["repin"].as_str())).collect();
    assert_eq!(told, [(Some("2"), None), (Some("1"), None), (Some("2"), Some("tried"))]);
    assert!(!lines.iter().any(|line| line.to_string().contains("\"x\"")), "a conversation's id is never in it");
}

#[tokio::test]
async fn a_conversation_whose_engine_dies_moves_and_stays_where_it_moved() {
    let mut fleet = plain(json!({"cb_enable": false})).await;
    let home = fleet.who(&say(&fleet, "x", &short(0)).await).unwrap();
    fleet.engines[home].kill().await;
    let moved = say(&fleet, "x", &short(1)).await;
    let new = fleet.who(&moved).unwrap();
    assert!(new != home && repin(&moved) == Some("tried"), "{:?}", repin(&moved));
    fleet.engines[home].restart().await.unwrap();
    for number in 2..8 {
        let next = say(&fleet, "x", &short(number)).await;
        assert_eq!((fleet.who(&next), tier(&next)), (Some(new), "1"));
    }
    assert_eq!(repinned(&fleet, "conversation", "tried").await, 1);
    // One that an operator takes out is left for that.
    let name = fleet.engine_at(new).ip().to_string();
    let state = async |word: &str| {
        let order = json!({"hostName": name, "epPort": 0, "epProto": "tcp", "state": word});
        fleet.kvlb.api("POST", "/netlox/v1/config/endpointhoststate", Some(&order)).await.unwrap()
    };
    assert_eq!(state("red").await.0, 200);
    let moved = say(&fleet, "x", &short(9)).await;
    let third = fleet.who(&moved);
    assert!(third != Some(new) && repin(&moved) == Some("out"), "{:?}", repin(&moved));
    assert_eq!(state("green").await.0, 200);
    assert_eq!(fleet.who(&say(&fleet, "x", &short(10)).await), third);
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_engine_that_fails_a_request_loses_its_conversation() {
    let fleet = plain(json!({"cb_enable": false})).await;
    let home = fleet.who(&say(&fleet, "x", &short(0)).await).unwrap();
    fleet.engines[home].faults().set(|plan| plan.die_after_chunks = Some(0));
    let died = Talker::new(fleet.vip).ask(&[(FIELD, "x")], &short(1)).await.unwrap();
    assert_eq!((died.head.status, remembered(&fleet, "conversation").await), (502, 0));
    fleet.engines[home].faults().clear();
    assert_eq!(tier(&say(&fleet, "x", &short(2)).await), "2");
    // An engine that says that it cannot gets no conversation by it, and loses none.
    fleet.engines.iter().for_each(|engine| engine.faults().set(|plan| plan.status = Some(500)));
    for conversation in ["x", "y"] {
        let refused = Talker::new(fleet.vip).ask(&[(FIELD, conversation)], &short(3)).await.unwrap();
        assert_eq!((refused.head.status, remembered(&fleet, "conversation").await), (500, 1));
    }
    fleet.engines.iter().for_each(|engine| engine.faults().clear());
    assert_eq!(tier(&say(&fleet, "x", &short(4)).await), "1");
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn a_pin_yields_to_a_prefix_that_is_known_to_be_much_deeper_elsewhere() {
    let fleet = three(json!({})).await;
    let long: Vec<u32> = (0..12 * 16).map(|at| 5000 + at).collect();
    let body = completion(&long, 1);
    let home = fleet.who(&say(&fleet, "x", &short(0)).await).unwrap();
    let other = (home + 1) % 3;
    // Eight blocks more are not worth a move, nine are.
    fleet.warm(other, &long[..8 * BLOCK]).await.unwrap();
    fleet.agree().await.unwrap();
    let stays = fleet.explain_in("x", &body).await;
    assert_eq!(
        (&stays["tier"], &stays["endpoint"], &stays["repin"]),
        (&json!("1"), &json!(home), &Value::Null),
        "{stays}"
    );
    fleet.warm(other, &long).await.unwrap();
    fleet.agree().await.unwrap();
    let told = fleet.explain_in("x", &body).await;
    assert_eq!((&told["tier"], &told["endpoint"], &told["repin"]), (&json!("1.5"), &json!(other), &json!("deeper")));
    let yields = say(&fleet, "x", &body).await;
    assert_eq!((fleet.who(&yields), tier(&yields), repin(&yields)), (Some(other), "1.5", Some("deeper")));
    let next = say(&fleet, "x", &short(1)).await;
    assert_eq!((fleet.who(&next), tier(&next)), (Some(other), "1"), "it is pinned to what was chosen");
    assert_eq!(repinned(&fleet, "conversation", "deeper").await, 1);
    // A pinned request says how much of its prompt is there, and is compared with what the engine reports.
    let again = say(&fleet, "x", &body).await;
    assert_eq!((tier(&again), again.head.header("x-kvlb-depth")), ("1", Some("12")));
    let predicted = format!("kvlb_predicted_cached_tokens_total{{ep_idx=\"{other}\",service=\"{}\"}}", fleet.id());
    let reported = predicted.replace("predicted", "reported");
    let agree = async || {
        let both = (fleet.count(&predicted).await.unwrap(), fleet.count(&reported).await.unwrap());
        both.0 == both.1 && both.0 == 2 * 11 * 16
    };
    eventually(SOON, "predictions and reports agree", agree).await.unwrap();
}

#[tokio::test]
async fn a_conversation_is_forgotten_when_nobody_has_spoken_for_its_time() {
    let fleet = plain(json!({"pd_session_ttl_sec": 2})).await;
    let home = fleet.who(&say(&fleet, "x", &short(0)).await);
    for number in 1..5 {
        sleep(Duration::from_millis(800)).await;
        let next = say(&fleet, "x", &short(number)).await;
        assert_eq!((fleet.who(&next), tier(&next)), (home, "1"), "its time begins anew with each answer");
    }
    sleep(Duration::from_millis(2100)).await;
    assert_eq!(remembered(&fleet, "conversation").await, 0);
    assert_eq!(tier(&say(&fleet, "x", &short(9)).await), "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_leaves_an_engine_that_carries_too_much() {
    let fleet = plain(json!({"kvLoadFloor": 2})).await;
    let home = fleet.who(&say(&fleet, "x", &short(0)).await).unwrap();
    fleet.engines[home].faults().set(|plan| plan.pause = true);
    let mut stuck = JoinSet::new();
    for number in 1..=2 {
        let vip = fleet.vip;
        stuck.spawn(async move { Talker::new(vip).ask(&[(FIELD, "x")], &short(number)).await.unwrap().head.status });
    }
    eventually(SOON, "two wait there", async || fleet.load(home).await.is_ok_and(|load| load == 2)).await.unwrap();
    // max(2, ceil(1.75 * (2 + 1) / 3)) = 2: there is no room for a third.
    let moved = say(&fleet, "x", &short(3)).await;
    let new = fleet.who(&moved);
    assert!(new != Some(home) && repin(&moved) == Some("overload"), "{:?}", repin(&moved));
    let next = say(&fleet, "x", &short(4)).await;
    assert_eq!((fleet.who(&next), tier(&next)), (new, "1"), "it has moved");
    fleet.engines[home].faults().clear();
    while let Some(status) = stuck.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
    all_quiet(&fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_come_together_with_one_new_conversation_go_together() {
    let fleet = plain(json!({"kvLoadFloor": 1000})).await;
    for round in 0..30_u32 {
        let mut asking = JoinSet::new();
        for number in 0..12 {
            let vip = fleet.vip;
            asking.spawn(async move {
                let name = format!("round {round}");
                let answer = Talker::new(vip).ask(&[(FIELD, &name)], &short(number)).await.unwrap();
                assert_eq!(answer.head.status, 200);
                answer.engine().to_owned()
            });
        }
        let engines: BTreeSet<_> = asking.join_all().await.into_iter().collect();
        assert_eq!(engines.len(), 1, "round {round}: {engines:?}");
    }
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn a_selector_keeps_sessions_by_header_cookie_query_or_client() {
    let fleet = plain(json!({"session_header_name": "X-Tenant"})).await;
    for name in ["red", "blue"] {
        assert_eq!(engines_of(&fleet, 4, &[("x-tenant", name)], &json!({})).await.len(), 1, "{name}");
    }
    assert_eq!(engines_of(&fleet, 3, &[], &json!({})).await.len(), 3, "without a session it goes in turn");
    assert_eq!((remembered(&fleet, "session").await, remembered(&fleet, "conversation").await), (2, 0));
    let by = async |fields: Value| {
        let mut fields = fields;
        fields["kvExactMode"] = json!(0);
        fleet.put_rule(|body| add(body, &fields)).await.unwrap();
    };
    by(json!({"session_header_name": "cookie:sid"})).await;
    assert_eq!(engines_of(&fleet, 4, &[("Cookie", "a=b; sid=1")], &json!({})).await.len(), 1);
    assert_eq!(engines_of(&fleet, 3, &[("Cookie", "a=b; pid=1")], &json!({})).await.len(), 3);
    by(json!({"session_header_name": "query:s"})).await;
    let mut engines = BTreeSet::new();
    for number in 0..4 {
        let mut client = Client::connect(fleet.vip).await.unwrap();
        let (path, body) = (format!("{PATH}?n={number}&s=7"), short(number).to_string());
        client.request("POST", &path, &[("Content-Type", "application/json")], body.as_bytes()).await.unwrap();
        engines.insert(client.answer().await.unwrap().engine().to_owned());
    }
    assert_eq!(engines.len(), 1);
    by(json!({"sel": 3})).await;
    assert_eq!(engines_of(&fleet, 4, &[], &json!({})).await.len(), 1, "one client");
    by(json!({"sel": 3, "session_header_name": "X-Tenant"})).await;
    let mut all = BTreeSet::new();
    for number in 0..40 {
        let name = format!("tenant {number}");
        let engines = engines_of(&fleet, 2, &[("X-Tenant", &name)], &json!({})).await;
        assert_eq!(engines.len(), 1);
        all.extend(engines);
    }
    assert_eq!(all.len(), 3, "many sessions are spread");
}

#[tokio::test]
async fn a_session_whose_engine_was_out_stays_where_it_went() {
    let mut fleet = plain(json!({"sel": 3, "cb_enable": false})).await;
    let home = fleet.who(&fleet.ask(&short(0)).await.unwrap()).unwrap();
    fleet.engines[home].kill().await;
    let new = fleet.who(&fleet.ask(&short(1)).await.unwrap());
    fleet.engines[home].restart().await.unwrap();
    assert_ne!(new, Some(home));
    assert_eq!(engines_of(&fleet, 4, &[], &json!({})).await, BTreeSet::from([new.unwrap()]));
    assert_eq!(repinned(&fleet, "session", "tried").await, 1);
}

/// A prompt of a family: the first 160 tokens are its own, and 16 more the prompt's.
fn of_family(family: u32, number: u32) -> Value {
    let tokens: Vec<u32> =
        (0..160).map(|at| family * 1000 + at).chain((0..16).map(|at| 50_000 + number * 100 + at)).collect();
    completion(&tokens, 1)
}

#[tokio::test]
async fn prompts_that_begin_alike_come_together_where_no_engine_tells_its_blocks() {
    let fleet = plain(json!({"pd_cache_aware_mode": true})).await;
    let mut homes = Vec::new();
    for family in 1..=3 {
        let first = fleet.ask(&of_family(family, 0)).await.unwrap();
        assert_eq!(tier(&first), "2");
        homes.push((family, fleet.who(&first)));
    }
    for number in 1..5 {
        for (family, home) in &homes {
            let next = fleet.ask(&of_family(*family, number)).await.unwrap();
            assert_eq!((fleet.who(&next), tier(&next)), (*home, "1-trie"));
        }
    }
    assert_eq!(chosen_by(&fleet, "1-trie").await, 12);
    let bytes = async || fleet.sum("kvlb_trie_bytes").await.unwrap();
    assert!(bytes().await > 3 * 160 * 4, "{}", bytes().await);
    // 160 of 176 tokens are 91 %.
    let fields =
        |threshold: u32| json!({"kvExactMode": 0, "pd_cache_aware_mode": true, "pd_cache_threshold": threshold});
    fleet.put_rule(|body| add(body, &fields(92))).await.unwrap();
    assert_eq!(tier(&fleet.ask(&of_family(1, 20)).await.unwrap()), "2");
    fleet.put_rule(|body| add(body, &fields(90))).await.unwrap();
    assert_eq!(tier(&fleet.ask(&of_family(1, 21)).await.unwrap()), "1-trie");
    fleet.put_rule(|body| add(body, &json!({"kvExactMode": 0}))).await.unwrap();
    assert_eq!(
        (bytes().await, tier(&fleet.ask(&of_family(1, 22)).await.unwrap())),
        (0, "2"),
        "switched off, it is empty"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_have_no_word_while_loads_lie_too_far_apart() {
    let fleet = plain(json!({"pd_cache_aware_mode": true, "pd_balance_abs_threshold": 2, "kvLoadFloor": 1000})).await;
    let home = fleet.who(&fleet.ask(&of_family(1, 0)).await.unwrap()).unwrap();
    fleet.engines[home].faults().set(|plan| plan.pause = true);
    let mut stuck = JoinSet::new();
    for number in 1..=3 {
        let vip = fleet.vip;
        stuck.spawn(async move { Talker::new(vip).ask(&[], &of_family(1, number)).await.unwrap().head.status });
        let so_many = async || fleet.load(home).await.is_ok_and(|load| load == u64::from(number));
        eventually(SOON, "it waits there", so_many).await.unwrap();
    }
    let before = completions(&fleet, home).len();
    let others = [fleet.ask(&of_family(2, 0)).await.unwrap(), fleet.ask(&of_family(2, 1)).await.unwrap()];
    assert!(others.iter().all(|answer| tier(answer) == "2"));
    assert!(completions(&fleet, home).len() <= before + 1, "the selector goes in turn");
    fleet.engines[home].faults().clear();
    while let Some(status) = stuck.join_next().await {
        assert_eq!(status.unwrap(), 200);
    }
    all_quiet(&fleet).await;
}

#[tokio::test]
async fn an_endpoint_that_is_removed_leaves_nothing_behind() {
    let fleet = plain(json!({"pd_cache_aware_mode": true})).await;
    for number in 0..9 {
        say(&fleet, &format!("{number}"), &of_family(number, 0)).await;
    }
    assert_eq!(remembered(&fleet, "conversation").await, 9);
    let nodes = fleet.sum("kvlb_trie_nodes").await.unwrap();
    fleet
        .put_rule(|body| {
            add(body, &json!({"kvExactMode": 0, "pd_cache_aware_mode": true}));
            body["endpoints"].as_array_mut().unwrap().truncate(1);
        })
        .await
        .unwrap();
    assert_eq!(remembered(&fleet, "conversation").await, 3);
    assert!(fleet.sum("kvlb_trie_nodes").await.unwrap() < nodes);
    let shown = fleet.cli(&["get", "lb", "-o", "wide"], "").unwrap().1;
    assert!(shown.contains("remembers texts from 20% on, while loads are at most 3 apart"), "{shown}");
}

impl Fleet {
    /// What would become of a request of a conversation.
    async fn explain_in(&self, conversation: &str, body: &Value) -> Value {
        let path = format!("/netlox/v1/config/ai/kv/explain?service_id={}", self.id());
        let mut client = Client::connect(self.kvlb.api_address()).await.unwrap();
        let headers = [("Content-Type", "application/json"), (FIELD, conversation)];
        client.request("POST", &path, &headers, body.to_string().as_bytes()).await.unwrap();
        client.answer().await.unwrap().body.json()
    }
}
