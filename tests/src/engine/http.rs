//! The HTTP surface of the engine: routes, and how answers are sent, broken off or withheld.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::answers::{self, Answer, Reporting};
use super::call::{self, ApiError, Call, Kind};
use super::debug;
use super::faults::Death;
use super::handoff::Wish;
use super::handoff::turn::Turn;
use super::journal::Tracked;
use super::life::Life;
use super::metrics;
use super::rank::{Origin, Rank, Running};
use super::scheduler::Finish;
use super::server::Conn;

/// Bodies are read up to this size; more than any prompt of a test.
pub(super) const BODY_MAX: usize = 256 * 1024 * 1024;

/// The connection is to be cut without (more of) an answer.
#[derive(Debug)]
pub(super) struct Cut;

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("connection cut on purpose")
    }
}

impl std::error::Error for Cut {}

/// A body of one piece, or one that comes event by event.
#[derive(Debug)]
pub(super) enum Answered {
    Whole(Full<Bytes>),
    Events(mpsc::Receiver<Result<Bytes, Cut>>),
}

impl Body for Answered {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(cx).map_err(|never: Infallible| match never {}),
            Self::Events(events) => events.poll_recv(cx).map(|event| event.map(|event| event.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(body) if body.is_end_stream())
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Events(_) => hyper::body::SizeHint::new(),
        }
    }
}

pub(super) type Reply = Response<Answered>;

/// Serves one request of one connection.
pub(super) async fn serve(life: Arc<Life>, conn: Arc<Conn>, request: Request<Incoming>) -> Result<Reply, Cut> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let whole_path = head.uri.path_and_query().map_or_else(|| path.clone(), ToString::to_string);
    let _busy = conn.busy();
    let reply = if path.starts_with("/debug/") {
        debug::reply_to(&life, &path, &head.method, body).await
    } else {
        let tracked = life.journal.open(head.method.as_str(), &whole_path, &head.headers);
        let visit = Visit {
            life: Arc::clone(&life),
            conn: Arc::clone(&conn),
            method: head.method.clone(),
            headers: head.headers.clone(),
        };
        let reply = visit.reply(&path, body, tracked).await?;
        life.count(&path, &head.method, reply.status());
        reply
    };
    Ok(with_headers(&life, &head.headers, reply))
}

/// One request on its way to an answer.
struct Visit {
    life: Arc<Life>,
    conn: Arc<Conn>,
    method: Method,
    headers: HeaderMap,
}

impl Visit {
    async fn reply(self, path: &str, body: Incoming, tracked: Tracked) -> Result<Reply, Cut> {
        let body = Limited::new(body, BODY_MAX).collect().await.or(Err(Cut))?.to_bytes();
        tracked.body(&body);
        match (self.method.as_str(), path) {
            ("POST", "/v1/completions") => self.generate(Kind::Completion, &body, tracked).await,
            ("POST", "/v1/chat/completions") => self.generate(Kind::Chat, &body, tracked).await,
            ("POST", "/v1/messages") => self.generate(Kind::Messages, &body, tracked).await,
            ("POST", "/v1/responses") => self.generate(Kind::Responses, &body, tracked).await,
            _ => {
                let reply = self.plain(path, &body).await;
                tracked.status(reply.status().as_u16());
                tracked.finish();
                Ok(reply)
            }
        }
    }

    async fn plain(&self, path: &str, body: &[u8]) -> Reply {
        let life = &self.life;
        match (self.method.as_str(), path) {
            ("GET", "/health" | "/ping") | ("POST", "/ping") => health(life).await,
            ("GET", "/version") => reply(200, &json!({"version": life.config.version.to_string()})),
            ("GET", "/load") => reply(200, &json!({"server_load": life.running()})),
            ("GET", "/v1/models") => reply(200, &answers::models(&life.config, created())),
            ("GET", "/metrics") => {
                let delay = life.faults.plan().metrics_delay_ms;
                tokio::time::sleep(Duration::from_millis(delay)).await;
                life.metrics()
            }
            ("GET", "/kv_event_sources") if life.config.version.lists_event_sources() => {
                reply(200, &life.event_sources())
            }
            ("POST", "/tokenize") => self.tokenize(body).unwrap_or_else(|error| error_reply(&error)),
            ("POST", "/detokenize") => self.detokenize(body).unwrap_or_else(|error| error_reply(&error)),
            ("POST", "/reset_prefix_cache") => {
                // 200 also when something runs and nothing is reset; the event leaves with the next step.
                life.ranks().iter().for_each(|rank| _ = rank.scheduler().reset_cache());
                empty(200)
            }
            (_, known) if ROUTES.contains(&known) => reply(405, &json!({"detail": "Method Not Allowed"})),
            _ => reply(404, &json!({"detail": "Not Found"})),
        }
    }

