//! Rules with prefill and decode endpoints: which engine is asked what, and what clients see where either leg fails.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod golden;
mod split;

use std::time::Duration;

use kvlb_tests::engine::{Death, EngineConfig, FaultPlan, LegFate, LegKind};
use kvlb_tests::harness::eventually;
use kvlb_tests::harness::http::{End, exchange};
use kvlb_tests::harness::upstream::{Act, Upstream};
use serde_json::{Value, json};

use split::{COMPLETIONS, DECODE, Fleet, PREFILL, SOON, Split, alone, body, code, prompt, text};

/// The source document's section 4: two prefill endpoints, one that decodes, prompts of 40 and 38 tokens of which 32 are alike.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documents_worked_example_and_its_failure_coda() {
    let mut fleet = Fleet::new(&[PREFILL, DECODE, PREFILL], json!({})).await;
    let preamble = prompt(1, 32);
    let (a, b) = ([preamble.clone(), prompt(2, 8)].concat(), [preamble, prompt(3, 6)].concat());
    let cold = fleet.split.ask(&body(&a)).await;
    assert_eq!((fleet.prefill(&cold), cold.engine(), cold.head.header("x-kvlb-tier")), (0, "engine-1", Some("2")));
    assert_eq!(text(&cold), alone(&body(&a)).await);
    let known = async || fleet.split.explain(&body(&b)).await["candidates"][0]["depth"] == 2;
    eventually(SOON, "EP0 is known to hold both blocks", known).await.unwrap();
    let told = fleet.split.explain(&body(&b)).await;
    let held: Vec<_> =
        told["candidates"].as_array().unwrap().iter().map(|c| (&c["depth"], &c["count"], &c["role"])).collect();
    assert_eq!(held[0], (&json!(2), &json!(2), &json!("prefill")), "{told}");
    assert_eq!(held[2], (&json!(0), &json!(0), &json!("prefill")), "{told}");
    assert_eq!((&told["endpoint"], &told["split"]), (&json!(0), &json!({"handoff": "nixl", "decode": 1})));
    let hits = fleet.split.metric("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}").await;
    let warm = fleet.split.ask(&body(&b)).await;
    let says = |name: &str| warm.head.header(name).map(str::to_owned);
    assert_eq!((fleet.prefill(&warm), warm.engine()), (0, "engine-1"));
    assert_eq!((says("x-kvlb-tier").as_deref(), says("x-kvlb-depth").as_deref()), (Some("1.5"), Some("2")));
    assert_eq!(fleet.split.metric("loxilb_pd_kv_tier15_hits_total{ep_idx=\"0\"}").await, hits + 1.0);
    assert_eq!(warm.cached_tokens(), Some(32), "what EP0 did not compute");
    assert_eq!(text(&warm), alone(&body(&b)).await);
    assert_eq!((fleet.asked(0), fleet.asked(1), fleet.asked(2)), (2, 2, 0));
    // EP0 refuses the connection: the next-best prefill endpoint wins, never the one that decodes.
    fleet.engines[0].kill().await;
    let coda = fleet.split.ask(&body(&b)).await;
    assert_eq!((fleet.prefill(&coda), coda.engine()), (2, "engine-1"));
    assert_eq!(text(&coda), alone(&body(&b)).await);
    assert_eq!((fleet.asked(0), fleet.asked(1), fleet.asked(2)), (2, 3, 1));
    fleet.ends_clean().await;
}

fn split_of(request: &[u8]) -> (String, String) {
    let text = String::from_utf8(request.to_vec()).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

fn ok(body: &str) -> Vec<Act> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
    vec![Act::Read, Act::Send([head.as_bytes(), body.as_bytes()].concat())]
}

async fn scripted(prefill: &str, decode: &str) -> (Split, [Upstream; 2]) {
    let upstreams = [Upstream::start(ok(prefill)).await.unwrap(), Upstream::start(ok(decode)).await.unwrap()];
    let endpoint = |(upstream, role): (&Upstream, u8)| json!({"endpointIP": "127.0.0.1", "targetPort": upstream.address().port(), "weight": 1, "ep_role": role});
    let endpoints = upstreams.iter().zip([PREFILL, DECODE]).map(endpoint).collect();
    (Split::over(endpoints, &json!({"kvExactMode": 0, "monitor": false})).await, upstreams)
}

