//! What the proxy asks of the rest of kvlb: which rule, which endpoint, and what to count.

mod gate;
mod legs;

use std::borrow::Cow;
use std::hash::Hash as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use xxhash_rust::xxh3::Xxh3;

use super::handles::Handles;
use super::pinning::{self, Pinning, Read};
use crate::clock;
use crate::contract::{Extra, TokenId};
use crate::control::live;
use crate::fleet::{EndpointKey, ExactMode, Limits, NoEndpoint, Role, Rule, Selector};
use crate::openai::{self, Glimpse, Kind, Prompt};
use crate::policy::Leave;
use crate::proxy::{
    Addresses, Arrival, Backplane, Body, Call, Event, Framing, HandedOver, Haste, Head, Plan, Prefilled, Refused,
    Reply, Request, Standing, Survey, Target, Terms, Unseen, Usage,
};
use crate::router::{self, Caller, Decision, Lookup, Miss, Named, Part, Reason, Space, Step, Tier, View};
use crate::state::breaker::Cause;
use crate::state::{
    Backlog, Expectation, InFlight, Onlooker, Permit, STATUS_CLASSES, Service, State, Stay, Table, Unserved, Visit,
    ledger,
};
use crate::telemetry::access::{Facts, bounded};
use crate::telemetry::decisions::{self, DecisionLog};
use crate::tokenize::{self, Tokenizer};
pub(super) use legs::{bypass, why_alone};

use gate::Gate;
use legs::Way;

/// Bodies from this size on are decided on the worker pool: from JSON to names, 128 KiB that nobody has seen before take
/// half a millisecond.
const HEAVY_BODY: usize = 128 << 10;
/// The same where a model's prompts are tokenised by the reference, which takes a millisecond for 4 KiB.
const HEAVY_BODY_SLOW: usize = 4 << 10;
/// What is looked at of each end of a body by whoever decides in haste, on a data thread: reading 32 MiB takes 14 to 55 ms,
/// this less than one. Clients write the model near the beginning, or behind the messages.
const GLIMPSE: usize = 128 << 10;
/// Bodies of at most this size are taken in whole also where nobody reads them.
const SMALL_BODY: usize = 256 << 10;

/// The field by which a request asks for one data-parallel rank.
///
/// Source: vLLM 0.32.0; without it the API server spreads requests over its ranks.
const RANK_FIELD: &str = "x-data-parallel-rank";

/// Letters of a model's name that an error repeats: the longest names in use have fewer.
const NAME_SHOWN: usize = 100;
/// Models that an error names: a client with a typing error finds its own among these or asks `/v1/models`.
const MODELS_NAMED: usize = 20;

/// The proxy's view of kvlb.
#[derive(Debug)]
pub(super) struct Desk {
    state: Arc<State>,
    handles: Arc<Handles>,
    hash_debug: bool,
    /// There is an access log.
    logs: bool,
    decisions: Option<DecisionLog>,
    ids: legs::Ids,
}

impl Desk {
    pub(super) fn new(state: Arc<State>, hash_debug: bool, logs: bool, decisions: Option<DecisionLog>) -> Self {
        let handles = Arc::new(Handles::new(Arc::clone(&state.metrics)));
        Self { state, handles, hash_debug, logs, decisions, ids: legs::Ids::default() }
    }

    /// Whether any rule of a request's VIP looks into bodies: for blocks, for who asks, for the model, or for how many prompts
    /// count as load.
    fn reads(&self, request: &Request) -> bool {
        let table = self.state.table();
        let looks = |rule: &Rule| reads_prompts(rule) || rule.selector == Selector::LeastConnections;
        table.at(request.arrival.vip).any(|service| looks(service.rule())) || tells_by_model(&table, &request.arrival)
    }

    /// What the choice may read of a request, or why it reads nothing.
    fn prompt(request: &openai::Request<'_>, body: Body<'_>) -> Result<Prompt, Miss> {
        match body {
            Body::Unseen(why @ (Unseen::TooLarge | Unseen::OverMemory)) => {
                Err(Miss::because(Reason::TextEmpty, why.label()))
            }
            Body::Unseen(Unseen::NotNeeded) | Body::Whole(_) => {
                openai::parse(request).map_err(|miss| Miss::from(&miss))
            }
        }
    }

    /// The rule for a request.
    fn service(&self, request: &Request, model: Option<&str>) -> Result<Arc<Service>, Reply> {
        let lookup = Lookup { host: request.head.host(), path: request.head.path(), model };
        self.state
            .table()
            .find(request.arrival.vip, &lookup)
            .map(Arc::clone)
            .map_err(|unserved| refuse(&unserved, model))
    }

    /// Names the prompt's blocks for the rule that serves it.
    fn name(&self, service: &Service, prompt: Result<&Prompt, Miss>, watch: &mut StopWatch<'_>) -> Result<Named, Miss> {
        let named = name_blocks(&self.state, service, prompt, &mut |step| watch.lap(step));
        if self.hash_debug
            && let (Ok(named), Ok(prompt)) = (&named, prompt)
        {
            show_hashes(&self.state, service, named, prompt);
        }
        named
    }

    fn call(
        &self,
        request: &Request,
        service: Arc<Service>,
        model: Option<String>,
        named: Result<Named, Miss>,
        (shape, caller, way): (Shape, Caller, Way),
    ) -> Errand {
        let asks = request.head.method() == "POST" && openai::kind(request.head.path()) != Kind::Other;
        Errand {
            state: Arc::clone(&self.state),
            service,
            named,
            caller,
            pinning: Pinning::default(),
            shape,
            way,
            model,
            decision: None,
            settled: None,
            logs: self.logs || self.decisions.is_some(),
            diary: self.decisions.as_ref().filter(|_| asks).map(|log| Box::new(Diary::new(log.clone()))),
            earlier: Vec::new(),
            expectations: Vec::new(),
            backlog: None,
            predicted: None,
            ranked: request.head.fields().text(RANK_FIELD).is_some(),
            counts: asks,
            gate: None,
            stay: None,
            began: clock::now(),
            handles: Arc::clone(&self.handles),
        }
    }
}