    fn tokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let body = call::parse(&self.headers, body)?;
        call::model(&self.life.config, &body)?;
        let tokens = call::tokenize(&self.life.tokens, &body)?;
        let strings = (body["return_token_strs"] == true)
            .then(|| tokens.iter().map(|token| self.life.tokens.text(*token)).collect::<Vec<_>>());
        let answer = json!({
            "count": tokens.len(), "max_model_len": self.life.config.max_model_len, "tokens": tokens, "token_strs": strings,
        });
        Ok(reply(200, &answer))
    }

    fn detokenize(&self, body: &[u8]) -> Result<Reply, ApiError> {
        let body = call::parse(&self.headers, body)?;
        let tokens = body["tokens"].as_array().ok_or_else(|| ApiError::bad("tokens is not a list", Some("tokens")))?;
        let ids = tokens.iter().filter_map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok()));
        let text: String = ids.map(|token| self.life.tokens.text(token)).collect();
        Ok(reply(200, &json!({"prompt": text})))
    }

    async fn generate(self, kind: Kind, body: &[u8], tracked: Tracked) -> Result<Reply, Cut> {
        let faults = &self.life.faults;
        faults.until(|plan| !plan.stall_before_head).await;
        let plan = faults.plan();
        let injected = plan.status.filter(|_| faults.happens(plan.status_fraction));
        let dies = plan.die_after_chunks.filter(|_| faults.happens(plan.die_fraction));
        if let Some(status) = injected {
            return Ok(refuse(tracked, &ApiError::injected(status)));
        }
        if dies == Some(0) {
            self.conn.prepare_cut(plan.die_with_reset);
            return Err(Cut);
        }
        let body = match call::parse(&self.headers, body) {
            Ok(body) => body,
            Err(error) => return Ok(refuse(tracked, &error)),
        };
        let mut call = match Call::read(kind, &self.life.config, &self.life.tokens, &self.headers, &body) {
            Ok(call) => call,
            Err(error) => {
                // A refused decode does without its blocks, and says so.
                let wish = call::wish(&self.life.config, &body).unwrap_or(Wish::None);
                drop(self.turn(wish, 1, &tracked));
                return Ok(refuse(tracked, &error));
            }
        };
        let mut turn = self.turn(call.wish.clone(), call.prompts.len() * call.n, &tracked);
        if let Some(status) = turn.status() {
            return Ok(refuse(tracked, &ApiError::injected(status)));
        }
        turn.stall().await;
        let dies = dies.or_else(|| turn.dies_after_chunks());
        if dies == Some(0) {
            self.conn.prepare_cut(plan.die_with_reset);
            return Err(Cut);
        }
        let answer = self.answer(&call);
        call.wish = turn.begin();
        let origin = Origin { id: &answer.id, legs: &turn.legs, handed: &turn.handed };
        let running = self.life.submit(&call, origin).ok_or(Cut)?;
        let rank = running.rank.number;
        tracked.rank(rank);
        turn.runs_on(rank);
        let sender = Sender { life: self.life, conn: self.conn, call, answer, running, dies, turn };
        tracked.status(200);
        let reply = if sender.call.stream { sender.stream(tracked) } else { sender.whole(tracked).await? };
        Ok(with_rank(reply, rank))
    }

    fn request_id(&self) -> Option<&str> {
        self.headers.get("x-request-id").and_then(|id| id.to_str().ok())
    }

    fn turn(&self, wish: Wish, legs: usize, tracked: &Tracked) -> Turn {
        Turn::open(&self.life, wish, legs, self.request_id(), tracked)
    }

    fn answer(&self, call: &Call) -> Answer {
        let config = &self.life.config;
        let id = self.request_id().map_or_else(|| self.life.new_id(), str::to_owned);
        Answer::new(
            call,
            &id,
            created(),
            &config.version.to_string(),
            Reporting {
                details: !config.no_prompt_tokens_details,
                block_size: config.block_size,
                share: self.life.faults.plan().reported_cached_share,
            },
        )
    }
}

