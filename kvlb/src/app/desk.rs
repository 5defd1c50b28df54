//! What the proxy asks of the rest of kvlb: which rule, which endpoint, and what to count.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Histogram;

use crate::clock;
use crate::fleet::{EndpointKey, ExactMode, Limits, Rule};
use crate::openai::{self, Kind, Prompt};
use crate::proxy::{
    Addresses, Arrival, Backplane, Body, Call, Event, Haste, Head, Reply, Request, Survey, Target, Terms, Unseen,
};
use crate::router::{self, Decision, Lookup, Miss, Named, Reason, Step, Tier, View};
use crate::state::{InFlight, Onlooker, Service, State, Unserved};
use crate::tokenize::{self, Tokenizer};

/// Bodies from this size on are decided on the worker pool: the reference tokenizer takes a millisecond for 4 KiB.
const HEAVY_BODY: usize = 4 << 10;

/// Letters of a model's name that an error repeats: the longest names in use have fewer.
const NAME_SHOWN: usize = 100;
/// Models that an error names: a client with a typing error finds its own among these or asks `/v1/models`.
const MODELS_NAMED: usize = 20;

/// The proxy's view of kvlb.
#[derive(Debug)]
pub(super) struct Desk {
    state: Arc<State>,
    steps: [Histogram; 4],
    hash_debug: bool,
}

impl Desk {
    pub(super) fn new(state: Arc<State>, hash_debug: bool) -> Self {
        let steps = Step::ALL.map(|step| state.metrics.decision_seconds.with_label_values(&[step.label()]));
        Self { state, steps, hash_debug }
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
            show_hashes(service, named, prompt);
        }
        named
    }

    fn call(&self, request: &Request, service: Arc<Service>, named: Result<Named, Miss>, weight: u32) -> Errand {
        let asks = request.head.method() == "POST" && openai::kind(request.head.path()) != Kind::Other;
        Errand {
            state: Arc::clone(&self.state),
            service,
            named,
            client: request.arrival.client.ip(),
            weight: weight.max(1),
            decision: None,
            earlier: Vec::new(),
            counts: asks,
            began: clock::now(),
            choose: self.steps[Step::Choose as usize].clone(),
        }
    }
}

/// Names the blocks of a request that `service` serves, as the data path would.
pub(super) fn name_for(
    state: &State,
    service: &Service,
    path: &str,
    model: Option<&str>,
    body: &[u8],
) -> Result<Named, Miss> {
    let request = openai::Request { method: "POST", path, model_header: model, body };
    let prompt = openai::parse(&request).map_err(|miss| Miss::from(&miss));
    name_blocks(state, service, prompt.as_ref().map_err(|miss| *miss), &mut |_step| ())
}

fn name_blocks(
    state: &State,
    service: &Service,
    prompt: Result<&Prompt, Miss>,
    lap: &mut dyn FnMut(Step),
) -> Result<Named, Miss> {
    let asked = prompt.ok().and_then(|prompt| prompt.model.as_deref());
    let own = service.rule().key.model.as_deref();
    if service.rule().kv.mode != ExactMode::Off && asked.is_some_and(|asked| service.lists_adapter(asked)) {
        // An adapter's blocks carry its name and path; until those are known here its requests must not pass for the
        // base model's.
        return Err(Miss::because(Reason::Hashes, "lora"));
    }
    let found = own.or(asked).map_or(Err("not_staged"), |model| state.tokenizers.find(model));
    let tokenizer: Result<&Tokenizer, &'static str> = found.as_deref().map_err(|why| *why);
    let max_model_len = service.max_model_len();
    let limits = tokenize::Limits {
        max_tokens: max_model_len.unwrap_or(usize::MAX).min(state.config().max_tokens).max(1),
        max_model_len,
        // Engines run in containers, and those in UTC.
        now: Some(tokenize::WallTime::from_seconds(clock::unix_seconds())),
    };
    router::name(&service.ready, prompt, tokenizer, &limits, service.era(), lap)
}

