//! Rules that split under their other promises: admission, breakers, drain, restarts, and connections that clients keep.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "counters are whole numbers")]

mod split;

use std::net::IpAddr;

use kvlb_tests::engine::{Engine, EngineConfig, FaultPlan, KvConnector, KvRole, LegFate, LegKind};
use kvlb_tests::harness::http::{Answer, exchange};
use kvlb_tests::harness::stage::{at, cached_tokens, engine, rule};
use kvlb_tests::harness::{eventually, free_ports};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use split::{COMPLETIONS, DECODE, Fleet, JSON, PREFILL, SOON, alone, body, code, long, prompt, text, with};

/// Asks for different prompts, all at once.
async fn at_once(fleet: &Fleet, seeds: std::ops::Range<u32>) -> Vec<Answer> {
    let mut clients = JoinSet::new();
    for seed in seeds {
        let (vip, asks) = (fleet.split.vip, body(&prompt(seed, 40)).to_string());
        clients.spawn(async move { exchange(vip, "POST", COMPLETIONS, JSON, asks.as_bytes()).await.unwrap() });
    }
    clients.join_all().await
}

fn queue(more: &Value) -> Value {
    with(json!({"fc_mode": "enforce", "fc_max_queue_depth": 64, "fc_max_queue_wait_ms": 20_000}), more)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_has_its_bound() {
    let rule = queue(&json!({"fc_prefill_max_inflight": 2, "fc_decode_max_inflight": 3}));
    let fleet = Fleet::of(&[PREFILL, DECODE, DECODE], rule, |config| EngineConfig {
        prefill_us_per_token: 200.0,
        decode_ms_per_token: 5.0,
        ..config
    })
    .await;
    let answers = at_once(&fleet, 0..24).await;
    assert!(
        answers.iter().all(|answer| answer.head.status == 200),
        "{:?}",
        answers.iter().map(code).collect::<Vec<_>>()
    );
    let peaks: Vec<_> = fleet.engines.iter().map(|engine| engine.counters().posts_peak).collect();
    assert!(peaks[0] <= 2 && peaks[1] <= 3 && peaks[2] <= 3, "{peaks:?}");
    let metrics = fleet.split.kvlb.metrics().await.unwrap();
    assert_eq!((metrics.sum("kvlb_admission_inflight"), metrics.sum("kvlb_admission_queued")), (0.0, 0.0));
    fleet.ends_clean().await;
}

/// A request that goes from one leg to the other is one request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_on_the_whole_rule_lets_each_request_through_to_its_end() {
    let rule = queue(&json!({"fc_max_outstanding": 1}));
    let fleet = Fleet::new(&[PREFILL, DECODE], rule).await;
    let answers = at_once(&fleet, 0..8).await;
    assert!(
        answers.iter().all(|answer| answer.head.status == 200),
        "{:?}",
        answers.iter().map(code).collect::<Vec<_>>()
    );
    fleet.ends_clean().await;
}

/// Blocks of a prompt are kept until somebody fetches them, so a request that has its prompt computed goes before those that have
/// not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_on_the_whole_rule_bounds_the_prompts_that_wait_to_be_decoded() {
    let rule = queue(&json!({"fc_max_outstanding": 3}));
    let fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig {
        decode_ms_per_token: 10.0,
        kv_lease_s: 300.0,
        ..config
    })
    .await;
    let mut clients = JoinSet::new();
    for seed in 0..30 {
        let (vip, asks) = (fleet.split.vip, body(&prompt(seed, 40)).to_string());
        clients.spawn(async move { exchange(vip, "POST", COMPLETIONS, JSON, asks.as_bytes()).await.unwrap() });
    }
    let mut most = 0;
    while !clients.is_empty() {
        most = most.max(fleet.engines[0].handoffs().leases_open);
        if let Some(answer) = clients.try_join_next() {
            assert_eq!(answer.unwrap().head.status, 200);
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(most <= 3, "{most} prompts were kept at a time");
    assert_eq!((fleet.asked(0), fleet.asked(1)), (30, 30), "nothing is computed twice");
    fleet.ends_clean().await;
}

/// Blocks would be kept for five minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_finds_no_room_to_decode_leaves_no_blocks() {
    for (more, wanted) in [
        (json!({"fc_max_queue_depth": 0}), (429, Some("admission_capacity"))),
        (json!({"fc_max_queue_wait_ms": 300}), (504, Some("admission_queue_timeout"))),
    ] {
        let rule = with(queue(&json!({"fc_decode_max_inflight": 1})), &more);
        let fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig { kv_lease_s: 300.0, ..config }).await;
        let first = fleet.begun(&long(1)).await;
        eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
        let answer = fleet.split.ask(&body(&prompt(2, 40))).await;
        assert_eq!(code(&answer), wanted, "{more}");
        let freed =
            eventually(SOON, "its blocks are free", async || fleet.engines[0].handoffs().leases_open == 0).await;
        assert!(freed.is_ok(), "{more}: {:?}", fleet.engines[0].handoffs());
        drop(first);
        fleet.ends_clean().await;
    }
}