/// Paths that exist, for the difference between 404 and 405.
const ROUTES: [&str; 12] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/models",
    "/health",
    "/version",
    "/load",
    "/metrics",
    "/tokenize",
    "/detokenize",
    "/reset_prefix_cache",
];

/// An answer being made, token by token.
struct Sender {
    life: Arc<Life>,
    conn: Arc<Conn>,
    call: Call,
    answer: Answer,
    running: Running,
    /// Break off after this many chunks.
    dies: Option<usize>,
    /// Its part in a handoff.
    turn: Turn,
}

impl Sender {
    async fn whole(mut self, tracked: Tracked) -> Result<Reply, Cut> {
        while !self.answer.complete() {
            let output = self.running.outputs.recv().await.ok_or(Cut)?;
            if output.finish == Some(Finish::Error) {
                return Ok(refuse(tracked, &ApiError::pull_failed()));
            }
            let text = self.life.tokens.text(output.token);
            self.answer.take(output, &text);
        }
        let mut body = self.answer.body(&self.call);
        self.turn.dress(&mut body, self.running.rank.identity());
        let body = body.to_string();
        if self.turn.death() == Some(Death::Before) {
            self.conn.prepare_cut(self.life.faults.plan().die_with_reset);
            return Err(Cut);
        }
        if self.dies.is_some() || self.turn.death() == Some(Death::Middle) {
            return Ok(self.half(&body));
        }
        tracked.finish();
        Ok(json_reply(200, body))
    }

    /// The head promises the whole body; half of it comes.
    fn half(self, body: &str) -> Reply {
        let len = body.len();
        let half = Bytes::copy_from_slice(&body.as_bytes()[..len / 2]);
        let (sender, events) = mpsc::channel(2);
        tokio::spawn(async move {
            if sender.send(Ok(half)).await.is_ok() {
                self.cut(&sender).await;
            }
        });
        let mut reply = Response::new(Answered::Events(events));
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        reply.headers_mut().insert(hyper::header::CONTENT_LENGTH, HeaderValue::from(len));
        reply
    }

    async fn cut(&self, sender: &mpsc::Sender<Result<Bytes, Cut>>) {
        // What was sent so far must reach the client before the connection goes.
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.conn.prepare_cut(self.life.faults.plan().die_with_reset);
        drop(sender.send(Err(Cut)).await);
    }

    fn stream(self, tracked: Tracked) -> Reply {
        let (sender, events) = mpsc::channel(1);
        let busy = self.conn.busy();
        tokio::spawn(async move {
            let _busy = busy;
            let gone = sender.clone();
            tokio::select! {
                done = self.send_events(sender) => if done { tracked.finish() },
                // The client left: dropping the sender aborts what runs.
                () = gone.closed() => {}
            }
        });
        let mut reply = Response::new(Answered::Events(events));
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        reply
    }

    /// Whether the stream came to its proper end.
    async fn send_events(mut self, sender: mpsc::Sender<Result<Bytes, Cut>>) -> bool {
        let mut events = Events { sent: 0, sender };
        let mut opened = false;
        while !self.answer.complete() {
            let Some(output) = self.running.outputs.recv().await else { return false };
            if output.finish == Some(Finish::Error) {
                return self.send_error(&mut events).await;
            }
            let mut due = if opened { Vec::new() } else { self.answer.first_frames(&self.call) };
            opened = true;
            let text = self.life.tokens.text(output.token);
            self.answer.take(output, &text);
            due.push(self.answer.frame_of(&self.call, output, &text));
            for frame in due {
                if !self.send_event(&mut events, frame).await {
                    return false;
                }
            }
        }
        for frame in self.answer.last_frames(&self.call) {
            if !self.send_event(&mut events, frame).await {
                return false;
            }
        }
        true
    }

    /// The head is gone, so that the error comes as an event; whether it could be sent.
    async fn send_error(&self, events: &mut Events) -> bool {
        let error = format!("data: {}\n\n", ApiError::pull_failed().body());
        self.send_event(events, error).await && self.send_event(events, "data: [DONE]\n\n".to_owned()).await
    }