/// A request as the KV tier sees it, for those who explain it.
#[derive(Debug)]
pub(super) struct Seen {
    /// Its prompts' tokens, as far as they could be told.
    pub(super) tokens: Vec<Vec<TokenId>>,
    /// Their blocks' names.
    pub(super) named: Result<Named, Miss>,
    /// Who sends it.
    pub(super) caller: Caller,
}

/// What the data path would see of a request that `service` serves, but for its client's address.
pub(super) fn see(state: &State, service: &Service, told: &live::Request<'_>) -> Seen {
    let (path, query) = told.path.split_once('?').map_or((told.path, None), |(path, query)| (path, Some(query)));
    let request = openai::Request { method: "POST", path, model_header: told.model, body: told.body };
    let parsed = openai::parse(&request).map_err(|miss| Miss::from(&miss));
    let prompt = parsed.as_ref().map_err(|miss| *miss);
    let named = name_blocks(state, service, prompt, &mut |_step| ());
    let tokens = prompt.and_then(|prompt| {
        let how = How::new(state, service, prompt);
        router::tokens(prompt, how.tokenizer(), &how.limits)
    });
    let field =
        |name: &str| told.fields.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| *value);
    let read = parsed.as_ref().map_or(Read::Other(&request), Read::Prompt);
    let caller = pinning::caller(service.rule(), None, field, query, &read);
    Seen { tokens: tokens.unwrap_or_default(), named, caller }
}

fn name_blocks(
    state: &State,
    service: &Service,
    prompt: Result<&Prompt, Miss>,
    lap: &mut dyn FnMut(Step),
) -> Result<Named, Miss> {
    let prompt = match prompt {
        Ok(prompt) if service.rule().kv.mode != ExactMode::Off => prompt,
        _ => {
            let limits = tokenize::Limits::default();
            let naming = (Vec::new(), &state.texts as &dyn tokenize::Memory);
            return router::name(&service.ready, prompt, Err("not_staged"), &limits, naming, lap);
        }
    };
    let mut how = How::new(state, service, prompt);
    let spaces = std::mem::take(&mut how.spaces);
    router::name(&service.ready, Ok(prompt), how.tokenizer(), &how.limits, (spaces, &state.texts), lap)
}

/// How the prompts of one request become names.
struct How {
    tokenizer: Result<Arc<Tokenizer>, &'static str>,
    limits: tokenize::Limits,
    spaces: Vec<Space>,
}

impl How {
    fn new(state: &State, service: &Service, prompt: &Prompt) -> Self {
        let asked = prompt.served.as_deref();
        let adapter = asked.filter(|asked| service.lists_adapter(asked));
        // An adapter's tokenizer is its base model's.
        let base = adapter.and_then(|adapter| service.base_of(adapter));
        let model = service.rule().key.model.as_deref().or(base.as_deref()).or(asked).or(prompt.model.as_deref());
        let max_model_len = service.max_model_len();
        let limits = tokenize::Limits {
            max_tokens: max_model_len.unwrap_or(usize::MAX).min(state.config().max_tokens).max(1),
            max_model_len,
            // Engines run in containers, and those in UTC.
            now: Some(tokenize::WallTime::from_seconds(clock::unix_seconds())),
        };
        Self {
            tokenizer: model.map_or(Err("not_staged"), |model| state.tokenizers.find(model)),
            limits,
            spaces: service.spaces(adapter),
        }
    }

    fn tokenizer(&self) -> Result<&Tokenizer, &'static str> {
        self.tokenizer.as_deref().map_err(|why| *why)
    }
}

/// `LLB_KV_HASH_DEBUG`: one line a block, with its name and the bytes that were hashed.
fn show_hashes(state: &State, service: &Service, named: &Named, prompt: &Prompt) {
    let how = How::new(state, service, prompt);
    let Ok(tokens) = router::tokens(prompt, how.tokenizer(), &how.limits) else { return };
    for (number, tokens) in tokens.iter().enumerate() {
        for space in &named.spaces {
            let extra = Extra { cache_salt: prompt.cache_salt.clone(), lora: space.lora.clone() };
            let Ok(mut chain) = space.key_space.begin(&extra) else { continue };
            let mut block = 0;
            chain.extend_showing(tokens, |digest, input| {
                tracing::info!(prompt = number, block, hash = %digest.name(), cbor = %Hex(input), "block hash");
                block += 1;
            });
        }
    }
}

impl Backplane for Desk {
    type Call = Errand;
    type Pass = Vec<Visit>;

    /// A connection counts for every rule of its VIP, and is let in where one of them has room for it: which of them its
    /// requests will be for is not known yet.
    fn admit(&self, arrival: &Arrival) -> Result<Vec<Visit>, Refused> {
        let table = self.state.table();
        let (mut allowed, mut room, mut answered, mut visits) = (false, false, false, Vec::new());
        for service in table.at(arrival.vip).filter(|service| allows(service.rule(), arrival.client)) {
            allowed = true;
            answered |= service.rule().no_endpoint == NoEndpoint::Proxy || service.has_endpoint();
            let (visit, open) = service.visit();
            room |= service.rule().connections_max.is_none_or(|max| open <= max);
            visits.push(visit);
        }
        match (allowed, answered, room) {
            (true, true, true) => Ok(visits),
            (true, true, false) => Err(Refused::RuleFull),
            (true, false, _) => Err(Refused::NoEndpoint),
            (false, ..) => Err(Refused::NotAdmitted),
        }
    }