/// `LLB_KV_HASH_DEBUG`: one line a block, with its name and the bytes that were hashed.
fn show_hashes(service: &Service, named: &Named, prompt: &Prompt) {
    let extra = router::extra(prompt);
    for (number, of_prompt) in named.prompts.iter().enumerate() {
        let Ok(blocks) = service.ready.hasher.explain(&of_prompt.token_ids, &extra, service.era()) else { continue };
        for (block, shown) in blocks.iter().enumerate() {
            tracing::info!(prompt = number, block, hash = %shown.hash, cbor = %Hex(&shown.input), "block hash");
        }
    }
}

impl Backplane for Desk {
    type Call = Errand;

    fn admits(&self, arrival: &Arrival) -> bool {
        let table = self.state.table();
        table.at(arrival.vip).any(|service| allows(service.rule(), arrival.client))
    }

    fn survey(&self, head: &Head, arrival: &Arrival) -> Result<Survey, Reply> {
        let table = self.state.table();
        let (mut inspect, mut body_limit, mut any) = (None, Duration::ZERO, false);
        let by_model = table.at(arrival.vip).any(|service| service.rule().key.model.is_some());
        let model_told = head.fields().text("x-model").is_some();
        let has_prompt = head.method() == "POST" && openai::kind(head.path()) != Kind::Other;
        for service in table.at(arrival.vip) {
            any = true;
            let rule = service.rule();
            body_limit = body_limit.max(rule.limits.request_body);
            let for_prompt = has_prompt && rule.kv.mode != ExactMode::Off;
            let for_model = by_model && !model_told && head.method() == "POST";
            if for_prompt || for_model {
                inspect = inspect.max(Some(rule.max_inspect_bytes));
            }
        }
        if any { Ok(Survey { inspect, body_limit }) } else { Err(refuse(&Unserved::NoVip, None)) }
    }

    fn is_heavy(&self, request: &Request) -> bool {
        matches!(request.body(), Body::Whole(body) if body.len() > HEAVY_BODY || self.state.tokenizers.any_heavy())
    }

    fn begin(&self, request: &Request) -> Result<Errand, Reply> {
        let mut watch = StopWatch::start(&self.steps);
        let asked = asked(request);
        let prompt = Self::prompt(&asked, request.body());
        let model = match &prompt {
            Ok(prompt) => prompt.model.clone(),
            Err(_) => openai::model(&asked),
        };
        watch.lap(Step::Parse);
        let service = self.service(request, model.as_deref())?;
        let named = self.name(&service, prompt.as_ref().map_err(|miss| *miss), &mut watch);
        let weight = prompt.as_ref().map_or(1, Prompt::weight);
        Ok(self.call(request, service, named, weight))
    }

    fn begin_hastily(&self, request: &Request, haste: Haste) -> Result<Errand, Reply> {
        let service = self.service(request, openai::model(&asked(request)).as_deref())?;
        let detail = match haste {
            Haste::Budget => "budget",
            Haste::QueueFull => "queue_full",
        };
        Ok(self.call(request, service, Err(Miss::because(Reason::Tokenize, detail)), 1))
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
        services.into_iter().map(|service| self.call(request, service, unnamed(), 1)).collect()
    }
}

/// One request on its way.
#[derive(Debug)]
pub(super) struct Errand {
    state: Arc<State>,
    service: Arc<Service>,
    named: Result<Named, Miss>,
    client: IpAddr,
    weight: u32,
    /// The last choice, until one has been counted.
    decision: Option<Decision>,
    /// Those before it, of endpoints that were tried.
    earlier: Vec<Decision>,
    /// Whether the request is one that the KV tier is for.
    counts: bool,
    began: Instant,
    choose: Histogram,
}

impl Call for Errand {
    type Guard = InFlight;

    fn terms(&self) -> Terms {
        let rule = self.service.rule();
        Terms {
            limits: Limits { ..rule.limits },
            forwarded_headers: rule.forwarded_headers,
            client_half_close: rule.client_half_close,
        }
    }

    fn choose(&mut self, tried: &[usize]) -> Option<Target<InFlight>> {
        let start = clock::now();
        if tried.is_empty() {
            self.service.retries.request(start);
        }
        // Another try takes no turn of its own: else a dead endpoint would get the turn after each failure again.
        let onlooker = Onlooker(&self.service);
        let view: &dyn View = if tried.is_empty() { &*self.service } else { &onlooker };
        let decision = router::route(&self.service.ready, &self.named, view, Some(self.client), tried);
        self.choose.observe(clock::now().saturating_duration_since(start).as_secs_f64());
        let target = decision.endpoint.and_then(|position| self.target(position, &decision));
        self.earlier.extend(self.decision.replace(decision));
        target
    }

