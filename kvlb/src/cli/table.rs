//! Answers of the API as tables.

use comfy_table::Table;
use serde_json::Value;

use super::create::{MODES, SELECTORS};
use super::grid::{Column, Grid, keep, spare};

/// What a table is written on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Screen {
    /// Its width; `None` where it is no terminal, and lines are as long as they are.
    pub(super) columns: Option<u16>,
}

impl Screen {
    /// Standard output.
    pub(super) fn of_process() -> Self {
        Self { columns: Table::new().width() }
    }
}

/// `get lb`.
pub(super) fn rules(answer: &Value, wide: bool, screen: Screen) -> String {
    let rules: Vec<&Value> = list(answer, "lbAttr").collect();
    let mut text = if wide { rules_wide(&rules) } else { rules_short(&rules) }.render(screen);
    for rule in rules {
        let id = cell(&rule["id"]);
        if wide && let Some(pinning) = pinning(&rule["serviceArguments"]) {
            text.extend([format!("rule {id} remembers {pinning}\n")]);
        }
        if wide {
            text.extend(list(rule, "vips").map(|vip| format!("rule {id} at {}\n", verdicts(vip))));
        }
        for note in list(rule, "notes").map(cell).chain(rule["refused"].as_str().map(refused)) {
            text.extend([format!("rule {id}: {note}\n")]);
        }
    }
    text
}