    fn survey(&self, head: &Head, arrival: &Arrival) -> Result<Survey, Reply> {
        let table = self.state.table();
        let (mut inspect, mut body_limit, mut any) = (None, Duration::ZERO, false);
        let mut client_half_close = false;
        let by_model = tells_by_model(&table, arrival);
        let model_told = head.fields().text("x-model").is_some();
        let has_prompt = head.method() == "POST" && openai::kind(head.path()) != Kind::Other;
        for service in table.at(arrival.vip) {
            any = true;
            let rule = service.rule();
            body_limit = body_limit.max(rule.limits.request_body);
            client_half_close |= rule.client_half_close;
            let for_prompt = has_prompt && reads_prompts(rule) || rule.is_split() && head.method() == "POST";
            let for_model = by_model && !model_told && head.method() == "POST";
            if for_prompt || for_model {
                inspect = inspect.max(Some(rule.max_inspect_bytes));
            }
        }
        // Nobody reads it, but what is here whole can go out on a connection that waits, and be sent again.
        let small = match head.framing() {
            Framing::Length(length) if !head.expects_continue() => {
                usize::try_from(length).ok().filter(|length| *length <= SMALL_BODY)
            }
            _ => None,
        };
        let inspect = inspect.or(small);
        if any { Ok(Survey { inspect, body_limit, client_half_close }) } else { Err(refuse(&Unserved::NoVip, None)) }
    }

    fn is_heavy(&self, request: &Request) -> bool {
        let tokenizers = &self.state.tokenizers;
        let heavy = if tokenizers.any_slow() { HEAVY_BODY_SLOW } else { HEAVY_BODY };
        let is_heavy = matches!(request.body(), Body::Whole(body) if body.len() > heavy || tokenizers.any_heavy());
        is_heavy && self.reads(request)
    }

    fn must_be_read(&self, request: &Request) -> bool {
        let is_long = matches!(request.body(), Body::Whole(body) if body.len() > legs::HASTY_BODY);
        is_long && self.state.table().at(request.arrival.vip).any(|service| service.rule().is_split())
    }

    fn begin(&self, request: &Request) -> Result<Errand, Reply> {
        let mut watch = StopWatch::start(&self.handles);
        let asked = asked(request);
        let (prompt, model) = if self.reads(request) {
            let prompt = Self::prompt(&asked, request.body());
            let model = match &prompt {
                Ok(prompt) => prompt.model.clone(),
                Err(_) => openai::model(&asked),
            };
            (prompt, model)
        } else {
            (Err(Miss::new(Reason::ModeOff)), None)
        };
        watch.lap(Step::Parse);
        let service = self.service(request, model.as_deref())?;
        let named = self.name(&service, prompt.as_ref().map_err(|miss| *miss), &mut watch);
        let shape = prompt.as_ref().map_or_else(
            |_miss| Shape::default(),
            |prompt| Shape { weight: prompt.weight(), streams: prompt.stream, reads_cache: prompt.reads_cache },
        );
        let read = match (&prompt, request.body()) {
            (Ok(prompt), _) => Read::Prompt(prompt),
            (Err(_), Body::Whole(_)) if asked.method == "POST" => Read::Other(&asked),
            _ => Read::Unseen,
        };
        let caller = caller(&service, request, &read);
        let way = legs::way(&service, request, &self.ids, false)?;
        Ok(self.call(request, service, model, named, (shape, caller, way)))
    }

    fn begin_hastily(&self, request: &Request, haste: Haste) -> Result<Errand, Reply> {
        let mut miss = Miss::because(
            Reason::Tokenize,
            match haste {
                Haste::Budget => "budget",
                Haste::QueueFull => "queue_full",
            },
        );
        // In haste a body is looked at only where the rule depends on it: this is a data thread.
        let by_model = tells_by_model(&self.state.table(), &request.arrival);
        let glimpse = if by_model { openai::glimpse_model(&asked(request), GLIMPSE) } else { Glimpse::Model(None) };
        let model = match glimpse {
            Glimpse::Model(model) => model,
            Glimpse::Endless => Some("…".to_owned()),
            Glimpse::OutOfReach => {
                miss = Miss::because(Reason::ModelEmpty, "out_of_reach");
                None
            }
        };
        let service = self.service(request, model.as_deref())?;
        let caller = caller(&service, request, &Read::Unseen);
        let way = legs::way(&service, request, &self.ids, true)?;
        Ok(self.call(request, service, model, Err(miss), (Shape::default(), caller, way)))
    }

    fn models(&self, request: &Request) -> Vec<Errand> {
        let head = &request.head;
        if head.fields().text("x-model").is_some() {
            return Vec::new();
        }
        let lookup = Lookup { host: head.host(), path: head.path(), model: None };
        let services = self.state.table().meant(request.arrival.vip, &lookup);
        if services.len() < 2 {
            return Vec::new();
        }
        let unnamed = || Err(Miss::new(Reason::TextEmpty));
        let nobody = || (Shape::default(), Caller::at(request.arrival.client.ip()), Way::Unsplit);
        services.into_iter().map(|service| self.call(request, service, None, unnamed(), nobody())).collect()
    }
}

/// Who sends a request.
fn caller(service: &Service, request: &Request, read: &Read<'_>) -> Caller {
    let fields = request.head.fields();
    let query = request.head.origin_target().split_once('?').map(|(_, query)| query);
    pinning::caller(service.rule(), Some(request.arrival.client.ip()), |name| fields.get(name), query, read)
}

/// What of a request matters once its prompt has names.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Sequences that the engine will run for it, at least one.
    weight: u32,
    /// Whether the answer comes in pieces: its blocks are announced soon after the first, else before the end.
    streams: bool,
    /// Whether the engine looks into its cache for it, so that what it reports can be held against what was predicted.
    reads_cache: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self { weight: 1, streams: false, reads_cache: true }
    }
}