    fn may_retry(&mut self) -> bool {
        self.service.retries.retry(clock::now())
    }

    fn report(&mut self, event: Event) {
        match event {
            Event::ConnectFailed { position, failure } => {
                let endpoint = self.service.endpoints.get(position).map(|e| e.spec.key.to_string()).unwrap_or_default();
                tracing::debug!(endpoint, cause = failure.label(), "endpoint did not take the connection");
            }
            Event::Answered { position, status, waited } => {
                // An endpoint that was too busy answers after all when nobody else does.
                if let Some(of_endpoint) = self.earlier.iter().rposition(|choice| choice.endpoint == Some(position))
                    && self.decision.as_ref().is_none_or(|decision| decision.endpoint != Some(position))
                {
                    self.decision = Some(self.earlier.swap_remove(of_endpoint));
                }
                let tier = self.decision.as_ref().map_or(Tier::Selector, |decision| decision.tier);
                self.state.metrics.first_byte_seconds.with_label_values(&[tier.label()]).observe(waited.as_secs_f64());
                self.count_class(status);
                self.settle();
            }
            Event::Finished { position, bytes } => {
                if let Some(endpoint) = self.service.endpoints.get(position) {
                    endpoint.meters.add_bytes(bytes);
                }
                self.settle();
                tracing::debug!(
                    service = self.service.rule().id.0,
                    position,
                    bytes,
                    ms = clock::now().saturating_duration_since(self.began).as_millis(),
                    "request finished"
                );
            }
            Event::Replied { status } => {
                self.count_class(status);
                self.settle();
            }
            Event::Died { .. } | Event::BrokeOff { .. } | Event::TimedOut { .. } | Event::ClientLeft(_) => {
                self.settle();
            }
        }
    }
}

impl Errand {
    fn target(&self, position: usize, decision: &Decision) -> Option<Target<InFlight>> {
        let endpoint = self.service.endpoints.get(position)?;
        let guard = endpoint.meters.enter(self.weight, self.service.next_choice());
        let fields =
            if self.service.rule().decision_headers { explain(&endpoint.spec.key, decision) } else { Vec::new() };
        Some(Target { position, addresses: Addresses(endpoint.addresses()), fields, guard })
    }

    fn count_class(&self, status: u16) {
        let class =
            ["1xx", "2xx", "3xx", "4xx", "5xx"].get(usize::from(status / 100).saturating_sub(1)).unwrap_or(&"other");
        let service = self.service.rule().id.0.to_string();
        self.state.metrics.requests.with_label_values(&[service.as_str(), class]).inc();
    }

    /// Counts the choice that the request really went by, once.
    fn settle(&mut self) {
        let Some(decision) = self.decision.take() else { return };
        if !self.counts {
            return;
        }
        let metrics = &self.state.metrics;
        let blocks: usize = decision.prompts.iter().map(|prompt| prompt.blocks).sum();
        metrics.prompt_blocks.inc_by(blocks as u64);
        if let Some(miss) = decision.miss {
            metrics.miss_reasons.with_label_values(&[miss.reason.label()]).inc();
            metrics.miss_details.with_label_values(&[miss.reason.label(), miss.detail]).inc();
            if miss.reason != Reason::ModeOff {
                metrics.fallthrough.inc();
            }
            return;
        }
        let Some(position) = decision.endpoint else { return };
        let ep_idx = position.to_string();
        metrics.hits.with_label_values(&[ep_idx.as_str()]).inc();
        metrics.matched_blocks.inc_by(u64::from(decision.depth));
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
        self.settle();
    }
}

/// Measures the steps of one decision.
struct StopWatch<'a> {
    steps: &'a [Histogram; 4],
    last: Instant,
}

impl<'a> StopWatch<'a> {
    fn start(steps: &'a [Histogram; 4]) -> Self {
        Self { steps, last: clock::now() }
    }

    fn lap(&mut self, step: Step) {
        let now = clock::now();
        self.steps[step as usize].observe(now.saturating_duration_since(self.last).as_secs_f64());
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
