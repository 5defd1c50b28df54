//! What clients ask, in which manner, and what they are told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep, timeout};

use super::BLOCK;
use super::judge::Judge;
use crate::engine::Digest;
use crate::harness::dice::Dice;
use crate::harness::http::{self, Answer, End};

/// Beginnings that prompts share.
const GROUPS: u32 = 40;
/// An answer's tokens at most.
const TOKENS_MAX: u32 = 24;
/// No request of this storm takes as long: limits of the rule, tries and troubles are all shorter.
const HUNG: Duration = Duration::from_secs(90);
const PATH: &str = "/v1/completions";

/// How a request is sent and its answer read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// As any client does.
    Plain,
    /// Over a connection of its own.
    Fresh,
    /// The client's side is closed after the request.
    HalfClosed,
    /// The client goes away this many milliseconds after the request.
    Leaves(u32),
    /// The answer is left lying for this many milliseconds at its head.
    Slow(u32),
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) id: String,
    /// The tokens of the answer.
    pub(super) expected: Vec<u32>,
    pub(super) streamed: bool,
    /// SHA-256 of the body, as the engines' journals write it.
    pub(super) body_sha256: String,
    manner: Manner,
    body: String,
}

/// What a client was told.
#[derive(Clone, Debug)]
pub(super) enum Told {
    /// An answer, as far as it came.
    Answer(Said),
    /// Nothing: it went away.
    Left,
    /// No connection, or one that ended without an answer.
    Nothing(#[expect(dead_code, reason = "a violation shows it")] String),
}

impl Told {
    /// Whether it is a whole answer of an engine.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self, Self::Answer(said) if said.status == 200 && said.whole)
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub(super) struct Said {
    pub(super) status: u16,
    /// kvlb's own error code.
    pub(super) code: Option<String>,
    /// It ended as its framing promised, and a stream with its last event.
    pub(super) whole: bool,
    pub(super) tokens: Vec<u32>,
}

/// The tokens that engines answer a prompt with.
pub(super) fn answer_to(prompt: &[u32]) -> Vec<u32> {
    let mix = prompt.iter().fold(17_u32, |mix, token| mix.wrapping_mul(31).wrapping_add(*token));
    (0..=mix % TOKENS_MAX).map(|at| 100 + mix.wrapping_add(at * 7) % 1000).collect()
}

/// One client, with the connection that it keeps.
#[derive(Debug)]
pub(super) struct Client {
    vip: SocketAddr,
    name: String,
    asked: usize,
    dice: Dice,
    connection: Option<http::Client>,
}

impl Client {
    pub(super) fn new(vip: SocketAddr, name: String, seed: u64) -> Self {
        Self { vip, name, asked: 0, dice: Dice::new(seed), connection: None }
    }

    /// One request after the other, with pauses.
    pub(super) async fn ask_until(mut self, until: Instant, judge: Arc<Judge>) {
        while Instant::now() < until {
            sleep(Duration::from_millis(self.dice.below(3000).into())).await;
            let ask = self.next("storm", None);
            let told = self.send(&ask).await;
            judge.heard(ask, told);
        }
    }

    /// One request as any client sends it.
    pub(super) async fn ask_plainly(&mut self, judge: &Judge, when: &str) -> anyhow::Result<Told> {
        let ask = self.next(when, Some(Manner::Plain));
        let told = self.send(&ask).await;
        judge.heard(ask, told.clone());
        Ok(told)
    }