/// How an endpoint failed.
#[derive(Clone, Copy, Debug)]
enum Failed {
    /// It took no connection.
    Connect,
    /// It did not answer, or said that it failed: the status that the client gets.
    Answer(u16),
    /// Its answer broke off midway.
    BrokeOff,
}

/// In the place of a status, for requests whose answers break off.
const NO_STATUS: u16 = 0;

/// One request on its way.
#[derive(Debug)]
pub(super) struct Errand {
    state: Arc<State>,
    service: Arc<Service>,
    named: Result<Named, Miss>,
    caller: Caller,
    pinning: Pinning,
    shape: Shape,
    way: Way,
    /// The model that the client asked for, where somebody looked.
    model: Option<String>,
    /// The last choice, until one has been counted.
    decision: Option<Decision>,
    /// That one, for the access log.
    settled: Option<Box<Decision>>,
    /// Somebody wants to know of it afterwards.
    logs: bool,
    /// What the decision log is told.
    diary: Option<Box<Diary>>,
    /// Those before it, of endpoints that were tried.
    earlier: Vec<Decision>,
    /// What its answer will bring, at the endpoint chosen last.
    expectations: Vec<Expectation>,
    /// The tokens that the endpoint chosen last has yet to compute for it.
    backlog: Option<Arc<Backlog>>,
    /// The endpoint that the request went to, and the blocks of its prompt that were said to be there.
    predicted: Option<(usize, u32)>,
    /// Whether the client chose the data-parallel rank itself.
    ranked: bool,
    /// Whether the request is one that the KV tier is for.
    counts: bool,
    /// What the gate knows of it, where its rule has admission.
    gate: Option<Box<Gate>>,
    /// Its unit of the rule's bound, kept from its prefill leg for its decode leg.
    stay: Option<Stay>,
    began: Instant,
    handles: Arc<Handles>,
}

impl Call for Errand {
    type Guard = InFlight;

    fn terms(&self) -> Terms {
        let rule = self.service.rule();
        Terms {
            limits: Limits { ..rule.limits },
            forwarded_headers: rule.forwarded_headers,
            client_half_close: rule.client_half_close,
            usage: self.counts && (self.logs || self.is_comparable()),
        }
    }

    fn plan(&mut self, body: &[u8]) -> Plan {
        self.make_plan(body)
    }

    fn prefill_body(&mut self, body: &[u8]) -> Vec<u8> {
        self.write_prefill_body(body)
    }

    fn hand_over(&mut self, prefilled: &Prefilled<'_>, body: &[u8]) -> HandedOver {
        self.finish_prefill(prefilled, body)
    }

    fn start_over(&mut self) {
        self.begin_anew();
    }

    fn release_body(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        self.write_release_body(body)
    }

    fn choose(&mut self, tried: &[usize]) -> Option<Target<InFlight>> {
        // What the last try was to bring will not come.
        self.expectations.clear();
        self.backlog = None;
        if self.service.rule().admission.is_some() {
            return self.choose_at_gate(tried);
        }
        let (decision, is_trial) = self.decide(tried, tried.is_empty());
        self.go(decision, is_trial, None)
    }

    fn standing(&mut self, tried: &[usize]) -> Standing {
        match self.stand(tried) {
            Standing::Nobody => self.stand_in_pool(),
            standing => standing,
        }
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_gate(cx)
    }

    fn overdue(&mut self) -> Reply {
        self.give_up()
    }

    fn may_retry(&mut self) -> bool {
        self.service.retries.retry(clock::now())
    }

    fn report(&mut self, event: Event) {
        match event {
            Event::ConnectFailed { position, failure } => {
                let endpoint = self.service.endpoints.get(position).map(|e| e.spec.key.to_string()).unwrap_or_default();
                tracing::debug!(endpoint, cause = failure.label(), "endpoint did not take the connection");
                self.pinning.passed_over(&self.service, &self.caller, position);
                self.failed(position, Failed::Connect);
            }
            Event::Answered { position, status, waited } => {
                // An endpoint that was too busy answers after all when nobody else does.
                if let Some(of_endpoint) = self.earlier.iter().rposition(|choice| choice.endpoint == Some(position))
                    && self.decision.as_ref().is_none_or(|decision| decision.endpoint != Some(position))
                {
                    self.decision = Some(self.earlier.swap_remove(of_endpoint));
                }
                self.count_leg_end(if status < 500 || self.part() == Part::Decode { "answered" } else { "failed" });
                let chosen = self.decision.as_ref().map(|decision| decision.tier);
                let tier = chosen.or_else(|| self.settled_tier()).unwrap_or_default();
                self.handles.first_byte(tier).observe(waited.as_secs_f64());
                if let Some(diary) = &mut self.diary {
                    diary.waited = Some(waited);
                }
                self.count_class(status);
                self.judge(position, status);
                match status {
                    429 | 500.. => self.pinning.passed_over(&self.service, &self.caller, position),
                    _ => self.pinning.answered(&self.service, &self.caller, position),
                }
                // Nobody is asked any more, and an answer may take long.
                self.caller.text = None;
                match status {
                    200 if self.shape.streams => self.answered(),
                    200 => {}
                    _ => {
                        self.expectations.clear();
                        self.backlog = None;
                    }
                }
                self.settle();
            }
            Event::PrefillFailed { position, status } => self.prefill_failed(position, status),
            Event::Unasked { position } | Event::Busy { position, .. } | Event::Lost { position } => {
                self.pinning.passed_over(&self.service, &self.caller, position);
            }
            Event::Finished { position, bytes, usage } => {
                self.answered();
                if let Some(endpoint) = self.service.endpoints.get(position) {
                    endpoint.meters.breaker.completed();
                    endpoint.meters.add_bytes(bytes);
                }
                self.pinning.finished(&self.service, &self.caller, position);
                self.settle();
                if let Some(diary) = &mut self.diary {
                    diary.output_tokens = usage.and_then(|usage| usage.output_tokens);
                }
                // Of a split request the prefill endpoint has said it.
                if let Some(usage) = usage.filter(|_| self.is_comparable() && !self.is_prefilled()) {
                    self.compare(position, &usage);
                }
                tracing::debug!(
                    service = self.service.rule().id.0,
                    position,
                    bytes,
                    ms = clock::now().saturating_duration_since(self.began).as_millis(),
                    "request finished"
                );
            }
            Event::Died { position, status } | Event::TimedOut { position, status: Some(status) } => {
                self.count_leg_end(if matches!(event, Event::Died { .. }) { "died" } else { "timed_out" });
                self.failed(position, Failed::Answer(status));
                self.pinning.failed(&self.service, &self.caller, position);
                self.count_class(status);
                self.settle();
            }
            Event::Replied { status, .. } => {
                self.count_class(status);
                self.settle();
            }
            Event::BrokeOff { position } => {
                self.count_leg_end("broke_off");
                self.failed(position, Failed::BrokeOff);
                self.pinning.failed(&self.service, &self.caller, position);
                self.settle();
            }
            // An answer that is cut by a limit may have gone on well until then.
            Event::TimedOut { status: None, .. } | Event::ClientLeft { .. } | Event::CutOff { .. } => self.settle(),
        }
    }