/// What a rule says of conversations, sessions and texts; nothing where it says nothing.
fn pinning(service: &Value) -> Option<String> {
    let number = |name: &str, default: u64| service[name].as_u64().filter(|n| *n != 0).unwrap_or(default);
    let mut parts = Vec::new();
    if service["pd_session_ttl_sec"].as_u64().is_some_and(|seconds| seconds != 0) {
        parts.push(format!("for {} s", number("pd_session_ttl_sec", 0)));
    }
    if service["session_from_user"] == Value::Bool(true) {
        parts.push("conversations by user".to_owned());
    }
    if let Some(source) = service["session_header_name"].as_str().filter(|source| !source.is_empty()) {
        parts.push(format!("sessions by {source}"));
    }
    if service["pd_cache_aware_mode"] == Value::Bool(true) {
        let (percent, apart) = (number("pd_cache_threshold", 20), number("pd_balance_abs_threshold", 3));
        parts.push(format!("texts from {percent}% on, while loads are at most {apart} apart"));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// What became of connections to a VIP: what it served, and whatever else there was.
fn verdicts(vip: &Value) -> String {
    let count = |of: &Value, (name, word): (&str, &str)| {
        of[name].as_u64().filter(|count| *count > 0).map(|count| format!("{word} {count}"))
    };
    let steering = [("refused", "no endpoint"), ("denied", "denied"), ("noListener", "no listener")];
    let mut words = vec![format!("steered {}", cell(&vip["steered"]))];
    words.extend(steering.into_iter().filter_map(|of| count(vip, of)));
    let devices = [("syn", "syn"), ("other", "other"), ("rate", "rate"), ("acl", "acl"), ("cut", "cut")];
    let frames: Vec<_> = devices.into_iter().filter_map(|of| count(&vip["frames"], of)).collect();
    let frames = if frames.is_empty() { String::new() } else { format!("; frames {}", frames.join(", ")) };
    format!("{}: {}{frames}", cell(&vip["vip"]), words.join(", "))
}

/// `get drops`.
pub(super) fn drops(answer: &Value, screen: Screen) -> String {
    let totals = answer["totals"].as_object().into_iter().flatten();
    let totals: Vec<_> = totals
        .filter(|(_, count)| count.as_u64().is_some_and(|count| count > 0))
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    if totals.is_empty() && list(answer, "latest").next().is_none() {
        return "The kernel has dropped nothing.\n".to_owned();
    }
    let mut grid =
        Grid::new(&[keep("Time"), keep("Reason"), keep("Source"), keep("VIP"), spare("Rule", 1), keep("Stands for")]);
    for drop in list(answer, "latest") {
        let time = drop["at"].as_u64().map_or_else(|| "-".to_owned(), time_of_day);
        let known = |name: &str| if drop[name].is_null() { "-".to_owned() } else { cell(&drop[name]) };
        grid.add([time, known("reason"), known("source"), known("vip"), known("rule"), known("count")]);
    }
    let totals = if totals.is_empty() { "none at the VIPs that there are".to_owned() } else { totals.join(", ") };
    format!("{}In all: {totals}\n", grid.render(screen))
}

/// Milliseconds since 1970 as the time of day (UTC).
fn time_of_day(millis: u64) -> String {
    let seconds = millis / 1000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{:03}Z", seconds % 60, millis % 1000)
}

fn refused(why: &str) -> String {
    format!("kept but not in force: {why}")
}

/// Loxicmd's columns, with the rule's number first and the contract last.
fn rules_short(rules: &[&Value]) -> Grid {
    let mut grid = Grid::new(&[
        keep("Id"),
        keep("Ext IP"),
        keep("Port"),
        spare("Proto", 6),
        spare("Name", 2),
        spare("Mark", 7),
        spare("Sel", 3),
        spare("Mode", 5),
        keep("# of Endpoints"),
        spare("Timeout", 4),
        spare("Monitor", 1),
        keep("Contract"),
    ]);
    for rule in rules {
        let service = &rule["serviceArguments"];
        grid.add([
            cell(&rule["id"]),
            cell(&service["externalIP"]),
            ports(service),
            protocol(service),
            name(service),
            "0".to_owned(),
            word(&SELECTORS, &service["sel"]),
            word(&MODES, &service["mode"]),
            list(rule, "endpoints").count().to_string(),
            timeout(service),
            if service["monitor"] == Value::Bool(false) { "Off" } else { "On" }.to_owned(),
            contract(rule),
        ]);
    }
    grid
}

/// Columns of a rule in `WIDE`, before those of its endpoints.
const RULE_CELLS: usize = 13;

const WIDE: [Column; 22] = [
    keep("Id"),
    keep("Ext IP"),
    spare("Sources", 8),
    spare("Host", 7),
    keep("Port"),
    spare("Proto", 11),
    spare("Name", 6),
    spare("Model", 2),
    spare("Mark", 12),
    spare("Sel", 9),
    spare("Mode", 10),
    spare("Blend", 13),
    spare("Admission", 14),
    keep("Idx"),
    keep("Endpoint"),
    keep("EPort"),
    spare("Weight", 4),
    spare("Role", 3),
    keep("State"),
    spare("Counters", 5),
    keep("Contract"),
    spare("Blocks", 1),
];

/// One line per endpoint; the rule's cells stand on its first line only, as loxicmd's.
fn rules_wide(rules: &[&Value]) -> Grid {
    let mut grid = Grid::new(&WIDE);
    for rule in rules {
        let service = &rule["serviceArguments"];
        let sources: Vec<_> = list(rule, "allowedSources").map(|source| cell(&source["prefix"])).collect();
        let mut cells = vec![
            cell(&rule["id"]),
            cell(&service["externalIP"]),
            sources.join("\n"),
            host(service),
            ports(service),
            protocol(service),
            name(service),
            cell(&service["model_name"]),
            "0".to_owned(),
            word(&SELECTORS, &service["sel"]),
            word(&MODES, &service["mode"]),
            blend(&rule["kvBlend"]),
            admission(&service["fc_effective"]),
        ];
        for endpoint in list(rule, "endpoints") {
            cells.extend(endpoint_cells(endpoint));
            grid.add(std::mem::replace(&mut cells, vec![String::new(); RULE_CELLS]));
        }
        // A rule that is kept but makes no sense may have none.
        if list(rule, "endpoints").next().is_none() {
            grid.add(cells);
        }
    }
    grid
}

/// How overlap is weighed against load: the mode with the numbers that it goes by, then what goes for every mode.
fn blend(numbers: &Value) -> String {
    let Some(mode) = numbers["mode"].as_str() else { return String::new() };
    let mut words = vec![match mode {
        "hard" => format!("hard {}%", cell(&numbers["meanLoadFactor"])),
        "soft" => format!("soft {}", cell(&numbers["loadPenalty"])),
        "adaptive" | "adaptive-soft" => format!("{mode} {}", cell(&numbers["capSumMilli"])),
        other => other.to_owned(),
    }];
    if matches!(mode, "hard" | "adaptive") {
        words.push(format!("floor {}", cell(&numbers["loadFloor"])));
    }
    if !matches!(mode, "off" | "cost") {
        words.push(if numbers["spillRelief"] == true { "relief" } else { "no relief" }.to_owned());
    }
    match numbers["coldStartSeedN"].as_u64() {
        Some(every @ 1..) if mode != "off" => {
            words.push(format!("seed 1/{every} <{}", cell(&numbers["coldStartMinBlocks"])));
        }
        _ => {}
    }
    words.push(format!("match {}", cell(&numbers["minMatchTokens"])));
    words.join(", ")
}

/// A rule's requests at endpoints and in its queue, each with its bound where it has one.
fn admission(effective: &Value) -> String {
    if effective.is_null() {
        return String::new();
    }
    let of = |name: &str, bound: &str| match effective[bound].as_u64().filter(|bound| *bound > 0) {
        Some(bound) => format!("{} of {bound}", cell(&effective[name])),
        None => cell(&effective[name]),
    };
    let (inflight, queued) = (of("inflight", "max_outstanding"), of("queued", "queue_depth"));
    let mut each = String::new();
    for (bound, of) in
        [("ep_max_inflight", ""), ("prefill_max_inflight", " prefill"), ("decode_max_inflight", " decode")]
    {
        if let Some(bound) = effective[bound].as_u64().filter(|bound| *bound > 0) {
            each.extend([", ", &bound.to_string(), " each", of]);
        }
    }
    format!("{}: {inflight}{each}, queue {queued}", cell(&effective["mode"]))
}

fn endpoint_cells(endpoint: &Value) -> [String; 9] {
    let kv = &endpoint["kvStatus"];
    [
        cell(&endpoint["ep_idx"]),
        cell(&endpoint["endpointIP"]),
        cell(&endpoint["targetPort"]),
        endpoint["weight"].as_u64().unwrap_or(1).to_string(),
        role(&endpoint["ep_role"]).to_owned(),
        cell(&endpoint["state"]),
        cell(&endpoint["counter"]),
        verdict(kv),
        cell(&kv["blocks"]),
    ]
}

/// `get ep`; wide, also what the engines say of their work.
pub(super) fn endpoints(answer: &Value, wide: bool, screen: Screen) -> String {
    let probes = [
        keep("Host"),
        spare("Name", 5),
        keep("ptype"),
        keep("port"),
        spare("duration", 3),
        spare("retries", 4),
        spare("minDelay", 6),
        spare("avgDelay", 7),
        spare("maxDelay", 8),
        keep("State"),
        spare("Rule", 1),
        spare("Idx", 2),
        spare("Role", 3),
    ];
    let of_engine =
        [spare("Engine", 10), keep("Waiting"), keep("Running"), keep("KV use"), spare("KV blocks", 9), keep("Seen")];
    let mut grid = Grid::new(&[&probes[..], if wide { &of_engine } else { &[] }].concat());
    let mut unknown = String::new();
    for endpoint in list(answer, "Attr") {
        let mut row = vec![
            cell(&endpoint["hostName"]),
            cell(&endpoint["name"]),
            format!("{}:{}", cell(&endpoint["probeType"]), cell(&endpoint["probeReq"])),
            cell(&endpoint["probePort"]),
            cell(&endpoint["probeDuration"]),
            cell(&endpoint["inactiveReTries"]),
            cell(&endpoint["minDelay"]),
            cell(&endpoint["avgDelay"]),
            cell(&endpoint["maxDelay"]),
            endpoint_state(endpoint),
            cell(&endpoint["service_id"]),
            cell(&endpoint["ep_idx"]),
            cell(&endpoint["role"]),
        ];
        if wide {
            row.extend(engine_cells(&endpoint["telemetry"]));
            let who = format!("rule {} endpoint {}", cell(&endpoint["service_id"]), cell(&endpoint["ep_idx"]));
            unknown.extend(why_unknown(&endpoint["telemetry"]).map(|why| format!("{who}: {why}\n")));
        }
        grid.add(row);
    }
    grid.render(screen) + &unknown
}

/// What an engine says of its work; what is not known is a question mark, and nothing where nobody asks.
fn engine_cells(telemetry: &Value) -> [String; 6] {
    if telemetry.is_null() {
        return Default::default();
    }
    let known = |name: &str| if telemetry[name].is_null() { "?".to_owned() } else { cell(&telemetry[name]) };
    let usage = telemetry["kvUsage"].as_f64().map_or_else(|| "?".to_owned(), |usage| format!("{:.1}%", usage * 100.0));
    [
        known("engine"),
        known("waiting"),
        known("running"),
        usage,
        known("blocks"),
        telemetry["ageMs"].as_u64().map_or_else(|| "never".to_owned(), |millis| format!("{} ago", age(millis))),
    ]
}

/// The families that are missing, and looks that came to nothing where that shows.
fn why_unknown(telemetry: &Value) -> impl Iterator<Item = String> {
    let missing: Vec<_> = list(telemetry, "missing").map(cell).collect();
    let missing = (!missing.is_empty()).then(|| format!("unknown: not among its metrics: {}", missing.join(", ")));
    let failures = telemetry["failures"].as_object().into_iter().flatten();
    let failures: Vec<_> = failures.map(|(why, count)| format!("{why} {count}")).collect();
    let silent = telemetry["stale"] == true || telemetry["ageMs"].is_null();
    let failed = (silent && !failures.is_empty()).then(|| format!("no metrics of late: {}", failures.join(", ")));
    missing.into_iter().chain(failed)
}

/// Loxicmd's word, with ours where it says more.
fn endpoint_state(endpoint: &Value) -> String {
    let (loxi, ours) = (cell(&endpoint["currState"]), cell(&endpoint["state"]));
    if matches!(ours.as_str(), "" | "-" | "active" | "inactive") { loxi } else { format!("{loxi} ({ours})") }
}

/// `get kvinventory`: loxicmd's line, then the names.
pub(super) fn inventory(answer: &Value, screen: Screen) -> String {
    let rehashed = answer["keying"] == "rehash";
    let mut grid =
        Grid::of(if rehashed { &["block index", "hash", "hex", "name"] } else { &["block index", "hash", "hex"] });
    for block in list(answer, "blocks") {
        let mut row = vec![cell(&block["block_idx"]), cell(&block["hash_uint64"]), cell(&block["hash_hex"])];
        row.extend(rehashed.then(|| cell(&block["name"])));
        grid.add(row);
    }
    format!(
        "service_id={} ep_idx={} hash_algo={} keying={} total={}\n{}",
        cell(&answer["service_id"]),
        cell(&answer["ep_idx"]),
        cell(&answer["hash_algo"]),
        cell(&answer["keying"]),
        cell(&answer["total"]),
        grid.render(screen)
    )
}

/// `get kvstatus`.
pub(super) fn kv_status(answer: &Value, screen: Screen) -> String {
    let mut grid = Grid::new(&[
        keep("Rule"),
        keep("Idx"),
        keep("Endpoint"),
        spare("Role", 5),
        keep("Contract"),
        spare("Keying", 6),
        keep("Blocks"),
        spare("Connected", 1),
        spare("Replay", 2),
        spare("Sequence", 7),
        spare("Last event", 3),
        spare("Gaps", 4),
        spare("Restarts", 8),
        spare("Ranks", 10),
        spare("Orphans", 9),
    ]);
    let mut details = String::new();
    for service in services(answer) {
        for endpoint in list(service, "endpoints") {
            let kv = &endpoint["kvStatus"];
            grid.add([
                cell(&service["service_id"]),
                cell(&endpoint["ep_idx"]),
                place(endpoint),
                cell(&endpoint["role"]),
                if kv.is_null() { "not subscribed".to_owned() } else { verdict(kv) },
                cell(&kv["keying"]),
                cell(&kv["blocks"]),
                yes_no(&kv["connected"]),
                cell(&kv["replay"]),
                cell(&kv["sequence"]),
                kv["lastEventAgeMs"].as_u64().map_or_else(String::new, age),
                cell(&kv["gaps"]),
                cell(&kv["restarts"]),
                cell(&kv["ranks"]),
                cell(&kv["orphans"]),
            ]);
            if let Some(detail) = kv["detail"].as_str().filter(|detail| !detail.is_empty()) {
                let id = cell(&service["service_id"]);
                details.extend([format!("rule {id} endpoint {}: {detail}\n", cell(&endpoint["ep_idx"]))]);
            }
        }
    }
    grid.render(screen) + &details
}

/// `get savings`.
pub(super) fn savings(answer: &Value, screen: Screen) -> String {
    let mut grid = Grid::of(&[
        "Rule",
        "Idx",
        "Endpoint",
        "Requests",
        "Prompt tokens",
        "Predicted",
        "Not computed again",
        "Share",
        "Distrusted",
    ]);
    for service in list(answer, "services") {
        for endpoint in list(service, "endpoints") {
            let savings = &endpoint["savings"];
            grid.add([
                cell(&service["service_id"]),
                cell(&endpoint["ep_idx"]),
                place(endpoint),
                cell(&savings["requests"]),
                cell(&savings["promptTokens"]),
                cell(&savings["predictedTokens"]),
                cell(&savings["reportedTokens"]),
                share(savings["reportedTokens"].as_u64(), savings["promptTokens"].as_u64()),
                cell(&savings["distrusted"]),
            ]);
        }
    }
    grid.render(screen) + "Tokens of requests whose engine reports them (vLLM: --enable-prompt-tokens-details).\n"
}

fn share(part: Option<u64>, whole: Option<u64>) -> String {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0 => format!("{}%", part.saturating_mul(100) / whole),
        _ => "-".to_owned(),
    }
}

/// Whether the contract of any endpoint is broken.
pub(super) fn any_mismatch(answer: &Value) -> bool {
    services(answer).flat_map(|service| list(service, "endpoints")).any(|e| e["kvStatus"]["contract"] == "mismatch")
}

/// The services of an answer that may be one.
fn services(answer: &Value) -> impl Iterator<Item = &Value> {
    let one = answer.get("endpoints").map(|_| answer);
    one.into_iter().chain(list(answer, "services"))
}

/// `get status`.
pub(super) fn status(answer: &Value, screen: Screen) -> String {
    let datapath = &answer["datapath"];
    let mut grid = Grid::of(&["What", "Now"]);
    let detail = cell(&datapath["detail"]);
    let mode = cell(&datapath["mode"]);
    for row in [
        ["version".to_owned(), cell(&answer["version"])],
        ["ready".to_owned(), yes_no(&answer["ready"])],
        ["datapath".to_owned(), if detail.is_empty() { mode } else { format!("{mode} ({detail})") }],
        ["xdp".to_owned(), xdp(answer)],
        ["io".to_owned(), cell(&answer["io"])],
        ["data threads".to_owned(), cell(&answer["threads"])],
        ["api".to_owned(), api(answer)],
        ["state".to_owned(), answer["stateDir"].as_str().unwrap_or("in memory only").to_owned()],
        ["rules".to_owned(), cell(&answer["rules"])],
        ["endpoints".to_owned(), cell(&answer["endpoints"])],
    ] {
        grid.add(row);
    }
    let from = &answer["takeover"];
    if from.is_object() {
        let (version, pid, at) = (cell(&from["fromVersion"]), cell(&from["fromPid"]), cell(&from["at"]));
        let cold = if from["warm"] == true { "" } else { ", before all inventories were here" };
        grid.add(["taken over".to_owned(), format!("from process {pid} ({version}) at {at} s of Unix time{cold}")]);
    }
    let mut text = grid.render(screen);
    for degraded in list(answer, "degraded") {
        text.extend([format!("degraded: {}: {}\n", cell(&degraded["what"]), cell(&degraded["why"]))]);
    }
    text
}

/// The devices at which frames are judged.
fn xdp(status: &Value) -> String {
    let device = |at: &Value| format!("{} ({})", cell(&at["device"]), cell(&at["mode"]));
    let devices: Vec<_> = list(status, "xdp").map(device).collect();
    if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") }
}

/// Where the API listens, and what it asks for; older ones do not say.
fn api(status: &Value) -> String {
    let address = cell(&status["api"]);
    let Some(tokens) = status["apiTokens"].as_str() else { return address };
    let protocol = if status["apiTls"] == true { "https" } else { "http" };
    format!("{address} ({protocol}, tokens: {tokens})")
}

/// `explain`.
pub(super) fn explanation(answer: &Value, screen: Screen) -> String {
    let mut text = format!("tier      {}\nendpoint  {}\n", cell(&answer["tier"]), or_none(&answer["endpoint"]));
    for (label, name) in [("repin     ", "repin"), ("reason    ", "reason"), ("detail    ", "detail")] {
        if let Some(value) = answer[name].as_str() {
            text.extend([format!("{label}{value}\n")]);
        }
    }
    let split = &answer["split"];
    if let Some(handoff) = split["handoff"].as_str() {
        text.extend([format!("handoff   {handoff}\ndecode    {}\n", or_none(&split["decode"]))]);
    } else if let Some(why) = split["alone"].as_str() {
        text.extend([format!("alone     {why}\n")]);
    }
    for prompt in list(answer, "prompts") {
        text.extend([format!("prompt    {} tokens, {} blocks\n", cell(&prompt["tokens"]), cell(&prompt["blocks"]))]);
    }
    let mut grid = Grid::of(&["Idx", "Role", "Depth", "Count", "Load", "Eligible"]);
    for candidate in list(answer, "candidates") {
        let number = |name: &str| cell(&candidate[name]);
        let eligible = yes_no(&candidate["eligible"]);
        grid.add([number("ep_idx"), number("role"), number("depth"), number("count"), number("load"), eligible]);
    }
    text + &grid.render(screen)
}

fn or_none(value: &Value) -> String {
    if value.is_null() { "none is eligible".to_owned() } else { cell(value) }
}

fn list<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    value[name].as_array().into_iter().flatten()
}

