//! Conversations of a rule that splits: which of their two endpoints they keep when something happens to one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod split;

use kvlb_tests::engine::{Death, FaultPlan};
use kvlb_tests::harness::http::Answer;
use serde_json::{Value, json};

use split::{COMPLETIONS, DECODE, Fleet, PREFILL, body, prompt, with};

/// Three of each role, so that what is chosen anew is rarely the same by chance.
const ROLES: [u8; 6] = [PREFILL, PREFILL, PREFILL, DECODE, DECODE, DECODE];
/// Conversations for each case.
const CONVERSATIONS: u32 = 6;

struct Conversations {
    fleet: Fleet,
    /// Prompts so far, each another.
    turns: std::cell::Cell<u32>,
}

impl Conversations {
    async fn new() -> Self {
        let rule = json!({"cb_enable": false});
        Self { fleet: Fleet::new(&ROLES, rule).await, turns: std::cell::Cell::new(0) }
    }

    async fn ask(&self, name: &str, path: &str, more: &Value) -> Answer {
        self.turns.set(self.turns.get() + 1);
        let asks = with(body(&prompt(self.turns.get(), 20)), more).to_string();
        self.fleet.split.post(path, &[("X-Conversation-Id", name)], asks.as_bytes()).await
    }

    /// One more turn: where it was computed and where it was decoded.
    async fn turn(&self, name: &str) -> (usize, usize) {
        let answer = self.ask(name, COMPLETIONS, &json!({})).await;
        assert_eq!(answer.head.status, 200, "{}", answer.body.text());
        let decode = answer.engine().trim_start_matches("engine-").parse().unwrap();
        (self.fleet.prefill(&answer), decode)
    }

    /// For each of several conversations whether it kept its endpoints over what `happens` to it and to them.
    async fn over(&self, case: &str, happens: impl AsyncFn(&str, (usize, usize))) -> Vec<(bool, bool)> {
        let mut kept = Vec::new();
        for number in 0..CONVERSATIONS {
            let name = format!("{case}-{number}");
            let before = self.turn(&name).await;
            assert_eq!(self.turn(&name).await, before, "{name} is pinned");
            happens(&name, before).await;
            // Others have their turns, so that load and turn lead elsewhere.
            for other in 0..=number {
                self.turn(&format!("{name}-{other}")).await;
            }
            let after = self.turn(&name).await;
            kept.push((before.0 == after.0, before.1 == after.1));
        }
        kept
    }

    async fn set(&self, number: usize, state: &str) {
        let address = self.fleet.engines[number].addresses().http;
        let body = json!({"hostName": address.ip(), "epPort": address.port(), "state": state});
        let path = "/netlox/v1/config/endpointhoststate";
        let (status, answer) = self.fleet.split.kvlb.api("POST", path, Some(&body)).await.unwrap();
        assert!((200..300).contains(&status), "{status}: {answer}");
    }

    /// A turn while one endpoint has a fault.
    async fn turn_with(&self, name: &str, number: usize, plan: FaultPlan) {
        self.fleet.faults(number, plan);
        self.ask(name, COMPLETIONS, &json!({})).await;
        self.fleet.faults(number, FaultPlan::default());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_uses_one_half_leaves_the_other() {
    let all = Conversations::new().await;
    for (case, path, more) in [
        ("n", COMPLETIONS, json!({"n": 2})),
        ("nothing", COMPLETIONS, json!({"max_tokens": 0})),
        ("tokenize", "/tokenize", json!({})),
        ("embeddings", "/v1/embeddings", json!({"input": "x"})),
        ("refused", COMPLETIONS, json!({"temperature": "hot"})),
    ] {
        let kept = all.over(case, async |name, _pair| drop(all.ask(name, path, &more).await)).await;
        assert!(kept.iter().all(|kept| *kept == (true, true)), "{case}: {kept:?}");
    }
    // Where nobody computes prompts, a decode endpoint stands in, and nothing moves there.
    let kept = all.over("stands in", async |name, _pair| {
        for number in 0..3 {
            all.set(number, "yellow").await;
        }
        all.ask(name, "/tokenize", &json!({})).await;
        for number in 0..3 {
            all.set(number, "green").await;
        }
    });
    let kept = kept.await;
    assert!(kept.iter().all(|kept| *kept == (true, true)), "stands in: {kept:?}");
    all.fleet.split.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_half_that_fails_moves_and_the_other_stays() {
    let all = Conversations::new().await;
    for (case, plan) in [
        ("dead", FaultPlan { prefill_dies: Some(Death::Before), ..FaultPlan::default() }),
        ("500", FaultPlan { prefill_status: Some(500), ..FaultPlan::default() }),
        ("503", FaultPlan { prefill_status: Some(503), ..FaultPlan::default() }),
    ] {
        let kept = all.over(case, async |name, pair| all.turn_with(name, pair.0, plan.clone()).await).await;
        assert!(kept.iter().all(|kept| *kept == (false, true)), "prefill {case}: {kept:?}");
    }
    let drained = async |name: &str, number: usize| {
        all.set(number, "yellow").await;
        all.turn(name).await;
        all.set(number, "green").await;
    };
    let kept = all.over("prefill drained", async |name, pair| drained(name, pair.0).await).await;
    assert!(kept.iter().all(|kept| *kept == (false, true)), "prefill drained: {kept:?}");
    let kept = all.over("decode drained", async |name, pair| drained(name, pair.1).await).await;
    assert!(kept.iter().all(|kept| *kept == (true, false)), "decode drained: {kept:?}");
    for (case, plan) in [
        ("dies", FaultPlan { decode_die_after_chunks: Some(0), ..FaultPlan::default() }),
        ("breaks off", FaultPlan { decode_die_after_chunks: Some(1), ..FaultPlan::default() }),
    ] {
        let kept = all.over(case, async |name, pair| all.turn_with(name, pair.1, plan.clone()).await).await;
        assert!(kept.iter().all(|kept| kept.0), "decode {case}: {kept:?}");
        assert!(kept.iter().any(|kept| !kept.1), "decode {case}: {kept:?}");
    }
    all.fleet.split.kvlb.stop().await.unwrap();
}

/// Also one that has just begun, or has just moved: the prompt's blocks are there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_a_prompt_was_computed_it_stays_though_its_decoding_failed() {
    let all = Conversations::new().await;
    for number in 3..6 {
        all.fleet.faults(number, FaultPlan { decode_die_after_chunks: Some(0), ..FaultPlan::default() });
    }
    let asked = |number: usize| all.fleet.asked(number);
    let mut first = Vec::new();
    for conversation in 0..CONVERSATIONS {
        let before: Vec<_> = (0..3).map(asked).collect();
        assert_eq!(all.ask(&format!("new-{conversation}"), COMPLETIONS, &json!({})).await.head.status, 502);
        first.push((0..3).rfind(|number| asked(*number) > before[*number]).unwrap());
    }
    for number in 3..6 {
        all.fleet.faults(number, FaultPlan::default());
    }
    for conversation in (0..CONVERSATIONS).rev() {
        assert_eq!(all.turn(&format!("new-{conversation}")).await.0, first[conversation as usize], "{first:?}");
    }
    all.fleet.split.kvlb.stop().await.unwrap();
}