    fn facts(&self) -> Option<Facts> {
        let rule = self.service.rule();
        let model = self.model.as_ref().or(rule.key.model.as_ref());
        let mut facts = Facts { rule: rule.id.0, model: model.map(|model| bounded(model)), ..Facts::default() };
        let Some(decision) = self.settled.as_deref().or(self.decision.as_ref()) else { return Some(facts) };
        if let Some(miss) = decision.miss {
            (facts.reason, facts.detail) = (miss.reason.label(), miss.detail);
        }
        if decision.endpoint.is_none() {
            return Some(facts);
        }
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let (blocks, tokens) = decision.prompts.iter().fold((0, 0), |(blocks, tokens): (u64, u64), prompt| {
            (blocks.saturating_add(count(prompt.blocks)), tokens.saturating_add(count(prompt.tokens)))
        });
        (facts.tier, facts.depth, facts.blocks) = (decision.tier.label(), decision.depth, blocks);
        facts.repin = decision.left.or(decision.moved).map_or("", Leave::label);
        if self.named.is_ok() {
            facts.prompt_tokens = Some(tokens);
            facts.predicted_cached_tokens = Some(self.predicted_tokens(decision.depth, tokens));
        }
        Some(facts)
    }
}

impl Errand {
    /// What the ladder says now, and whether the choice has a place for a trial. The `first` choice of a request takes a turn;
    /// another one does not: else a dead endpoint would get the turn after each failure again.
    fn decide(&mut self, tried: &[usize], first: bool) -> (Decision, bool) {
        let start = clock::now();
        let part = self.part();
        if first && part != Part::Decode {
            self.service.retries.request(start);
        }
        if first {
            let role = if part == Part::Decode { Role::Decode } else { Role::Prefill };
            if self.service.breakers_are_ignored(role) {
                let service = self.service.rule().id.to_string();
                self.state.metrics.breaker_panic.with_label_values(&[service.as_str()]).inc();
            }
        }
        let onlooker = Onlooker(&self.service);
        let view: &dyn View = if first { &*self.service } else { &onlooker };
        let mut decision = self.route(view, tried);
        if part == Part::Decode {
            return self.admitted(decision, tried);
        }
        self.handles.step(Step::Choose).observe(clock::now().saturating_duration_since(start).as_secs_f64());
        if !self.pinning.chosen(&self.service, &self.caller, &decision, tried) {
            // Another request of the same conversation was faster: they go together.
            decision = self.route(&onlooker, tried);
            self.pinning.chosen(&self.service, &self.caller, &decision, tried);
        }
        let before = decision.endpoint;
        let (decision, is_trial) = self.admitted(decision, tried);
        if decision.endpoint != before {
            self.pinning.chosen(&self.service, &self.caller, &decision, tried);
        }
        (decision, is_trial)
    }

    /// Goes by a decision.
    fn go(&mut self, decision: Decision, is_trial: bool, permit: Option<Permit>) -> Option<Target<InFlight>> {
        if self.is_prefilled() {
            return self.go_on(&decision, is_trial, permit);
        }
        let target = decision.endpoint.and_then(|position| self.target(position, &decision, is_trial, permit));
        if let Some(position) = decision.endpoint {
            self.expect(position, &decision);
        }
        self.earlier.extend(self.decision.replace(decision));
        target
    }

    /// Leaves word of what an endpoint has to compute, and that the prompts' blocks will be there unless they are already.
    fn expect(&mut self, position: usize, decision: &Decision) {
        let (Ok(named), Some(endpoint)) = (&self.named, self.service.endpoints.get(position)) else { return };
        self.backlog = Some(endpoint.meters.await_tokens(decision.uncached_tokens));
        let Some(space) = named.spaces.iter().position(|space| space.endpoints.contains(&position)) else { return };
        let blocks: usize = named.prompts.iter().map(|prompt| prompt.names[space].len()).sum();
        if decision.depth as usize >= blocks {
            return;
        }
        let (all, now) = (&self.service.expectations, clock::now());
        let last = named.prompts.len().saturating_sub(1);
        for (number, prompt) in named.prompts.iter().enumerate() {
            // With the last prompt's blocks the work is done.
            let work = self.backlog.as_ref().filter(|_| number == last).map(Arc::clone);
            self.expectations.extend(all.add(endpoint.meters.id, prompt.names[space].as_slice(), work, now));
        }
    }