/// A value without JSON's quotes; nothing for null.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn yes_no(value: &Value) -> String {
    value.as_bool().map_or("", |yes| if yes { "yes" } else { "no" }).to_owned()
}

fn ports(service: &Value) -> String {
    match (&service["port"], service["portMax"].as_u64().filter(|last| *last != 0)) {
        (port, Some(last)) if port.as_u64() != Some(last) => format!("{}-{last}", cell(port)),
        (port, _) => cell(port),
    }
}

fn protocol(service: &Value) -> String {
    service["protocol"].as_str().filter(|protocol| !protocol.is_empty()).unwrap_or("tcp").to_ascii_lowercase()
}

fn name(service: &Value) -> String {
    cell(&service["name"])
}

/// The parts of a rule's key beside address and port.
fn host(service: &Value) -> String {
    format!("{}{}", cell(&service["host"]), cell(&service["path_prefix"]))
}

fn word(table: &[(&str, u8)], number: &Value) -> String {
    let known = table.iter().find(|(_, known)| u64::from(*known) == number.as_u64().unwrap_or(0));
    known.map_or_else(|| cell(number), |(word, _)| (*word).to_owned())
}

/// Seconds between two pieces of an answer, where the rule says so.
fn timeout(service: &Value) -> String {
    service["inactiveTimeOut"].as_u64().filter(|seconds| *seconds != 0).map_or_else(String::new, |s| s.to_string())
}