/// What a decode engine fetched from freed blocks it would hold for the prompt's, and answer others from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_may_be_gone_are_not_asked_for_to_have_them_freed() {
    let rule = queue(&json!({"fc_decode_max_inflight": 1, "timeoutPdHandoff": 300}));
    let fleet = Fleet::of(&[PREFILL, DECODE], rule, |config| EngineConfig { kv_lease_s: 3.0, ..config }).await;
    let first = fleet.begun(&long(1)).await;
    eventually(SOON, "the first one decodes", async || fleet.engines[1].running() == 1).await.unwrap();
    assert_eq!(code(&fleet.split.ask(&body(&prompt(2, 40))).await), (504, Some("pd_handoff_timeout")));
    let ended = async || fleet.engines[0].handoffs().expired == 2;
    eventually(SOON, "the leases of both rounds end by themselves", ended).await.unwrap();
    assert_eq!(fleet.asked(1), 1);
    assert_eq!(fleet.split.kvlb.metrics().await.unwrap().sum("kvlb_pd_releases_total"), 0.0);
    drop(first);
    fleet.ends_clean().await;
}

/// A breaker is one endpoint's: who decodes badly does so, and nobody else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_endpoint_that_fails_opens_its_own_breaker_only() {
    let fleet = Fleet::new(&[PREFILL, DECODE, DECODE], json!({"cb_open_sec": 60})).await;
    fleet.faults(1, FaultPlan { decode_die_after_chunks: Some(0), ..FaultPlan::default() });
    let mut died = 0;
    for seed in 0..20 {
        let answer = fleet.split.ask(&body(&prompt(seed, 40))).await;
        match code(&answer) {
            (200, None) => assert_eq!(answer.engine(), "engine-2"),
            told => {
                assert_eq!(told, (502, Some("pd_decode_backend_died")));
                died += 1;
            }
        }
    }
    assert_eq!(died, 3, "cb_answer_failures");
    let told = fleet.split.explain(&body(&prompt(1, 40))).await;
    let eligible = [0, 1, 2].map(|number| told["candidates"][number]["eligible"].as_bool().unwrap());
    assert_eq!((eligible, &told["split"]["decode"]), ([true, false, true], &json!(2)), "{told}");
    fleet.engines[1].faults().clear();
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_endpoint_that_fails_opens_its_own_breaker_only() {
    let fleet = Fleet::new(&[PREFILL, DECODE, PREFILL], json!({"cb_open_sec": 60})).await;
    fleet.faults(0, FaultPlan { prefill_status: Some(500), ..FaultPlan::default() });
    for seed in 0..20 {
        let answer = fleet.split.ask(&body(&prompt(seed, 40))).await;
        assert_eq!((answer.head.status, fleet.prefill(&answer)), (200, 2));
    }
    assert_eq!(fleet.asked(0), 3, "cb_answer_failures");
    fleet.engines[0].faults().clear();
    fleet.ends_clean().await;
}