    fn answered(&mut self) {
        let now = clock::now();
        self.expectations.drain(..).for_each(|expectation| expectation.answered(now));
        if let Some(backlog) = self.backlog.take() {
            backlog.release();
        }
    }

    /// A choice with a place for a trial, where its endpoint's breaker gives out such: else another choice, if there is one. It
    /// takes no turn of its own either.
    fn admitted(&self, decision: Decision, tried: &[usize]) -> (Decision, bool) {
        let Some(endpoint) = decision.endpoint.and_then(|position| self.service.endpoints.get(position)) else {
            return (decision, false);
        };
        if let Some(is_trial) = endpoint.meters.breaker.admit(clock::now) {
            return (decision, is_trial);
        }
        let passed_over: Vec<usize> = tried.iter().copied().chain(decision.endpoint).collect();
        let view = Onlooker(&self.service);
        let other = self.route(&view, &passed_over);
        (if other.endpoint.is_some() { other } else { decision }, false)
    }

    /// Holds an answer's status for or against its endpoint. Statuses by which an engine says that it does not serve this
    /// request, or not now, are neither.
    fn judge(&self, position: usize, status: u16) {
        match status {
            429 | 501 | 503 => {}
            500.. => self.failed(position, Failed::Answer(status)),
            _ => {
                if let Some(endpoint) = self.service.endpoints.get(position)
                    && endpoint.meters.breaker.succeeded(clock::now).is_some()
                {
                    tracing::info!(
                        endpoint = format!("{}/{}", self.service.rule().id, endpoint.spec.key),
                        "the endpoint answers again: its breaker is closed"
                    );
                    self.state.conditions_changed();
                }
            }
        }
    }

    /// Holds a failure against an endpoint.
    fn failed(&self, position: usize, failed: Failed) {
        let (Some(rule), Some(endpoint)) = (&self.service.rule().breaker, self.service.endpoints.get(position)) else {
            return;
        };
        let (now, breaker) = (clock::now(), &endpoint.meters.breaker);
        let (cause, alike) = match failed {
            Failed::Connect => (Cause::Connect, None),
            Failed::Answer(status) => (Cause::Answer, Some(status)),
            Failed::BrokeOff => (Cause::BrokeOff, Some(NO_STATUS)),
        };
        if let Some(status) = alike
            && let Some(request) = self.fingerprint()
            && !self.service.failures.is_the_endpoint_s(request, status, position, now)
        {
            return;
        }
        let change = match failed {
            Failed::BrokeOff => breaker.broke_off(self.began, rule, now),
            Failed::Connect | Failed::Answer(_) => breaker.failed(cause, rule, now),
        };
        if change.is_none() {
            return;
        }
        let (service, ep_idx) = (self.service.rule().id.to_string(), position.to_string());
        self.state.metrics.breaker_opened.with_label_values(&[&service, &ep_idx, cause.label()]).inc();
        tracing::warn!(
            endpoint = format!("{service}/{}", endpoint.spec.key),
            cause = cause.label(),
            seconds = rule.open.as_secs(),
            "the endpoint fails again and again: its breaker is open, it gets no traffic for a while"
        );
        self.state.conditions_changed();
    }

    /// A number that is the same for requests with the same prompts; `None` where they have no names.
    fn fingerprint(&self) -> Option<u64> {
        let mut hash = Xxh3::new();
        for prompt in &self.named.as_ref().ok()?.prompts {
            prompt.names.first()?.last()?.hash(&mut hash);
        }
        Some(hash.digest())
    }

    fn target(
        &self,
        position: usize,
        decision: &Decision,
        is_trial: bool,
        permit: Option<Permit>,
    ) -> Option<Target<InFlight>> {
        let endpoint = self.service.endpoints.get(position)?;
        let guard = endpoint.meters.enter(self.shape.weight, self.service.next_choice());
        let guard = if is_trial { guard.as_trial() } else { guard };
        let gated = permit.is_some();
        let guard = match permit {
            Some(permit) => guard.with_permit(permit),
            None => guard,
        };
        let mut fields = Vec::new();
        if self.service.rule().decision_headers {
            fields = explain(&endpoint.spec.key, decision);
            if gated {
                fields.extend_from_slice(gate::fields(&self.service).as_bytes());
            }
        }
        let addresses = Addresses(endpoint.addresses());
        let rank = self.rank(position, decision);
        let request_fields = rank.map(|rank| format!("{RANK_FIELD}: {rank}\r\n").into_bytes()).unwrap_or_default();
        Some(Target { position, addresses, fields, request_fields, guard })
    }

    fn count_class(&self, status: u16) {
        const CLASSES: [&str; STATUS_CLASSES] = ["1xx", "2xx", "3xx", "4xx", "5xx", "other"];
        let class = match status / 100 {
            class @ 1..=5 => usize::from(class) - 1,
            _ => CLASSES.len() - 1,
        };
        let counter = self.service.classes[class].get_or_init(|| {
            let service = self.service.rule().id.0.to_string();
            self.state.metrics.requests.with_label_values(&[service.as_str(), CLASSES[class]])
        });
        counter.inc();
    }