    /// Sends one event, unless the stream is to die or stall here.
    async fn send_event(&self, events: &mut Events, frame: String) -> bool {
        let sent = events.sent;
        self.life.faults.until(|plan| plan.stall_after_chunks.is_none_or(|limit| sent < limit)).await;
        if self.dies.is_some_and(|limit| sent >= limit) {
            self.cut(&events.sender).await;
            return false;
        }
        events.sent += 1;
        events.sender.send(Ok(Bytes::from(frame))).await.is_ok()
    }
}

struct Events {
    sent: usize,
    sender: mpsc::Sender<Result<Bytes, Cut>>,
}

async fn health(life: &Life) -> Reply {
    let plan = life.faults.plan();
    tokio::time::sleep(Duration::from_millis(plan.health_delay_ms.unwrap_or(life.config.health_delay_ms))).await;
    empty(plan.health_status.unwrap_or(200))
}

/// `created` of an answer made now.
fn created() -> u64 {
    Duration::try_from_secs_f64(super::clock::unix_seconds()).map_or(0, |seconds| seconds.as_secs())
}

impl Life {
    /// An id no other request of this engine has, 16 hex digits as vLLM's.
    fn new_id(&self) -> String {
        let seen = self.journal.counters().seen;
        format!("{:016x}", super::chance::Chance::seed_of(&self.config.name, &[self.number, seen]))
    }

    fn metrics(&self) -> Reply {
        let http = self.answered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut text = metrics::render(&self.config, &self.ranks(), self.started, &http);
        for family in self.faults.plan().metrics_without {
            text = text.split_inclusive('\n').filter(|line| !line.starts_with(&family)).collect();
        }
        let mut reply = Response::new(Answered::Whole(Full::from(text)));
        let kind = HeaderValue::from_static("text/plain; version=1.0.0; charset=utf-8");
        reply.headers_mut().insert(CONTENT_TYPE, kind);
        reply
    }

    fn event_sources(&self) -> Value {
        let endpoint = |port: Option<u16>| port.map(|port| format!("tcp://*:{port}"));
        let config = &self.config;
        let publisher = if config.no_events { "null" } else { "zmq" };
        let source = |rank: &Rank| {
            json!({
                "enable_kv_cache_events": !config.no_events, "publisher": publisher, "endpoint": endpoint(rank.ports.0),
                "replay_endpoint": endpoint(rank.ports.1), "buffer_steps": config.buffer_steps, "hwm": config.event_hwm,
                "max_queue_size": 100_000, "topic": config.topic,
            })
        };
        let ranks = self.ranks();
        Value::Object(ranks.iter().map(|rank| (rank.number.to_string(), source(rank))).collect())
    }

    fn count(&self, path: &str, method: &Method, status: StatusCode) {
        let handler = if status == StatusCode::NOT_FOUND && !ROUTES.contains(&path) { "none" } else { path };
        let class = format!("{}xx", status.as_u16() / 100);
        let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        *answered.entry((handler.to_owned(), method.to_string(), class)).or_default() += 1;
    }
}

/// The rank that computes; vLLM does not say it.
fn with_rank(mut reply: Reply, rank: usize) -> Reply {
    reply.headers_mut().insert(HeaderName::from_static("x-sim-rank"), HeaderValue::from(rank));
    reply
}

fn with_headers(life: &Life, asked: &HeaderMap, mut reply: Reply) -> Reply {
    let headers = reply.headers_mut();
    headers.insert("server", HeaderValue::from_static("uvicorn"));
    headers.insert("vary", HeaderValue::from_static("Origin"));
    let id = asked.get("x-request-id").cloned();
    if let Some(id) = id.or_else(|| HeaderValue::from_str(&life.new_id()).ok()) {
        headers.insert("x-request-id", id);
    }
    if let Ok(name) = HeaderValue::from_str(&life.config.name) {
        headers.insert(HeaderName::from_static("x-sim-engine"), name);
    }
    reply
}

fn refuse(tracked: Tracked, error: &ApiError) -> Reply {
    tracked.status(error.status);
    tracked.finish();
    error_reply(error)
}

fn error_reply(error: &ApiError) -> Reply {
    reply(error.status, &error.body())
}

pub(super) fn reply(status: u16, body: &Value) -> Reply {
    json_reply(status, body.to_string())
}

fn json_reply(status: u16, body: String) -> Reply {
    let mut reply = Response::new(Answered::Whole(Full::from(body)));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

pub(super) fn empty(status: u16) -> Reply {
    let mut reply = Response::new(Answered::Whole(Full::default()));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply
}
