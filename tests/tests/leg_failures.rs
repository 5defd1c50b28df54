//! Legs that fail, wait or are left: who is asked next, what the client is told, and that no block stays behind.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod split;

use kvlb_tests::engine::{Death, EngineConfig, FaultPlan, LegFate, LegKind};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{Answer, Client, End};
use kvlb_tests::harness::upstream::Act;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use split::scripted::{Scripted, ok, says};
use split::{COMPLETIONS, DECODE, Fleet, JSON, PREFILL, SOON, alone, body, code, long, prompt, text, with};

const OBJECT: &str = r#"{"do_remote_prefill":true,  "odd":[ ]}"#;
const REQUEST: &[u8] = br#"{"prompt":"x"}"#;

fn prefilled() -> Vec<Act> {
    ok(&format!(r#"{{"kv_transfer_params":{OBJECT}}}"#))
}

fn carries_the_object(posts: &[(String, Vec<u8>)]) -> bool {
    posts.iter().all(|(_, body)| String::from_utf8_lossy(body).contains(OBJECT))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_answer_that_makes_no_sense_is_tried_elsewhere() {
    let whole = format!(r#"{{"kv_transfer_params":{OBJECT}}}"#);
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", whole.len());
    let cut = &whole.as_bytes()[..whole.len() / 2];
    let sized_cut = vec![Act::Read, Act::Send([head.as_bytes(), cut].concat())];
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunked_cut = vec![Act::Read, Act::Send([chunked.as_slice(), b"5\r\n{\"kv_\r\n"].concat())];
    let bad_chunk = vec![Act::Read, Act::Send([chunked.as_slice(), b"zz\r\n{\"kv_\r\n"].concat())];
    let mut fleet = Scripted::new(vec![(PREFILL, prefilled()), (DECODE, ok("{}"))], json!({})).await;
    for (what, nonsense) in [
        ("no HTTP", vec![Act::Read, Act::Send(b"SSH-2.0-OpenSSH\r\n".to_vec())]),
        ("cut off", sized_cut),
        ("cut off in chunks", chunked_cut),
        ("no chunk", bad_chunk),
        ("reset", vec![Act::Read, Act::Reset]),
        ("closed", vec![Act::Read]),
        ("500", says("500 Oops", "", b"{}")),
        ("503", says("503 Later", "", b"{}")),
        ("429", says("429 Later", "", b"{}")),
    ] {
        let script = vec![(PREFILL, nonsense.clone()), (DECODE, ok("{}")), (PREFILL, prefilled())];
        fleet = fleet.next(script, json!({})).await;
        // Both are asked first once.
        for _ in 0..2 {
            let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
            assert_eq!((answer.head.status, answer.body.text().as_str()), (200, "{}"), "{what}");
            let place = fleet.upstreams[2].address().to_string();
            assert_eq!(answer.head.header("x-kvlb-prefill-endpoint"), Some(place.as_str()), "{what}");
        }
        let posts = fleet.posts(1);
        assert!(posts.len() == 2 && carries_the_object(&posts), "{what}: {posts:?}");
        assert!((1..=2).contains(&fleet.posts(0).len()), "{what}: {}", fleet.posts(0).len());
        // Where that is all there is, the decode endpoint is never asked.
        fleet = fleet.next(vec![(PREFILL, nonsense), (DECODE, ok("{}"))], json!({})).await;
        let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
        match what.parse::<u16>() {
            Ok(status) => assert_eq!(code(&answer), (status, None), "the engine's own answer"),
            Err(_) => assert_eq!(code(&answer), (502, Some("pd_prefill_backend_died")), "{what}"),
        }
        assert!(fleet.posts(1).is_empty(), "{what}");
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// Nobody listens there any more, and no probe has seen it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_that_cannot_be_reached_are_passed_over_or_told() {
    let script = || vec![(PREFILL, prefilled()), (DECODE, ok("{}")), (PREFILL, prefilled()), (DECODE, ok("{}"))];
    let mut fleet = Scripted::new(script(), json!({})).await;
    for gone in [[0, 2], [1, 3]] {
        fleet = fleet.next(script(), json!({})).await;
        for number in gone {
            fleet.upstreams[number].stop().await;
        }
        let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
        assert_eq!(code(&answer), (503, Some("pd_pool_unavailable")), "{}", answer.body.text());
        assert_eq!(
            fleet.posts(0).len() + fleet.posts(2).len(),
            usize::from(gone == [1, 3]),
            "a prompt is computed once"
        );
        // Where only one of them is gone, it is passed over.
        fleet = fleet.next(script(), json!({})).await;
        fleet.upstreams[gone[0]].stop().await;
        for _ in 0..4 {
            assert_eq!(code(&fleet.split.post(COMPLETIONS, &[], REQUEST).await), (200, None));
        }
        assert_eq!((fleet.posts(0).len() + fleet.posts(2).len(), fleet.posts(gone[1]).len()), (4, 4));
    }
    fleet.split.kvlb.stop().await.unwrap();
}

/// What is no object cannot be passed on; the decode endpoint can do without.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_answer_that_cannot_be_read_is_one_without_an_object() {
    let whole = format!(r#"{{"kv_transfer_params":{OBJECT}}}"#);
    let mut fleet = Scripted::new(vec![(PREFILL, prefilled()), (DECODE, ok("{}"))], json!({})).await;
    for prefill in [
        ok("<html>not me</html>"),
        ok(&whole[..whole.len() - 3]),
        ok(""),
        ok(r#"{"kv_transfer_params":null}"#),
        ok(r#"{"kv_transfer_params":"x"}"#),
    ] {
        fleet = fleet.next(vec![(PREFILL, prefill), (DECODE, ok("{}"))], json!({})).await;
        let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
        assert_eq!((code(&answer), answer.body.text().as_str()), ((200, None), "{}"));
        let sent = String::from_utf8(fleet.posts(1).remove(0).1).unwrap();
        assert!(!sent.contains("kv_transfer_params"), "{sent}");
    }
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_prefill_endpoints_are_asked_at_most() {
    let mut script = vec![(DECODE, ok("{}"))];
    script.extend((0..6).map(|_| (PREFILL, says("500 Oops", "", b"{\"from\":\"an engine\"}"))));
    let fleet = Scripted::new(script, json!({})).await;
    let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
    assert_eq!((code(&answer), answer.body.text().as_str()), ((500, None), "{\"from\":\"an engine\"}"));
    let asked: Vec<_> = (1..7).map(|number| fleet.posts(number).len()).collect();
    assert!(asked.iter().all(|times| *times <= 1), "nobody twice: {asked:?}");
    assert_eq!(asked.iter().sum::<usize>(), 3, "{asked:?}");
    assert!(fleet.posts(0).is_empty());
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_of_the_prefill_endpoint_is_the_clients_answer_byte_for_byte() {
    let refusal = br#"{"error": {"message":"too long",  "code":400}}"#;
    let script = vec![
        (PREFILL, says("400 Bad Request", "X-Theirs: 1\r\nContent-Type: application/json\r\n", refusal)),
        (DECODE, ok("{}")),
    ];
    let fleet = Scripted::new(script, json!({})).await;
    for stream in ["false", "true"] {
        let answer =
            fleet.split.post(COMPLETIONS, &[], format!(r#"{{"prompt":"x","stream":{stream}}}"#).as_bytes()).await;
        assert_eq!((code(&answer), answer.body.bytes()), ((400, None), refusal.to_vec()));
        assert_eq!(answer.head.header("x-theirs"), Some("1"));
    }
    assert!(fleet.posts(1).is_empty());
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_decode_endpoint_is_passed_over_with_the_same_object_and_other_answers_are_the_clients() {
    for (status, elsewhere) in [("503 Later", true), ("429 Later", true), ("400 No", false), ("500 Oops", false)] {
        let script = vec![(PREFILL, prefilled()), (DECODE, says(status, "", b"no")), (DECODE, ok("{}"))];
        let fleet = Scripted::new(script, json!({})).await;
        let mut statuses = Vec::new();
        for _ in 0..4 {
            statuses.push(fleet.split.post(COMPLETIONS, &[], REQUEST).await.head.status);
        }
        let (busy, other) = (fleet.posts(1), fleet.posts(2));
        assert!(carries_the_object(&busy) && carries_the_object(&other), "{status}");
        let theirs = statuses.iter().filter(|status| **status != 200).count();
        assert!(!busy.is_empty(), "{status}: it was asked");
        if elsewhere {
            assert_eq!((theirs, other.len()), (0, 4), "{status}: {statuses:?}");
        } else {
            assert_eq!((theirs, other.len()), (busy.len(), 4 - busy.len()), "{status}: {statuses:?}");
        }
        assert_eq!(fleet.posts(0).len(), 4, "{status}: no prompt is computed twice");
        fleet.split.kvlb.stop().await.unwrap();
    }
}

/// The blocks may have been fetched, and can be fetched once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_connection_that_ends_without_a_word_takes_both_legs_once_more() {
    // The first request of a connection is answered, the second is read and nothing said.
    let decode = [ok("{}"), vec![Act::Read]].concat();
    let fleet = Scripted::new(vec![(PREFILL, prefilled()), (DECODE, decode)], json!({})).await;
    // One connection of a client's stays with one thread of kvlb's, and that with its connections.
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    for (asked, legs) in [(1, 1), (2, 3)] {
        client.request("POST", COMPLETIONS, JSON, REQUEST).await.unwrap();
        let answer = client.answer().await.unwrap();
        assert_eq!(code(&answer), (200, None), "request {asked}");
        assert_eq!((fleet.posts(0).len(), fleet.posts(1).len()), (legs, legs), "request {asked}");
    }
    // A new connection that does so has an endpoint behind it that died.
    let fleet =
        Scripted::new(vec![(PREFILL, prefilled()), (DECODE, vec![Act::Read]), (DECODE, vec![Act::Read])], json!({}))
            .await;
    let answer = fleet.split.post(COMPLETIONS, &[], REQUEST).await;
    assert_eq!(code(&answer), (502, Some("pd_decode_backend_died")));
    assert_eq!((fleet.posts(0).len(), fleet.posts(1).len() + fleet.posts(2).len()), (1, 1), "it is not sent again");
    fleet.split.kvlb.stop().await.unwrap();
}

/// `EP0` fails before any probe has seen it: the next-best by blocks is asked, not the next in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_best_prefill_endpoint_wins_by_its_blocks() {
    let mut fleet = Fleet::new(&[PREFILL, DECODE, PREFILL, PREFILL], json!({"monitor": false})).await;
    let ids = prompt(1, 100);
    // Asked past kvlb: depths 6, none, 2 and 4.
    for (number, len) in [(0, 96), (2, 32), (3, 64)] {
        let warm = body(&ids[..len]);
        kvlb_tests::harness::http::post(fleet.engines[number].addresses().http, COMPLETIONS, &warm).await.unwrap();
    }
    let depths = async || {
        let told = fleet.split.explain(&body(&ids)).await;
        [0, 2, 3].map(|number| told["candidates"][number]["depth"].as_u64().unwrap_or_default())
    };
    eventually(SOON, "all are known", async || depths().await == [6, 2, 4]).await.unwrap();
    fleet.engines[0].faults().set(|plan| plan.refuse_http = true);
    let answer = fleet.split.ask(&body(&ids)).await;
    assert_eq!((fleet.prefill(&answer), answer.engine()), (3, "engine-1"));
    assert_eq!(answer.head.header("x-kvlb-depth"), Some("4"));
    assert_eq!(text(&answer), alone(&body(&ids)).await);
    fleet.engines[3].kill().await;
    let answer = fleet.split.ask(&body(&ids)).await;
    assert_eq!((fleet.prefill(&answer), answer.engine()), (2, "engine-1"));
    fleet.ends_clean().await;
}

/// Section 4's `no_worker`: the least load among the prefill endpoints.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_prompt_goes_to_the_prefill_endpoint_with_the_least_load() {
    let fleet = Fleet::new(&[PREFILL, DECODE, PREFILL], json!({})).await;
    fleet.engines[0].faults().set(|plan| plan.pause = true);
    let mut waiting = Vec::new();
    for seed in 0..6 {
        waiting.push(fleet.begun(&body(&prompt(10 + seed, 40))).await);
        let waits = || usize::try_from(fleet.engines[0].counters().posts).unwrap();
        let settled = async || {
            let answered =
                fleet.engines[1].requests().iter().filter(|seen| seen.finished && seen.method == "POST").count();
            answered + waits() == usize::try_from(seed).unwrap() + 1
        };
        eventually(SOON, "it is answered or waits", settled).await.unwrap();
    }
    assert_eq!((fleet.asked(0), fleet.asked(2)), (1, 5), "one waits there, and nobody joins it");
    fleet.engines[0].faults().clear();
    for mut client in waiting {
        assert_eq!(client.answer().await.unwrap().head.status, 200);
    }
    fleet.ends_clean().await;
}

const BOUND: fn() -> Value = || json!({"fc_mode": "enforce", "fc_decode_max_inflight": 1, "fc_max_queue_depth": 64, "fc_max_queue_wait_ms": 60_000});

async fn released(fleet: &Fleet) -> f64 {
    fleet.split.kvlb.metrics().await.unwrap().sum("kvlb_pd_releases_total")
}

/// Its blocks would be kept for five minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_client_that_left_in_the_queue_are_freed() {
    let fleet = Fleet::of(&[PREFILL, DECODE], BOUND(), |config| EngineConfig { kv_lease_s: 300.0, ..config }).await;
    let first = fleet.begun(&long(1)).await;
    eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
    let queued = fleet.begun(&body(&prompt(2, 40))).await;
    eventually(SOON, "the second one's blocks wait", async || fleet.engines[0].handoffs().leases_open == 1)
        .await
        .unwrap();
    drop(queued);
    let freed = eventually(SOON, "its blocks are free", async || fleet.engines[0].handoffs().leases_open == 0).await;
    assert!(freed.is_ok(), "{:?}, released {}", fleet.engines[0].handoffs(), released(&fleet).await);
    assert_eq!(released(&fleet).await, 1.0);
    assert_eq!(fleet.engines[1].running(), 1, "the first one goes on");
    drop(first);
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_while_they_are_decoded_leave_nothing() {
    let fleet = Fleet::of(&[PREFILL, DECODE], json!({}), |config| EngineConfig { kv_lease_s: 300.0, ..config }).await;
    for stream in [true, false] {
        let client = fleet.begun(&with(long(1), &json!({"stream": stream}))).await;
        eventually(SOON, "it is decoded", async || fleet.engines[1].running() == 1).await.unwrap();
        drop(client);
        eventually(SOON, "the decode is given up", async || fleet.engines[1].running() == 0).await.unwrap();
    }
    assert_eq!(released(&fleet).await, 0.0, "they were fetched");
    assert_eq!(fleet.engines[0].handoffs().read, 2);
    fleet.ends_clean().await;
}

/// Pitfall 101, with an end that is good: room comes while the second pair of legs waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_are_gone_are_computed_again() {
    let rule = with(BOUND(), &json!({"timeoutPdHandoff": 2000}));
    let fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig { kv_lease_s: 1.0, ..config }).await;
    let first = fleet.begun(&long(1)).await;
    eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
    let asks = body(&prompt(2, 40));
    let mut queued = fleet.begun(&asks).await;
    eventually(SOON, "its prompt is computed twice", async || fleet.engines[0].handoffs().granted == 3).await.unwrap();
    drop(first);
    let answer = queued.answer().await.unwrap();
    assert_eq!((answer.engine(), text(&answer)), ("engine-1", alone(&asks).await));
    let fates: Vec<_> = fleet.engines[1].legs().iter().map(|leg| (leg.kind, leg.fate)).collect();
    assert_eq!(fates, [(LegKind::Decode, LegFate::PulledOwn); 2], "the second object, not the first");
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_are_spread_over_decode_endpoints_evenly() {
    let fleet = Fleet::new(&[PREFILL, DECODE, DECODE, PREFILL], json!({})).await;
    let mut clients = JoinSet::new();
    for seed in 0..60 {
        let asks = with(body(&prompt(seed, 40)), &json!({"max_tokens": 40}));
        let (vip, bytes) = (fleet.split.vip, asks.to_string());
        clients.spawn(async move {
            kvlb_tests::harness::http::exchange(vip, "POST", COMPLETIONS, JSON, bytes.as_bytes()).await.unwrap()
        });
    }
    let answers = clients.join_all().await;
    assert!(answers.iter().all(|answer| answer.head.status == 200));
    let by = |name: &str| answers.iter().filter(|answer| answer.engine() == name).count();
    assert!((25..=35).contains(&by("engine-1")) && by("engine-1") + by("engine-2") == 60, "{}", by("engine-1"));
    let prefilled = [fleet.asked(0), fleet.asked(3)];
    assert!(prefilled.iter().all(|asked| (20..=40).contains(asked)), "{prefilled:?}");
    fleet.ends_clean().await;
}

fn is_whole(answer: &Answer) -> bool {
    answer.head.status == 200 && answer.body.end == End::Complete
}

/// Whatever goes wrong, an answer is right or says that it is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_faults_of_every_kind_no_answer_is_wrong_and_no_block_stays() {
    let rule = json!({"cb_enable": false, "timeoutPdPrefill": 2000, "timeoutPdDecode": 2000, "timeoutPdHandoff": 2000});
    let fleet =
        Fleet::of(&[PREFILL, DECODE, PREFILL, DECODE], rule, |config| EngineConfig { kv_lease_s: 4.0, ..config }).await;
    let mut wanted = Vec::new();
    for seed in 1..=6 {
        wanted.push((body(&prompt(seed, 40)), alone(&body(&prompt(seed, 40))).await));
    }
    let plans = [
        FaultPlan { prefill_status: Some(500), handoff_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { prefill_dies: Some(Death::Middle), handoff_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { prefill_dies: Some(Death::Before), handoff_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { prefill_without_params: true, handoff_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { decode_die_after_chunks: Some(0), handoff_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { decode_stall: true, handoff_fraction: 0.1, ..FaultPlan::default() },
        FaultPlan { reset_http_fraction: 0.2, ..FaultPlan::default() },
        FaultPlan { keep_alive_ms: Some(1), ..FaultPlan::default() },
        FaultPlan { refuse_http_fraction: 0.3, ..FaultPlan::default() },
        FaultPlan { pull_delay_ms: 30, ..FaultPlan::default() },
    ];
    let (mut right, mut told) = (0, 0);
    for (number, plan) in plans.into_iter().enumerate() {
        for engine in 0..4 {
            fleet.faults(engine, plan.clone());
        }
        let mut clients = JoinSet::new();
        for client in 0..24 {
            let (asks, wanted) = wanted[(client + number) % wanted.len()].clone();
            let vip = fleet.split.vip;
            clients.spawn(async move {
                let mut connection = Client::connect(vip).await.unwrap();
                connection.request("POST", COMPLETIONS, JSON, asks.to_string().as_bytes()).await.unwrap();
                if client % 6 == 5 {
                    // It leaves, at once or a little later.
                    tokio::time::sleep(std::time::Duration::from_millis(client as u64 % 12)).await;
                    return None;
                }
                Some((connection.answer().await, wanted))
            });
        }
        for (answer, wanted) in clients.join_all().await.into_iter().flatten() {
            let Ok(answer) = answer else { panic!("no answer at all: {answer:?}") };
            if is_whole(&answer) {
                assert_eq!(text(&answer), wanted);
                right += 1;
            } else {
                let is_told =
                    answer.head.status >= 500 || answer.head.status == 429 || answer.body.end != End::Complete;
                assert!(is_told, "{} {}", answer.head.status, answer.body.text());
                told += 1;
            }
        }
        for engine in &fleet.engines {
            engine.faults().clear();
        }
    }
    assert!(right > 100, "{right} right, {told} told");
    // Some were killed between the legs: those blocks go with their lease.
    fleet.ends_clean().await;
}

/// An answer that is not streamed begins when all of it is there: the prefill leg's limit says nothing of that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_long_a_prefill_leg_may_take_does_not_bound_an_answer() {
    let late = vec![Act::Read, Act::Wait(std::time::Duration::from_millis(1200))];
    let late = late.into_iter().chain(ok("{}").into_iter().skip(1)).collect::<Vec<_>>();
    let script = vec![(PREFILL, prefilled()), (DECODE, late)];
    let fleet = Scripted::new(script.clone(), json!({"timeoutPdPrefill": 300})).await;
    assert_eq!(code(&fleet.split.ask(&body(&prompt(1, 20))).await), (200, None));
    let fleet = fleet.next(script, json!({"timeoutFirstByte": 300})).await;
    assert_eq!(code(&fleet.split.ask(&body(&prompt(1, 20))).await), (504, Some("pd_decode_timeout")));
    fleet.split.kvlb.stop().await.unwrap();
}

/// The client gets the last answer, and nobody would fetch the blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_freed_where_every_decode_endpoint_is_busy() {
    let busy = [says("503 Service Unavailable", "Retry-After: 1\r\n", b"busy"), ok("{}")].concat();
    let fleet = Scripted::new(vec![(PREFILL, prefilled()), (DECODE, busy)], json!({})).await;
    let answer = fleet.split.ask(&body(&prompt(1, 20))).await;
    assert_eq!((answer.head.status, answer.body.text()), (503, "busy".into()));
    let freed = async || fleet.posts(1).len() == 2;
    eventually(SOON, "a short decode leg frees them", freed).await.unwrap();
    assert!(carries_the_object(&fleet.posts(1)));
    assert_eq!(fleet.split.kvlb.metrics().await.unwrap().sum("kvlb_pd_releases_total"), 1.0);
    fleet.split.kvlb.stop().await.unwrap();
}