    /// Holds what the engine found in its cache against what was predicted.
    fn compare(&self, position: usize, usage: &Usage) {
        let (Some(reported), Some(kv)) =
            (usage.cached_tokens, self.service.endpoints.get(position).and_then(|endpoint| endpoint.kv.as_ref()))
        else {
            return;
        };
        let depth = self.predicted.filter(|(chosen, _)| *chosen == position).map_or(0, |(_, depth)| depth);
        let predicted = self.predicted_tokens(depth, usage.prompt_tokens);
        let entry = ledger::Entry { prompt: usage.prompt_tokens, predicted, reported };
        if kv.ledger.enter(entry) {
            let place = self.service.endpoints.get(position).map(|e| e.spec.key.to_string()).unwrap_or_default();
            tracing::warn!(
                endpoint = format!("{}/{place}", self.service.rule().id),
                "the engine reports less than half of the cached tokens that its events promise: its inventory is cleared and \
                 asked for again"
            );
            kv.distrust();
        }
    }

    /// Whether what the engine reports of its cache can be held against what was predicted.
    fn is_comparable(&self) -> bool {
        self.counts && self.shape.reads_cache && self.shape.weight == 1 && self.service.rule().kv.mode != ExactMode::Off
    }

    /// Tokens of a prompt that an engine with so many of its blocks need not compute.
    fn predicted_tokens(&self, depth: u32, prompt_tokens: u64) -> u64 {
        let block = u64::from(self.service.rule().kv.block_size.get());
        // An engine computes the last token anew, and with it the block that it is in.
        let most = prompt_tokens.saturating_sub(1) / block * block;
        (u64::from(depth) * block).min(most)
    }

    /// Counts what the KV tier would have chosen and spared, on a rule where it only observes.
    fn count_observed(&self, decision: &Decision) {
        let result = match decision.observed {
            None => "none",
            Some(observed) if Some(observed.endpoint) == decision.endpoint => "same",
            Some(_) => "other",
        };
        let service = self.service.rule().id.to_string();
        self.state.metrics.observed_choices.with_label_values(&[service.as_str(), result]).inc();
        let spared = decision.observed.map_or(0, |observed| observed.depth.saturating_sub(decision.depth));
        let tokens = u64::from(spared) * u64::from(self.service.rule().kv.block_size.get());
        self.state.metrics.observed_tokens.with_label_values(&[service.as_str()]).inc_by(tokens);
    }

    /// Hands a request to the decision log that was named and went somewhere.
    fn write_down(&mut self, diary: &Diary) {
        let (Ok(named), Some(decision)) = (&mut self.named, self.settled.as_deref()) else { return };
        let (Some(endpoint), Some(prompt)) = (decision.endpoint, named.prompts.first_mut()) else { return };
        let way = named.spaces.iter().position(|space| space.endpoints.contains(&endpoint)).unwrap_or_default();
        let blocks = prompt.names.get_mut(way).map(std::mem::take).unwrap_or_default();
        let size =
            named.spaces.get(way).map_or(self.service.rule().kv.block_size, |space| space.key_space.block_size());
        let since = diary.came.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        diary.log.put(decisions::Entry {
            timestamp: u64::try_from(since.as_millis()).unwrap_or_default(),
            rule: self.service.rule().id.0,
            block_size: size.get(),
            input_length: prompt.tokens as u64,
            output_length: diary.output_tokens,
            hash_ids: blocks.into_iter().map(|name| name.0).collect(),
            endpoint,
            tier: decision.tier.label(),
            depth: decision.depth,
            spill: decision.spill,
            first_byte_ms: diary.waited.map(|waited| waited.as_secs_f64() * 1e3),
        });
    }

    /// Counts the choice that the request really went by, once.
    fn settle(&mut self) {
        let Some(decision) = self.decision.take() else { return };
        self.count_choice(&decision);
        if self.counts {
            self.count(&decision);
        }
        if self.logs {
            self.settled = Some(Box::new(decision));
        }
    }

    /// Counts who chose, and what a conversation or a session left its endpoint for.
    fn count_choice(&self, decision: &Decision) {
        if decision.endpoint.is_none() {
            return;
        }
        let (metrics, rule) = (&self.state.metrics, self.service.rule().id);
        let counter = self.service.tiers[decision.tier as usize].get_or_init(|| {
            metrics.tier_choices.with_label_values(&[rule.0.to_string().as_str(), decision.tier.label()])
        });
        counter.inc();
        for (kind, leave) in [("conversation", decision.left), ("session", decision.moved)] {
            if let Some(leave) = leave {
                metrics.session_repins.with_label_values(&[rule.0.to_string().as_str(), kind, leave.label()]).inc();
            }
        }
    }

    fn count(&mut self, decision: &Decision) {
        self.predicted = decision.endpoint.map(|position| (position, decision.depth));
        let metrics = &self.state.metrics;
        let blocks: usize = decision.prompts.iter().map(|prompt| prompt.blocks).sum();
        metrics.prompt_blocks.inc_by(blocks as u64);
        if self.service.rule().kv.observe {
            self.count_observed(decision);
        }
        if let Some(miss) = decision.miss {
            self.handles.missed(miss);
            if decision.expected
                && let Some(position) = decision.endpoint
            {
                metrics.expected_choices.with_label_values(&[position.to_string()]).inc();
            } else if miss.reason != Reason::ModeOff && decision.tier == Tier::Selector {
                metrics.fallthrough.inc();
            }
            return;
        }
        let Some(position) = decision.endpoint.filter(|_| decision.tier != Tier::Selector) else { return };
        metrics.matched_blocks.inc_by(u64::from(decision.depth));
        let ep_idx = position.to_string();
        if decision.tier == Tier::Overlap {
            metrics.hits.with_label_values(&[ep_idx.as_str()]).inc();
        }
        if decision.seeded {
            metrics.cold_seeds.with_label_values(&[ep_idx.as_str()]).inc();
        }
        if decision.spill {
            metrics.spills.with_label_values(&[ep_idx.as_str()]).inc();
        }
        if decision.depth > 0
            && let Some(kv) = self.service.endpoints.get(position).and_then(|endpoint| endpoint.kv.as_ref())
            && kv.proved_by_request().is_some()
        {
            tracing::info!(service = self.service.rule().id.0, position, "contract proved by a request");
        }
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        self.leave_gate();
        self.settle();
        if let Some(diary) = self.diary.take() {
            self.write_down(&diary);
        }
    }
}