/// Takes an endpoint out, or back in.
async fn set(fleet: &Fleet, number: usize, state: &str) {
    let address = fleet.engines[number].addresses().http;
    let body = json!({"hostName": address.ip(), "epPort": address.port(), "state": state});
    let path = "/netlox/v1/config/endpointhoststate";
    let (status, answer) = fleet.split.kvlb.api("POST", path, Some(&body)).await.unwrap();
    assert!((200..300).contains(&status), "{status}: {answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_that_is_taken_out_gets_neither_leg_until_it_is_back() {
    let fleet = Fleet::new(&[PREFILL, DECODE, PREFILL, DECODE], json!({})).await;
    set(&fleet, 0, "yellow").await;
    set(&fleet, 1, "yellow").await;
    for seed in 0..6 {
        let answer = fleet.split.ask(&body(&prompt(seed, 40))).await;
        assert_eq!((answer.head.status, fleet.prefill(&answer), answer.engine()), (200, 2, "engine-3"));
    }
    set(&fleet, 3, "red").await;
    let asked = fleet.asked(2);
    assert_eq!(code(&fleet.split.ask(&body(&prompt(9, 40))).await), (503, Some("pd_pool_unavailable")));
    assert_eq!(fleet.asked(2), asked, "no prompt is computed in vain");
    for number in [0, 1, 3] {
        set(&fleet, number, "green").await;
    }
    let answers = at_once(&fleet, 20..40).await;
    let by = |name: &str| answers.iter().filter(|answer| answer.engine() == name).count();
    assert!(by("engine-1") > 4 && by("engine-3") > 4 && by("engine-1") + by("engine-3") == 20);
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_carries_requests_of_every_kind_and_fate() {
    let fleet = Fleet::new(&[PREFILL, DECODE], json!({"cb_enable": false, "timeoutPdPrefill": 500})).await;
    let mut client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
    let wanted = alone(&body(&prompt(1, 40))).await;
    for round in 0..3 {
        for (what, plan, more, expected) in [
            ("split", None, json!({}), (200, None)),
            ("stream", None, json!({"stream": true}), (200, None)),
            ("alone", None, json!({"n": 2}), (200, None)),
            ("refused", Some(FaultPlan { prefill_status: Some(400), ..FaultPlan::default() }), json!({}), (400, None)),
            ("failed", Some(FaultPlan { prefill_status: Some(500), ..FaultPlan::default() }), json!({}), (500, None)),
            (
                "late",
                Some(FaultPlan { stall_before_head: true, ..FaultPlan::default() }),
                json!({}),
                (504, Some("pd_prefill_timeout")),
            ),
        ] {
            if let Some(plan) = plan {
                fleet.faults(0, plan);
            }
            let asks = with(body(&prompt(1, 40)), &more);
            client.request("POST", COMPLETIONS, JSON, asks.to_string().as_bytes()).await.unwrap();
            let answer = client.answer().await.unwrap();
            assert_eq!(code(&answer), expected, "{what} in round {round}");
            if what == "split" {
                assert_eq!(text(&answer), wanted);
            }
            fleet.engines[0].faults().clear();
            if answer.head.header("connection").is_some_and(|word| word.eq_ignore_ascii_case("close")) {
                client = fleet.split.kvlb.connect(fleet.split.vip).await.unwrap();
            }
        }
    }
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_engines_serve_alone_they_serve_and_decode_endpoints_where_nobody_else_may_be_asked() {
    let mut fleet = Fleet::new(&[PREFILL, DECODE], json!({"cb_enable": false})).await;
    let chat = json!([{"role": "user", "content": "hello"}]);
    let requests = [
        ("/v1/responses", "api", json!({"model": "tiny", "input": "hello", "max_output_tokens": 3})),
        ("/v1/messages", "api", json!({"model": "tiny", "messages": chat, "max_tokens": 3})),
        ("/v1/chat/completions", "samples", json!({"model": "tiny", "messages": chat, "n": 2, "max_tokens": 3})),
        (COMPLETIONS, "samples", json!({"model": "tiny", "prompt": "x", "best_of": 2, "max_tokens": 3})),
        (COMPLETIONS, "samples", json!({"model": "tiny", "prompt": "x", "use_beam_search": true, "max_tokens": 3})),
        (COMPLETIONS, "batch", json!({"model": "tiny", "prompt": ["x", "y"], "max_tokens": 3})),
        (COMPLETIONS, "embeds", json!({"model": "tiny", "prompt": "x", "prompt_embeds": "AAAA", "max_tokens": 3})),
        ("/tokenize", "not_inference", json!({"model": "tiny", "prompt": "hello"})),
    ];
    for serves in ["engine-0", "engine-1"] {
        for (path, reason, asks) in &requests {
            let before = fleet.split.whole(reason).await;
            let answer = fleet.split.post(path, &[], asks.to_string().as_bytes()).await;
            assert_eq!((answer.head.status, answer.engine()), (200, serves), "{path} {asks}: {}", answer.body.text());
            assert_eq!(answer.head.header("x-kvlb-prefill-endpoint"), None, "{path}");
            assert_eq!(fleet.split.whole(reason).await, before + 1.0, "{path} {asks}");
        }
        if serves == "engine-0" {
            fleet.engines[0].kill().await;
            let asks = body(&prompt(1, 20));
            eventually(SOON, "it is known to be down", async || {
                code(&fleet.split.ask(&asks).await) == (503, Some("pd_pool_unavailable"))
            })
            .await
            .unwrap();
        }
    }
    assert!(fleet.engines.iter().all(|engine| engine.legs().is_empty()));
    fleet.ends_clean().await;
}

/// vLLM reports so by itself from 0.31 on: both ways lead to the same number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_tokens_are_the_same_whoever_puts_them_right() {
    let mut told = Vec::new();
    for report_remote_cached_tokens in [true, false] {
        let fleet =
            Fleet::of(&[PREFILL, DECODE], json!({}), |config| EngineConfig { report_remote_cached_tokens, ..config })
                .await;
        let ids = prompt(1, 70);
        fleet.split.ask(&body(&ids[..33])).await;
        let known = async || fleet.split.explain(&body(&ids)).await["candidates"][0]["depth"] == 2;
        eventually(SOON, "the blocks are known", known).await.unwrap();
        let plain = fleet.split.ask(&body(&ids)).await;
        // The prefill endpoint holds four blocks by now.
        let usage = json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
        let stream = fleet.split.ask(&with(body(&ids), &usage)).await;
        let each: Vec<_> = stream
            .body
            .events()
            .iter()
            .filter_map(|event| {
                let chunk: Value = serde_json::from_str(event).ok()?;
                chunk["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
            })
            .collect();
        assert!(!each.is_empty() && each.iter().all(|cached| *cached == 64), "{each:?}");
        told.push((plain.cached_tokens(), cached_tokens(&stream)));
        fleet.ends_clean().await;
    }
    assert_eq!(told, [(Some(32), Some(64)); 2]);
}

/// With Mooncake both legs name the transfer by an id of kvlb's, and the decode leg says where the other one is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mooncakes_second_choice_hands_over_as_the_first_would() {
    let [port] = free_ports().unwrap();
    let rule = json!({"pdHandoff": "mooncake", "pdBootstrapPort": port, "cb_enable": false});
    let fleet = Fleet::of(&[PREFILL, DECODE, PREFILL], rule, |config| {
        let number = config.name.trim_start_matches("engine-").parse::<u8>().unwrap();
        let (kv_role, kv_bootstrap_port) = if number == 1 { (KvRole::Consumer, 0) } else { (KvRole::Producer, port) };
        let host = IpAddr::from([127, 0, 0, 91 + number]);
        EngineConfig { host, kv_connector: KvConnector::Mooncake, kv_role, kv_bootstrap_port, ..config }
    })
    .await;
    let ready = async || {
        let told = fleet.split.explain(&body(&prompt(1, 40))).await;
        [0, 2].iter().all(|number| told["candidates"][*number]["eligible"] == true)
    };
    eventually(SOON, "both have told who they are", ready).await.unwrap();
    let mut first = None;
    for seed in 0..6 {
        let asks = body(&prompt(10 + seed, 40));
        for number in [0, 2] {
            let status = (first == Some(2 - number)).then_some(500);
            fleet.faults(number, FaultPlan { prefill_status: status, ..FaultPlan::default() });
        }
        let answer = fleet.split.ask(&asks).await;
        assert_eq!((answer.engine(), text(&answer)), ("engine-1", alone(&asks).await));
        first = Some(fleet.prefill(&answer));
    }
    let decodes: Vec<_> = fleet.engines[1].legs().into_iter().filter(|leg| leg.kind == LegKind::Decode).collect();
    assert!(decodes.iter().all(|leg| leg.fate == LegFate::PulledOwn), "{decodes:?}");
    let mut keys: Vec<_> = decodes.iter().map(|leg| leg.key.clone().unwrap()).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 6, "no transfer has another's id");
    fleet.ends_clean().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_that_splits_does_so_again_when_kvlb_began_anew_and_shows_nothing_unasked() {
    let Some(stage) = kvlb_tests::harness::stage::Stage::new("again").unwrap() else { return };
    stage.own(kvlb_tests::harness::stage::VIP).unwrap();
    let mut engines: Vec<Engine> = Vec::new();
    for number in 11..13 {
        let config = EngineConfig { kv_connector: KvConnector::Nixl, ..engine() };
        engines.push(stage.engine(at(number, config)).await.unwrap());
    }
    let mut wanted = rule(8080, &engines, &json!({"kvExactMode": 1, "pdHandoff": "nixl", "timeoutPdHandoff": 7000}));
    (wanted["endpoints"][0]["ep_role"], wanted["endpoints"][1]["ep_role"]) = (json!(1), json!(2));
    let kvlb = stage.kvlb(&["--datapath", "none"]).await.unwrap();
    let id = kvlb.create(&wanted).await.unwrap();
    let arguments = kvlb.rule(id).await.unwrap()["serviceArguments"].clone();
    kvlb.stop().await.unwrap();
    let kvlb = stage.kvlb(&["--datapath", "none"]).await.unwrap();
    let again = kvlb.rule(id).await.unwrap();
    assert_eq!(again["serviceArguments"]["timeoutPdHandoff"], arguments["timeoutPdHandoff"]);
    assert_eq!((&again["endpoints"][0]["ep_role"], &again["endpoints"][1]["ep_role"]), (&json!(1), &json!(2)));
    kvlb.subscribed(id).await.unwrap();
    let answer =
        stage.ask(8080, COMPLETIONS, &json!({"prompt": (1..40).collect::<Vec<u32>>(), "max_tokens": 3})).await.unwrap();
    assert_eq!((answer.head.status, answer.engine()), (200, "engine-12"), "{}", answer.body.text());
    assert_eq!(engines[1].handoffs().pulled_own, 1);
    let ours = answer.head.headers.iter().filter(|(name, _)| name.to_ascii_lowercase().starts_with("x-kvlb")).count();
    assert_eq!(ours, 0, "{:?}", answer.head.headers);
    kvlb.stop().await.unwrap();
}

/// The rule as it is when a leg begins counts for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_leg_goes_by_the_rule_as_it_is_by_then() {
    let slow = |config: EngineConfig| EngineConfig { prefill_us_per_token: 30_000.0, ..config };
    let fleet = Fleet::of(&[PREFILL, DECODE, DECODE], json!({}), slow).await;
    let set = async |keep: usize| {
        let mut all = fleet.split.kvlb.rule(fleet.split.id).await.unwrap();
        let endpoints = all["endpoints"].as_array().unwrap().clone();
        let spare = 3 - keep;
        let kept = endpoints
            .into_iter()
            .filter(|endpoint| endpoint["targetPort"] != json!(fleet.engines[spare].addresses().http.port()));
        all["endpoints"] = kept.collect();
        fleet.split.kvlb.create(&all).await.unwrap();
    };
    set(1).await;
    fleet.split.kvlb.subscribed(fleet.split.id).await.unwrap();
    let mut client = fleet.begun(&body(&prompt(1, 40))).await;
    eventually(SOON, "the prompt is being computed", async || fleet.engines[0].running() == 1).await.unwrap();
    // The other endpoint comes, and the one that would have decoded goes.
    let mut all = fleet.split.kvlb.rule(fleet.split.id).await.unwrap();
    let address = fleet.engines[2].addresses();
    all["endpoints"][1]["targetPort"] = json!(address.http.port());
    all["endpoints"][1]["kvZmqPort"] = json!(address.events.unwrap().port());
    all["endpoints"][1]["kvReplayPort"] = json!(address.replay.unwrap().port());
    fleet.split.kvlb.create(&all).await.unwrap();
    assert_eq!(fleet.engines[0].running(), 1, "still the first leg");
    let answer = client.answer().await.unwrap();
    assert_eq!((answer.head.status, answer.engine()), (200, "engine-2"));
    assert_eq!(fleet.prefill(&answer), 0);
    drop(client);
    fleet.ends_clean().await;
}