fn role(role: &Value) -> &'static str {
    match role.as_u64() {
        Some(1) => "prefill",
        Some(2) => "decode",
        _ => "normal",
    }
}

fn place(endpoint: &Value) -> String {
    let host = cell(&endpoint["endpointIP"]);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    format!("{host}:{}", cell(&endpoint["targetPort"]))
}

fn verdict(kv: &Value) -> String {
    // A broken leg costs nothing where blocks have names of ours.
    let healed = if kv["keying"] == "rehash" { " (rehash)" } else { "" };
    match kv["leg"].as_str() {
        Some(leg) => format!("{}: {leg}{healed}", cell(&kv["contract"])),
        None => format!("{}{healed}", cell(&kv["contract"])),
    }
}

/// The verdicts of a rule's endpoints, each named once, the worst first.
fn contract(rule: &Value) -> String {
    let mut verdicts: Vec<_> =
        list(rule, "endpoints").map(|e| verdict(&e["kvStatus"])).filter(|verdict| !verdict.is_empty()).collect();
    verdicts.sort_by_key(|verdict| (!verdict.starts_with("mismatch"), verdict.clone()));
    verdicts.dedup();
    verdicts.join(", ")
}

/// A time that an operator reads at a glance.
fn age(millis: u64) -> String {
    match millis {
        0..1_000 => format!("{millis} ms"),
        1_000..120_000 => format!("{} s", millis / 1_000),
        _ => format!("{} min", millis / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer() -> Value {
        let kv = |contract: &str, leg: Value, blocks: u64| {
            json!({"contract": contract, "leg": leg, "detail": null, "keying": "parity", "blocks": blocks,
                "connected": true, "replay": "applied", "sequence": 17, "lastEventAgeMs": 2300, "gaps": 0, "restarts": 1})
        };
        json!({"lbAttr": [
            {"id": 1, "serviceArguments": {"externalIP": "10.10.10.254", "port": 8080, "protocol": "tcp", "sel": 3,
                "mode": 4, "kvExactMode": 1, "name": "chat", "fc_effective": {"mode": "enforce", "max_outstanding": 16,
                "ep_max_inflight": 8, "queue_depth": 32, "inflight": 16, "queued": 3}},
             "endpoints": [
                {"endpointIP": "192.0.2.1", "targetPort": 8000, "weight": 1, "ep_role": 1, "ep_idx": 0,
                 "state": "active", "counter": "12:3456", "kvStatus": kv("mismatch", json!("block_size"), 42)},
                {"endpointIP": "192.0.2.2", "targetPort": 8000, "ep_role": 2, "ep_idx": 1, "state": "inactive",
                 "counter": "0:0"}],
             "kvBlend": {"mode": "hard", "meanLoadFactor": 175, "loadFloor": 4, "loadPenalty": 32, "capSumMilli": 15_284_310,
                "spillRelief": false, "coldStartSeedN": 16, "coldStartMinBlocks": 16, "minMatchTokens": 16},
             "vips": [{"vip": "10.10.10.254:8080", "steered": 12, "refused": 0, "denied": 3, "noListener": 0,
                "frames": {"syn": 15, "rate": 7, "acl": 0, "cut": 0, "other": 74}}],
             "notes": ["requests are answered by the prefill endpoints alone"]},
            {"id": 12, "serviceArguments": {"externalIP": "2001:db8::1", "port": 80, "portMax": 90, "mode": 4,
                "model_name": "Qwen/Qwen3-0.6B", "monitor": false, "inactiveTimeOut": 60, "host": "api.example"},
             "endpoints": [{"endpointIP": "::1", "targetPort": 8000, "ep_idx": 0, "state": "-", "counter": "0:0",
                "kvStatus": kv("verified", Value::Null, 7)}],
             "allowedSources": [{"prefix": "10.0.0.0/8"}, {"prefix": "::1"}]},
            {"id": 13, "serviceArguments": {"externalIP": "10.0.0.1", "port": 1}, "endpoints": [],
             "refused": "kvExactMode 2 is reserved"}]})
    }

    fn on(columns: u16) -> Screen {
        Screen { columns: Some(columns) }
    }

    const PIPE: Screen = Screen { columns: None };

    fn status_answer() -> Value {
        json!({"services": [{"service_id": 1, "endpoints": [
            {"ep_idx": 0, "endpointIP": "::1", "targetPort": 8000, "role": "prefill",
             "kvStatus": {"contract": "mismatch", "leg": "block_size", "detail": "the engine says 32", "keying": "parity",
                "blocks": 42, "connected": true, "replay": "applied", "sequence": 17, "lastEventAgeMs": 2300, "gaps": 0,
                "restarts": 1}},
            {"ep_idx": 1, "endpointIP": "192.0.2.2", "targetPort": 8000, "role": "decode", "kvStatus": null}]}]})
    }

    fn host_answer() -> Value {
        json!({"Attr": [{"hostName": "192.0.2.1", "name": "192.0.2.1_http_8000", "probeType": "http",
            "probeReq": "/health", "probePort": 8000, "probeDuration": 10, "inactiveReTries": 2, "currState": "nok",
            "state": "draining", "service_id": 1, "ep_idx": 0, "role": "decode"}]})
    }

    #[test]
    fn get_lb_is_one_line_a_rule_with_loxicmds_columns() {
        assert_eq!(rules(&answer(), false, PIPE), include_str!("golden/get_lb.txt"));
    }

    #[test]
    fn get_lb_fits_eighty_columns() {
        let text = rules(&answer(), false, on(80));
        assert_eq!(text, include_str!("golden/get_lb_80.txt"));
        assert!(text.lines().filter(|line| line.starts_with('|')).all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn get_lb_wide_is_one_line_an_endpoint() {
        assert_eq!(rules(&answer(), true, PIPE), include_str!("golden/get_lb_wide.txt"));
    }

    #[test]
    fn get_drops_shows_each_one_and_how_many_there_were() {
        let empty = json!({"totals": {"acl": 0, "rate": 0}, "latest": []});
        assert_eq!(drops(&empty, PIPE), "The kernel has dropped nothing.\n");
        let answer = json!({"totals": {"acl": 0, "chain": 2, "rate": 599_650}, "latest": [
            {"at": 1_764_557_999_083_u64, "reason": "rate", "source": "10.77.0.2:40000", "vip": "10.10.10.254:8080",
             "rule": 1, "count": 20_000},
            {"at": 0, "reason": "chain", "source": null, "vip": null, "rule": null, "count": 2}]});
        assert_eq!(drops(&answer, PIPE), include_str!("golden/get_drops.txt"));
    }

    #[test]
    fn get_lb_wide_says_what_a_rule_remembers() {
        let shown =
            |service: Value, wide| rules(&json!({"lbAttr": [{"id": 7, "serviceArguments": service}]}), wide, PIPE);
        let all = json!({"pd_session_ttl_sec": 60, "session_from_user": true, "session_header_name": "cookie:sid",
            "pd_cache_aware_mode": true, "pd_cache_threshold": 0});
        let line = "rule 7 remembers for 60 s, conversations by user, sessions by cookie:sid, texts from 20% on, while loads are at \
                    most 3 apart\n";
        assert!(shown(all.clone(), true).ends_with(line) && !shown(all, false).contains("remembers"));
        assert!(!shown(json!({"pd_session_ttl_sec": 0, "session_header_name": ""}), true).contains("remembers"));
    }

    #[test]
    fn the_bounds_of_roles_are_shown() {
        let effective = json!({"mode": "enforce", "max_outstanding": 0, "ep_max_inflight": 0, "prefill_max_inflight": 8,
            "decode_max_inflight": 64, "queue_depth": 16, "inflight": 9, "queued": 1});
        assert_eq!(admission(&effective), "enforce: 9, 8 each prefill, 64 each decode, queue 1 of 16");
    }

    #[test]
    fn get_kvstatus_names_the_leg_and_what_to_do() {
        assert_eq!(kv_status(&status_answer(), PIPE), include_str!("golden/get_kvstatus.txt"));
        assert_eq!(kv_status(&status_answer()["services"][0], PIPE), include_str!("golden/get_kvstatus.txt"));
        assert!(any_mismatch(&status_answer()) && any_mismatch(&status_answer()["services"][0]));
        assert!(!any_mismatch(&json!({"services": []})));
    }

    #[test]
    fn get_ep_has_loxicmds_columns() {
        assert_eq!(endpoints(&host_answer(), false, PIPE), include_str!("golden/get_ep.txt"));
    }

    #[test]
    fn get_ep_wide_shows_what_engines_say_and_names_what_they_do_not() {
        let mut answer = host_answer();
        let rows = answer["Attr"].as_array_mut().expect("a list");
        rows.extend([rows[0].clone(), rows[0].clone()]);
        rows[2]["role"] = "normal".into();
        rows[0]["telemetry"] = json!({"engine": "vllm", "ageMs": 2300, "stale": false, "waiting": 3, "running": 0,
            "kvUsage": 0.123, "blocks": null, "missing": ["vllm:cache_config_info"], "failures": {"status": 1}});
        rows[1]["telemetry"] = json!({"engine": "vllm", "ageMs": 61_000, "stale": true, "waiting": null, "running": null,
            "kvUsage": null, "blocks": null, "missing": [], "failures": {"unreachable": 12}});
        assert_eq!(endpoints(&answer, true, PIPE), include_str!("golden/get_ep_wide.txt"));
    }

    #[test]
    fn an_inventory_has_loxicmds_line_and_hashes_that_no_tool_rounds() {
        let answer = json!({"service_id": 3, "ep_idx": 0, "hash_algo": "sha256_cbor", "keying": "parity", "total": 1,
            "blocks": [{"block_idx": 0, "hash_uint64": u64::MAX, "hash_hex": "ffffffffffffffff"}]});
        assert_eq!(
            inventory(&answer, PIPE),
            "service_id=3 ep_idx=0 hash_algo=sha256_cbor keying=parity total=1\n\
             | BLOCK INDEX | HASH                 | HEX              |\n\
             |-------------|----------------------|------------------|\n\
             | 0           | 18446744073709551615 | ffffffffffffffff |\n"
        );
    }

    #[test]
    fn the_status_names_what_does_not_work() {
        let answer = json!({"version": "1", "ready": true, "datapath": {"mode": "none", "detail": "no permission"},
            "io": "epoll", "threads": 2, "api": "127.0.0.1:1", "stateDir": null, "rules": 1, "endpoints": 2,
            "degraded": [{"what": "kernel", "why": "no permission"}]});
        let text = status(&answer, PIPE);
        for part in ["none (no permission)", "in memory only", "degraded: kernel: no permission\n"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(text.contains("no device"), "{text}");
        let mut guarded = answer;
        guarded["xdp"] = json!([{"device": "eth0", "mode": "native"}, {"device": "eth1", "mode": "generic"}]);
        guarded["apiTls"] = json!(true);
        guarded["apiTokens"] = json!("admin+read");
        let text = status(&guarded, PIPE);
        assert!(text.contains("eth0 (native), eth1 (generic)"), "{text}");
        assert!(text.contains("127.0.0.1:1 (https, tokens: admin+read)"), "{text}");
    }

    #[test]
    fn an_explanation_shows_every_candidate() {
        let answer = json!({"tier": "kv", "reason": null, "detail": null, "endpoint": 1,
            "prompts": [{"tokens": 40, "blocks": 2}],
            "split": {"handoff": "nixl", "decode": 2},
            "candidates": [{"ep_idx": 0, "role": "prefill", "depth": 0, "count": 1, "load": 3, "eligible": false},
                {"ep_idx": 1, "role": "prefill", "depth": 2, "count": 2, "load": 0, "eligible": true},
                {"ep_idx": 2, "role": "decode", "depth": 0, "count": 0, "load": 0, "eligible": true}]});
        assert_eq!(explanation(&answer, PIPE), include_str!("golden/explain.txt"));
        let alone = json!({"tier": "2", "endpoint": 0, "split": {"handoff": null, "alone": "samples", "decode": null}});
        assert!(explanation(&alone, PIPE).starts_with("tier      2\nendpoint  0\nalone     samples\n"));
        let nobody = json!({"tier": "selector", "reason": "no_worker", "endpoint": null});
        assert!(
            explanation(&nobody, PIPE)
                .starts_with("tier      selector\nendpoint  none is eligible\nreason    no_worker\n")
        );
    }

    #[test]
    fn answers_that_lack_everything_are_shown_and_not_feared() {
        for answer in [json!({}), json!([]), json!(null), json!({"lbAttr": [null, {}, {"endpoints": [1]}]})] {
            let texts = [rules(&answer, false, PIPE), rules(&answer, true, on(10)), endpoints(&answer, true, PIPE)];
            let more = [
                inventory(&answer, PIPE),
                kv_status(&answer, PIPE),
                status(&answer, on(1)),
                explanation(&answer, on(0)),
            ];
            assert!(texts.iter().chain(&more).all(|text| text.ends_with('\n')));
        }
    }
}