/// The requests with a body that an upstream got.
fn posts(upstream: &Upstream) -> Vec<(String, String)> {
    upstream.received().iter().map(|request| split_of(request)).filter(|(head, _)| head.starts_with("post")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_leg_gets_the_clients_body_with_what_the_handoff_says_and_nothing_else_moves() {
    let object = r#"{"do_remote_prefill": true,  "remote_block_ids":[[1, 2]],"x":1e400}"#;
    let (split, [prefill, decode]) =
        scripted(&format!(r#"{{"id":"a","kv_transfer_params":{object},"usage":{{"prompt_tokens":9}}}}"#), "{}").await;
    let sent = concat!(
        "{ \"prompt\" : \"caf\\u00e9\", \"max_tokens\":\t7 ,\n \"seed\": 1e400, \"stream\":true, \"stream_options\":{\"include_usage\":true},",
        " \"min_tokens\":3, \"zz\":[1, {\"max_tokens\":5}], \"kv_transfer_params\": {\"remote_host\":\"evil\"}, \"bootstrap_host\":\"evil\", ",
        "\"disaggregated_params\":{\"x\":\"evil\"}}"
    );
    let answer = split.post("/v1/%63ompletions?x=1", &[("X-Request-Id", "theirs")], sent.as_bytes()).await;
    assert_eq!(answer.head.status, 200);
    let ([(head, first)], [(other_head, second)]) = (&posts(&prefill)[..], &posts(&decode)[..]) else {
        panic!("one leg each")
    };
    let asks = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
    assert_eq!(
        *first,
        format!(
            "{{ \"prompt\" : \"caf\\u00e9\", \"max_tokens\":\t1 ,\n \"seed\": 1e400, \"stream\":false, \"zz\":[1, {{\"max_tokens\":5}}], \"kv_transfer_params\": {asks}}}"
        )
    );
    assert_eq!(
        *second,
        sent.replace(r#"{"remote_host":"evil"}"#, object)
            .replace(r#", "bootstrap_host":"evil", "disaggregated_params":{"x":"evil"}"#, "")
    );
    for head in [head, other_head] {
        assert!(head.starts_with("post /v1/%63ompletions?x=1 http/1.1\r\n"), "{head}");
        assert_eq!(head.matches("x-request-id: theirs").count(), 1, "{head}");
    }
    // Without an id of the client's both legs have one of ours; a limit of the newer name is kept by its name.
    let chat = r#"{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],"max_completion_tokens":9}"#;
    split.post("/v1/chat/completions", &[], chat.as_bytes()).await;
    let ((head, first), (other_head, second)) = (posts(&prefill).remove(1), posts(&decode).remove(1));
    assert!(first.contains(r#""max_completion_tokens":1,"max_tokens":1,"stream":false,"#), "{first}");
    assert!(second.contains(r#""max_completion_tokens":9,"kv_transfer_params":{"#), "{second}");
    let shared =
        r#"{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],"max_"#;
    assert!(first.starts_with(shared) && second.starts_with(shared));
    let id = |head: &str| head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap().to_owned();
    assert!(id(&head) == id(&other_head) && id(&head).len() == 32);
    // Nor by other paths, one of which takes the bodies of all APIs; what is no JSON goes on where nobody generates.
    for path in ["/invocations", "/v1/embeddings"] {
        split.post(path, &[], br#"{"input":"x", "kv_transfer_params":{"remote_host":"evil"}}"#).await;
        assert_eq!(posts(&prefill).pop().unwrap().1, r#"{"input":"x"}"#, "{path}");
    }
    assert_eq!(code(&split.post("/invocations", &[], b"\xff\xfe{\x00").await), (400, Some("pd_body_unreadable")));
    split.post("/v1/audio/transcriptions", &[], b"RIFF").await;
    assert_eq!(posts(&prefill).pop().unwrap().1, "RIFF");
    split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_recorded_exchanges_replay_through_kvlb() {
    for recorded in golden::json("vllm-0.32.0/http/pd-nixl-exchanges.json.gz").as_array().unwrap() {
        let of = |name: &str| recorded[name].as_str().unwrap();
        let (split, [prefill, decode]) = scripted(of("prefill_response"), of("decode_response")).await;
        let mut sent = recorded["decode_request"].clone();
        sent.as_object_mut().unwrap().shift_remove("kv_transfer_params");
        let path = if sent["messages"].is_null() { COMPLETIONS } else { "/v1/chat/completions" };
        let answer = split.post(path, &[], sent.to_string().as_bytes()).await;
        assert_eq!(answer.body.text(), of("decode_response"), "{}", recorded["label"]);
        let value = |(_, body): &(String, String)| serde_json::from_str::<Value>(body).unwrap();
        // What the recorder itself changed in place, or left out, stands elsewhere: members are compared, the new ones in order.
        assert_eq!(value(&posts(&prefill)[0]), recorded["prefill_request"], "{}", recorded["label"]);
        assert_eq!(value(&posts(&decode)[0]), recorded["decode_request"], "{}", recorded["label"]);
        let object =
            |text: &str| text[text.find("\"kv_transfer_params\":").unwrap()..].split('}').next().unwrap().to_owned();
        assert_eq!(object(&posts(&decode)[0].1), object(of("prefill_response")), "byte for byte");
        split.kvlb.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_split_is_served_alone_and_counted() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({})).await;
    let ids = prompt(1, 20);
    let evil = json!({"do_remote_prefill": true, "remote_host": "192.0.2.66", "remote_port": 1, "remote_block_ids": [[1]],
        "remote_engine_id": "x", "remote_request_id": "x"});
    for (reason, more) in [
        ("samples", json!({"n": 2})),
        ("batch", json!({"prompt": [ids, ids]})),
        ("prompt_logprobs", json!({"prompt_logprobs": 1})),
        ("prompt_logprobs", json!({"echo": true, "logprobs": 1})),
        ("truncated", json!({"truncate_prompt_tokens": -1})),
        ("nothing_generated", json!({"max_tokens": 0})),
    ] {
        let (before, mut asks) = (fleet.split.whole(reason).await, body(&ids));
        more.as_object().unwrap().iter().for_each(|(name, value)| asks[name] = value.clone());
        asks["kv_transfer_params"] = evil.clone();
        let answer = fleet.split.ask(&asks).await;
        assert_eq!(answer.engine(), "engine-0", "{more}: {}", answer.body.text());
        assert_eq!(fleet.split.whole(reason).await, before + 1.0, "{more}");
        let told = fleet.split.explain(&asks).await;
        assert_eq!((&told["split"]["alone"], &told["split"]["handoff"]), (&json!(reason), &Value::Null));
    }
    assert_eq!(exchange(fleet.split.vip, "GET", "/v1/models", &[], b"").await.unwrap().head.status, 200);
    assert_eq!(fleet.split.whole("not_inference").await, 1.0);
    assert!(fleet.asked(1) == 0 && fleet.engines[0].legs().is_empty(), "{:?}", fleet.engines[0].legs());
    // Bodies that nobody can look into could say anything.
    for bytes in [b"{\"prompt\": \"x\"".as_slice(), b"[1]", b"\xff\xfe{\x00}\x00"] {
        let answer = fleet.split.post(COMPLETIONS, &[], bytes).await;
        assert_eq!(code(&answer), (400, Some("pd_body_unreadable")));
    }
    // Without a prefill endpoint others serve what generates nothing, and the rest is refused.
    fleet.engines[0].faults().set(|plan| plan.refuse_http = true);
    let elsewhere = async || {
        let answer = exchange(fleet.split.vip, "GET", "/v1/models", &[], b"").await.unwrap();
        answer.head.status == 200 && answer.engine() == "engine-1"
    };
    eventually(SOON, "a decode endpoint lists the models", elsewhere).await.unwrap();
    assert_eq!(code(&fleet.split.ask(&body(&ids)).await), (503, Some("pd_pool_unavailable")));
    fleet.engines[0].faults().clear();
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_leg_that_fails_goes_to_another_prefill_endpoint_and_a_refusal_to_the_client() {
    let fleet = Fleet::new(&[PREFILL, DECODE, PREFILL], json!({"cb_enable": false})).await;
    let plans = [
        FaultPlan { prefill_status: Some(500), ..FaultPlan::default() },
        FaultPlan { prefill_status: Some(503), ..FaultPlan::default() },
        FaultPlan { prefill_status: Some(429), ..FaultPlan::default() },
        FaultPlan { prefill_dies: Some(Death::Before), ..FaultPlan::default() },
        FaultPlan { prefill_dies: Some(Death::Middle), ..FaultPlan::default() },
    ];
    for (number, plan) in (1..).zip(plans) {
        // Whoever holds the blocks fails, so that it is asked first.
        let asks = body(&prompt(number, 40));
        let owner = fleet.prefill(&fleet.split.ask(&asks).await);
        let known = async || fleet.split.explain(&asks).await["candidates"][owner]["depth"] == 2;
        eventually(SOON, "its owner is known", known).await.unwrap();
        fleet.faults(owner, plan.clone());
        let answer = fleet.split.ask(&asks).await;
        assert_eq!((fleet.prefill(&answer), answer.engine()), (2 - owner, "engine-1"), "{plan:?}");
        assert_eq!(text(&answer), alone(&asks).await);
        fleet.engines[owner].faults().clear();
    }
    let refusing = FaultPlan { prefill_status: Some(400), ..FaultPlan::default() };
    let decoded = fleet.asked(1);
    for number in [0, 2] {
        fleet.faults(number, refusing.clone());
    }
    let answer = fleet.split.ask(&body(&prompt(9, 40))).await;
    assert!(answer.head.status == 400 && answer.head.header("x-kvlb-error").is_none(), "{}", answer.body.text());
    assert!(answer.body.json()["error"].is_object() && fleet.asked(1) == decoded);
    // All fail: the last word is an engine's.
    for number in [0, 2] {
        fleet.faults(number, FaultPlan { prefill_status: Some(500), ..FaultPlan::default() });
    }
    let answer = fleet.split.ask(&body(&prompt(9, 40))).await;
    assert!(answer.head.status == 500 && answer.head.header("x-kvlb-error").is_none() && fleet.asked(1) == decoded);
    for number in [0, 2] {
        fleet.engines[number].faults().clear();
    }
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_prefill_answers_are_decoded_all_the_same() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({})).await;
    let plans = [
        FaultPlan { prefill_without_params: true, ..FaultPlan::default() },
        FaultPlan { prefill_finish: Some("stop".to_owned()), ..FaultPlan::default() },
        FaultPlan { prefill_padding: Some(100 << 10), ..FaultPlan::default() },
        FaultPlan { prefill_padding: Some(2 << 20), ..FaultPlan::default() },
    ];
    for (number, plan) in (1..).zip(plans) {
        let asks = body(&prompt(number, 40));
        let hands_over = plan.prefill_padding.is_some();
        fleet.faults(0, plan);
        let answer = fleet.split.ask(&asks).await;
        assert_eq!((answer.engine(), text(&answer)), ("engine-1", alone(&asks).await));
        let legs = fleet.engines[1].legs();
        let fate = legs.iter().rfind(|leg| leg.kind == LegKind::Decode).map(|leg| leg.fate);
        assert_eq!(fate == Some(LegFate::PulledOwn), hands_over, "{legs:?}");
    }
    let none = "kvlb_pd_transfers_total{handoff=\"nixl\",result=\"none\"}";
    assert_eq!(fleet.split.metric(none).await, 2.0);
    fleet.engines[0].faults().clear();
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_leg_has_its_time_and_a_decode_endpoint_that_takes_nothing_is_passed_over() {
    let limits = json!({"timeoutPdPrefill": 400, "timeoutPdDecode": 700, "cb_enable": false});
    let fleet = Fleet::new(&[PREFILL, DECODE, DECODE], limits).await;
    fleet.faults(0, FaultPlan { stall_before_head: true, ..FaultPlan::default() });
    assert_eq!(code(&fleet.split.ask(&body(&prompt(1, 40))).await), (504, Some("pd_prefill_timeout")));
    fleet.engines[0].faults().clear();
    assert_eq!(fleet.asked(1) + fleet.asked(2), 0);
    for number in [1, 2] {
        fleet.faults(number, FaultPlan { decode_stall: true, ..FaultPlan::default() });
    }
    assert_eq!(code(&fleet.split.ask(&body(&prompt(2, 40))).await), (504, Some("pd_decode_timeout")));
    fleet.faults(1, FaultPlan { refuse_http: true, ..FaultPlan::default() });
    fleet.engines[2].faults().clear();
    for number in 3..7 {
        let asks = body(&prompt(number, 40));
        let answer = fleet.split.ask(&asks).await;
        assert_eq!((answer.engine(), text(&answer)), ("engine-2", alone(&asks).await));
    }
    // Nobody decodes: nobody computes a prompt in vain.
    fleet.faults(2, FaultPlan { refuse_http: true, ..FaultPlan::default() });
    let refused = async || code(&fleet.split.ask(&body(&prompt(8, 40))).await) == (503, Some("pd_pool_unavailable"));
    eventually(SOON, "the probes have found both down", async || {
        refused().await && fleet.split.explain(&body(&prompt(8, 40))).await["split"]["decode"].is_null()
    })
    .await
    .unwrap();
    let computed = fleet.asked(0);
    assert!(refused().await && fleet.asked(0) == computed);
    for number in [1, 2] {
        fleet.engines[number].faults().clear();
    }
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_endpoint_that_dies_is_told_or_seen() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({"cb_enable": false})).await;
    let mut asks = body(&prompt(1, 40));
    asks["max_tokens"] = json!(50);
    fleet.faults(1, FaultPlan { decode_die_after_chunks: Some(0), ..FaultPlan::default() });
    assert_eq!(code(&fleet.split.ask(&asks).await), (502, Some("pd_decode_backend_died")));
    fleet.faults(1, FaultPlan { decode_die_after_chunks: Some(3), ..FaultPlan::default() });
    asks["stream"] = json!(true);
    let torn = fleet.split.ask(&asks).await;
    assert!(torn.head.status == 200 && torn.body.end != End::Complete, "{:?}", torn.body.end);
    let legs: Vec<_> = fleet.engines[1].legs().iter().map(|leg| leg.kind).collect();
    assert_eq!(legs, [LegKind::Decode; 2], "neither was sent again");
    fleet.engines[1].faults().clear();
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_takes_blocks_and_legs_along() {
    let rule = json!({"fc_mode": "enforce", "fc_decode_max_inflight": 1, "fc_max_queue_depth": 8, "fc_max_queue_wait_ms": 60_000});
    let mut fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig {
        prefill_us_per_token: 20_000.0,
        kv_lease_s: 120.0,
        ..config
    })
    .await;
    let gone = async |asks: Value, until: &dyn Fn() -> bool| {
        let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
        client
            .request("POST", COMPLETIONS, &[("Content-Type", "application/json")], asks.to_string().as_bytes())
            .await
            .unwrap();
        eventually(SOON, "the request is where it is to be", async || until()).await.unwrap();
        drop(client);
    };
    // While its prompt is computed.
    gone(body(&prompt(1, 100)), &|| fleet.engines[0].running() == 1).await;
    eventually(SOON, "the prefill is given up", async || fleet.engines[0].running() == 0).await.unwrap();
    assert_eq!((fleet.engines[0].handoffs().granted, fleet.asked(1)), (0, 0));
    // While it waits for a place to decode.
    let mut long = body(&prompt(2, 20));
    long["max_tokens"] = json!(20_000);
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    client
        .request("POST", COMPLETIONS, &[("Content-Type", "application/json")], long.to_string().as_bytes())
        .await
        .unwrap();
    eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
    gone(body(&prompt(3, 20)), &|| fleet.engines[0].handoffs().leases_open == 1).await;
    // Its place is the first one's: the blocks go when that has left, too, at the latest with the lease.
    drop(client);
    eventually(SOON, "the decode is given up", async || fleet.engines[1].running() == 0).await.unwrap();
    fleet.engines[0].kill().await;
    fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_client_that_left_are_freed_where_a_decode_endpoint_has_room() {
    let fleet = Fleet::of(&[PREFILL, DECODE], json!({"timeoutMemberConnect": 8000}), |config| EngineConfig {
        kv_lease_s: 300.0,
        ..config
    })
    .await;
    // A decode endpoint that stands still takes no request: its answer is what the client does not wait for.
    fleet.engines[1].faults().set(|plan| plan.pause = true);
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    let asks = body(&prompt(1, 40)).to_string();
    client.request("POST", COMPLETIONS, &[("Content-Type", "application/json")], asks.as_bytes()).await.unwrap();
    eventually(SOON, "the prompt is computed", async || fleet.engines[0].handoffs().granted == 1).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(client);
    fleet.engines[1].faults().clear();
    eventually(SOON, "its blocks are free", async || fleet.engines[0].handoffs().leases_open == 0).await.unwrap();
    assert_eq!(fleet.engines[0].handoffs().expired, 0);
    fleet.ends_clean().await;
}

/// Pitfall 101: a decode that begins when the blocks are gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_decoded_when_the_blocks_may_be_gone() {
    let rule = json!({"fc_mode": "enforce", "fc_decode_max_inflight": 1, "fc_max_queue_depth": 8, "fc_max_queue_wait_ms": 60_000,
        "timeoutPdHandoff": 500});
    let fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig { kv_lease_s: 1.0, ..config }).await;
    let mut long = body(&prompt(1, 20));
    (long["max_tokens"], long["stream"]) = (json!(20_000), json!(true));
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    client
        .request("POST", COMPLETIONS, &[("Content-Type", "application/json")], long.to_string().as_bytes())
        .await
        .unwrap();
    eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
    let answer = fleet.split.ask(&body(&prompt(2, 20))).await;
    assert_eq!(code(&answer), (504, Some("pd_handoff_timeout")));
    assert_eq!(fleet.engines[0].handoffs().granted, 3, "both legs were begun twice");
    drop(client);
    eventually(SOON, "there is room again", async || fleet.engines[1].running() == 0).await.unwrap();
    let asks = body(&prompt(2, 20));
    assert_eq!(text(&fleet.split.ask(&asks).await), alone(&asks).await);
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_keeps_both_of_its_endpoints() {
    let mut fleet = Fleet::new(&[PREFILL, DECODE, PREFILL, DECODE], json!({"cb_enable": false})).await;
    let mut pairs = Vec::new();
    for turn in 0..6 {
        for conversation in 0..3_u32 {
            let name = format!("conversation-{conversation}");
            let asks = body(&prompt(conversation + 10 * turn + 1, 20)).to_string();
            let answer = fleet.split.post(COMPLETIONS, &[("X-Conversation-Id", &name)], asks.as_bytes()).await;
            let pair = (fleet.prefill(&answer), answer.engine().to_owned());
            match pairs.get(conversation as usize) {
                None => pairs.push(pair),
                Some(first) => assert_eq!(*first, pair, "turn {turn} of {name}"),
            }
        }
    }
    assert!(
        pairs.iter().any(|(_, decode)| decode == "engine-1") && pairs.iter().any(|(_, decode)| decode == "engine-3")
    );
    // Its decode endpoint goes: its prefill endpoint stays.
    let gone = if pairs[0].1 == "engine-1" { 1 } else { 3 };
    fleet.engines[gone].kill().await;
    for _ in 0..3 {
        let asks = body(&prompt(77, 20)).to_string();
        let answer = fleet.split.post(COMPLETIONS, &[("X-Conversation-Id", "conversation-0")], asks.as_bytes()).await;
        assert_eq!(
            (fleet.prefill(&answer), answer.engine()),
            (pairs[0].0, ["engine-1", "engine-3"][usize::from(gone == 1)])
        );
    }
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_tells_the_prefill_endpoints_cache_and_every_record_has_both_legs() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({})).await;
    let ids = prompt(1, 40);
    fleet.split.ask(&body(&ids)).await;
    let known = async || fleet.split.explain(&body(&ids)).await["candidates"][0]["depth"] == 2;
    eventually(SOON, "the blocks are known", known).await.unwrap();
    let mut asks = body(&[&ids[..32], &prompt(2, 30)].concat());
    (asks["stream"], asks["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let answer = fleet.split.ask(&asks).await;
    let usage = answer.body.events().iter().rev().find_map(|event| {
        let chunk: Value = serde_json::from_str(event).ok()?;
        chunk["usage"].is_object().then(|| chunk["usage"].clone())
    });
    let usage = usage.unwrap();
    assert_eq!((&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]), (&json!(62), &json!(32)));
    let id = fleet.split.id;
    let metrics = fleet.split.kvlb.metrics().await.unwrap();
    for (leg, result) in [("prefill", "done"), ("decode", "answered")] {
        let series = format!("kvlb_pd_legs_total{{leg=\"{leg}\",result=\"{result}\",service=\"{id}\"}}");
        assert_eq!(metrics.value(&series), 2.0, "{series}");
    }
    assert_eq!(metrics.value("kvlb_pd_transfers_total{handoff=\"nixl\",result=\"passed_on\"}"), 2.0);
    assert_eq!(metrics.value(&format!("kvlb_pd_prefill_seconds_count{{service=\"{id}\"}}")), 2.0);
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_endpoint_that_holds_nearly_all_serves_alone_where_the_rule_says_so() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({"pdBypassTokens": 32})).await;
    let ids = prompt(1, 100);
    let first = fleet.split.ask(&body(&ids)).await;
    assert_eq!((fleet.prefill(&first), first.engine()), (0, "engine-1"));
    let next = [ids.clone(), prompt(2, 10)].concat();
    let known = async || fleet.split.explain(&body(&next)).await["split"]["alone"] == "bypass";
    let heard = eventually(SOON, "the decode endpoint is known to hold it", known).await;
    assert!(
        heard.is_ok(),
        "{} {:?}",
        fleet.split.explain(&body(&next)).await,
        fleet.split.kvlb.statuses(fleet.split.id).await
    );
    let answer = fleet.split.ask(&body(&next)).await;
    assert_eq!((answer.engine(), answer.head.header("x-kvlb-prefill-endpoint")), ("engine-1", None));
    assert_eq!((answer.head.header("x-kvlb-depth"), fleet.asked(0)), (Some("6"), 1));
    assert_eq!(text(&answer), alone(&body(&next)).await);
    assert_eq!(fleet.split.whole("bypass").await, 1.0);
    // What it would have to compute is more than that.
    let longer = [ids, prompt(3, 60)].concat();
    assert_eq!(fleet.prefill(&fleet.split.ask(&body(&longer)).await), 0);
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_counts_for_each_leg_where_it_is() {
    let fleet = Fleet::new(&[PREFILL, DECODE, DECODE], json!({})).await;
    let mut long = body(&prompt(1, 20));
    (long["max_tokens"], long["stream"]) = (json!(20_000), json!(true));
    let mut clients = Vec::new();
    for _ in 0..8 {
        let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
        client
            .request("POST", COMPLETIONS, &[("Content-Type", "application/json")], long.to_string().as_bytes())
            .await
            .unwrap();
        clients.push(client);
    }
    let loads = async || {
        let told = fleet.split.explain(&long).await;
        [0, 1, 2].map(|number| told["candidates"][number]["load"].as_u64().unwrap())
    };
    eventually(SOON, "four at each decode endpoint, none where prompts are computed", async || {
        loads().await == [0, 4, 4]
    })
    .await
    .unwrap();
    drop(clients);
    fleet.ends_clean().await;
}