    fn next(&mut self, when: &str, manner: Option<Manner>) -> Ask {
        let dice = &mut self.dice;
        self.asked += 1;
        let (group, shared) = (dice.below(GROUPS), 4 + dice.below(8));
        // One in twenty is as large as a hundred pages, the rest are chats.
        let own = if dice.once_in(20) { 1500 } else { dice.below(6) };
        let (tail, length) = (dice.below(1_000_000), usize::try_from(shared + own).unwrap_or_default() * BLOCK);
        let shared = usize::try_from(shared).unwrap_or_default() * BLOCK;
        let token = |at: usize| {
            let at32 = u32::try_from(at).unwrap_or_default();
            if at < shared { group * 1000 + at32 } else { tail.wrapping_add(at32 * 13) % 100_000 }
        };
        let prompt: Vec<u32> = (0..length).map(token).collect();
        let streamed = dice.once_in(2);
        let manner = manner.unwrap_or_else(|| match dice.below(20) {
            0 => Manner::Leaves(dice.below(60)),
            1 => Manner::Slow(dice.below(1500)),
            2 => Manner::HalfClosed,
            3..=6 => Manner::Fresh,
            _ => Manner::Plain,
        });
        let expected = answer_to(&prompt);
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": expected.len(), "stream": streamed,
            "return_token_ids": true})
        .to_string();
        let body_sha256 = format!("{:?}", Digest::from_slice(&Sha256::digest(body.as_bytes())));
        Ask { id: format!("{when}-{}-{}", self.name, self.asked), expected, streamed, body_sha256, manner, body }
    }

    async fn send(&mut self, ask: &Ask) -> Told {
        match timeout(HUNG, self.exchange(ask)).await {
            Ok(Ok(told)) => told,
            Ok(Err(error)) => Told::Nothing(format!("{error:#}")),
            Err(_elapsed) => Told::Nothing("no end".to_owned()),
        }
    }

    async fn exchange(&mut self, ask: &Ask) -> anyhow::Result<Told> {
        if ask.manner == Manner::Fresh {
            self.connection = None;
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => http::Client::connect(self.vip).await.context("connect")?,
        };
        let fields = [("Content-Type", "application/json"), ("X-Request-Id", &ask.id)];
        connection.request("POST", PATH, &fields, ask.body.as_bytes()).await.context("send")?;
        match ask.manner {
            Manner::Leaves(after) => {
                sleep(Duration::from_millis(after.into())).await;
                return Ok(Told::Left);
            }
            Manner::HalfClosed => connection.finish_sending().await.context("close our side")?,
            Manner::Plain | Manner::Fresh | Manner::Slow(_) => {}
        }
        let head = connection.head().await?;
        if let Manner::Slow(pause) = ask.manner {
            sleep(Duration::from_millis(pause.into())).await;
        }
        let body = connection.body(&head).await?;
        let closes = head.header("connection").is_some_and(|word| word.eq_ignore_ascii_case("close"));
        if body.end == End::Complete && !closes && ask.manner != Manner::HalfClosed {
            self.connection = Some(connection);
        }
        Ok(Told::Answer(said(&Answer { head, body }, ask.streamed)))
    }
}

fn said(answer: &Answer, streamed: bool) -> Said {
    let complete = answer.body.end == End::Complete;
    let code = answer.head.header("x-kvlb-error").map(str::to_owned);
    if !streamed || answer.head.status != 200 {
        let tokens = tokens_of(&answer.body.json());
        return Said { status: answer.head.status, code, whole: complete, tokens };
    }
    let events = answer.body.events();
    let done = events.last().is_some_and(|event| event == "[DONE]");
    let values = events.iter().map(|event| serde_json::from_str(event).unwrap_or_default());
    let tokens = values.flat_map(|event| tokens_of(&event)).collect();
    Said { status: answer.head.status, code, whole: complete && done, tokens }
}

fn tokens_of(value: &Value) -> Vec<u32> {
    let ids = value["choices"][0]["token_ids"].as_array();
    ids.into_iter().flatten().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

#[cfg(test)]
impl Ask {
    /// One for the judge's own tests.
    pub(super) fn example(id: &str, expected: &[u32], body_sha256: &str) -> Self {
        Self {
            id: id.to_owned(),
            expected: expected.to_vec(),
            streamed: false,
            body_sha256: body_sha256.to_owned(),
            manner: Manner::Plain,
            body: String::new(),
        }
    }
}