/// What the decision log is told of a request, besides its choice.
#[derive(Debug)]
struct Diary {
    log: DecisionLog,
    /// By the clock on the wall.
    came: SystemTime,
    waited: Option<Duration>,
    output_tokens: Option<u64>,
}

impl Diary {
    fn new(log: DecisionLog) -> Self {
        Self { log, came: clock::wall(), waited: None, output_tokens: None }
    }
}

/// Measures the steps of one decision.
struct StopWatch<'a> {
    handles: &'a Handles,
    last: Instant,
}

impl<'a> StopWatch<'a> {
    fn start(handles: &'a Handles) -> Self {
        Self { handles, last: clock::now() }
    }

    fn lap(&mut self, step: Step) {
        let now = clock::now();
        self.handles.step(step).observe(now.saturating_duration_since(self.last).as_secs_f64());
        self.last = now;
    }
}

/// Bytes as hex digits.
struct Hex<'a>(&'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

fn asked(request: &Request) -> openai::Request<'_> {
    let body = match request.body() {
        Body::Whole(body) => body,
        Body::Unseen(_) => &[],
    };
    openai::Request {
        method: request.head.method(),
        path: request.head.path(),
        model_header: request.head.fields().text("x-model"),
        body,
    }
}

/// Whether a rule's choice depends on what is in prompts' bodies.
fn reads_prompts(rule: &Rule) -> bool {
    rule.kv.mode != ExactMode::Off
        || rule.pinning.trie.is_some()
        || rule.knows_users()
        || rule.hashes_prompts()
        || rule.is_split()
}

/// Whether the rules at the address where a request arrived are told apart by its model.
fn tells_by_model(table: &Table, arrival: &Arrival) -> bool {
    table.at(arrival.vip).any(|service| service.rule().key.model.is_some())
}

fn allows(rule: &Rule, client: SocketAddr) -> bool {
    let client = client.ip().to_canonical();
    rule.allowed_sources.is_empty()
        || rule.allowed_sources.iter().any(|(network, bits)| covers(*network, *bits, client))
}

/// Whether `address` lies in `network`/`bits`.
fn covers(network: IpAddr, bits: u8, address: IpAddr) -> bool {
    let share = |width: u8| u32::from(width.saturating_sub(bits));
    match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => {
            (network.to_bits() ^ address.to_bits()).checked_shr(share(32)).unwrap_or_default() == 0
        }
        (IpAddr::V6(network), IpAddr::V6(address)) => {
            (network.to_bits() ^ address.to_bits()).checked_shr(share(128)).unwrap_or_default() == 0
        }
        _ => false,
    }
}

fn refuse(unserved: &Unserved, model: Option<&str>) -> Reply {
    match unserved {
        Unserved::NoVip => Reply::error(503, "no_rules", "no rule serves this address and port"),
        Unserved::NoRoute => Reply::error(404, "no_route", "no rule serves this host and path"),
        Unserved::Model { served } => {
            let named = served.iter().take(MODELS_NAMED).map(|model| shortened(model)).collect::<Vec<_>>().join(", ");
            let more = served.len().saturating_sub(MODELS_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let asked = shortened(model.unwrap_or_default());
            Reply::error(
                404,
                "model_not_found",
                &format!("no rule serves the model {asked:?}; served here: {named}{more}"),
            )
        }
    }
}

/// A name for a message: a client's may be as long as its body, and every byte of it may take six once escaped.
fn shortened(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(NAME_SHOWN) {
        Some((end, _)) => format!("{}…", &name[..end]).into(),
        None => name.into(),
    }
}

/// The `x-kvlb-*` fields that explain a choice to the client.
fn explain(endpoint: &EndpointKey, decision: &Decision) -> Vec<u8> {
    let blocks: usize = decision.prompts.iter().map(|prompt| prompt.blocks).sum();
    let mut fields = format!(
        "x-kvlb-endpoint: {endpoint}\r\nx-kvlb-tier: {}\r\nx-kvlb-depth: {}\r\nx-kvlb-blocks: {blocks}\r\n",
        decision.tier.label(),
        decision.depth,
    );
    if let Some(leave) = decision.left.or(decision.moved) {
        fields.push_str("x-kvlb-repin: ");
        fields.push_str(leave.label());
        fields.push_str("\r\n");
    }
    if let Some(miss) = decision.miss {
        fields.push_str("x-kvlb-reason: ");
        fields.push_str(miss.reason.label());
        if !miss.detail.is_empty() {
            fields.push_str("; ");
            fields.push_str(miss.detail);
        }
        fields.push_str("\r\n");
    }
    fields.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_shortened_between_two_letters() {
        assert_eq!(shortened("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
        assert_eq!(shortened(&"é".repeat(100_000)), format!("{}…", "é".repeat(NAME_SHOWN)));
    }

    #[test]
    fn a_network_covers_its_own_addresses_and_no_others() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        assert!(covers(ip("10.1.0.0"), 16, ip("10.1.255.3")) && !covers(ip("10.1.0.0"), 16, ip("10.2.0.0")));
        assert!(covers(ip("0.0.0.0"), 0, ip("203.0.113.9")) && !covers(ip("0.0.0.0"), 0, ip("::1")));
        assert!(covers(ip("10.1.2.3"), 32, ip("10.1.2.3")) && !covers(ip("10.1.2.3"), 32, ip("10.1.2.2")));
        assert!(covers(ip("2001:db8::"), 32, ip("2001:db8:1::1")) && !covers(ip("2001:db8::"), 32, ip("2001:db9::")));
    }
}
