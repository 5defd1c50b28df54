//! Files that are damaged, missing, or none: told with what to do, and the rule serves on.

use std::fs;
use std::path::Path;
use std::time::Duration;

use kvlb_tests::engine::EngineConfig;
use kvlb_tests::harness::kvlb::{Kvlb, KvlbConfig};
use kvlb_tests::harness::{eventually, temp_dir, until_some};
use nix::sys::stat::Mode;
use serde_json::{Value, json};

use super::stage::{Place, SOON, Stage, completion, exchange, post, stage_tokenizer};

const LB: &str = "/netlox/v1/config/loadbalancer";

fn with_state(place: &Place, dir: &Path) -> KvlbConfig {
    let mut config = place.config(dir);
    config.args.extend(["--state-dir".into(), dir.join("state").to_str().unwrap().into()]);
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_rules_fall_back_to_the_version_before_and_say_so() {
    let (place, dir) = (Place::new(), temp_dir().unwrap());
    let rules = dir.path().join("state/rules.json");
    let kvlb = Kvlb::start(with_state(&place, dir.path())).await.unwrap();
    for port in [8080, 8081] {
        let (status, answer) = kvlb.api("POST", LB, Some(&place.rule(1, &json!({"port": port})))).await.unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    kvlb.stop().await.unwrap();
    let whole = fs::read(&rules).unwrap();
    for damaged in [&b""[..], b"{", b"null", b"\xff\xfe\x00", &whole[..whole.len() / 2], &vec![0; 100_000]] {
        fs::write(&rules, damaged).unwrap();
        let kvlb = Kvlb::start(with_state(&place, dir.path())).await.unwrap();
        let (_, status) = kvlb.api("GET", "/netlox/v1/status", None).await.unwrap();
        assert_eq!((&status["rules"], &status["degraded"][0]["what"]), (&json!(1), &json!("state_dir")), "{status}");
        assert!(status["degraded"][0]["why"].as_str().unwrap().contains("the version before it is in force"));
        assert_eq!(fs::read(dir.path().join("state/rules.json.corrupt")).unwrap(), damaged, "kept for a person");
        kvlb.stop().await.unwrap();
    }
    // A file that this version half understands: what it does not is kept, and not in force.
    let mut document: Value = serde_json::from_slice(&whole).unwrap();
    document["rules"][0]["body"]["serviceArguments"]["kvBlockSize"] = json!("sixteen");
    document["rules"][1]["body"]["serviceArguments"]["portMax"] = json!(65_535);
    fs::write(&rules, document.to_string()).unwrap();
    let kvlb = Kvlb::start(with_state(&place, dir.path())).await.unwrap();
    let (_, all) = kvlb.api("GET", &format!("{LB}/all"), None).await.unwrap();
    let refused: Vec<_> =
        all["lbAttr"].as_array().unwrap().iter().map(|rule| rule["refused"].as_str().unwrap()).collect();
    assert!(refused[0].contains("kvBlockSize must be"), "{refused:?}");
    assert!(refused[1].contains("4096 VIP ports"), "{refused:?}");
    kvlb.stop().await.unwrap();
    // Nothing to fall back to: it does not start as if there were no rules.
    fs::write(&rules, b"{").unwrap();
    fs::write(dir.path().join("state/rules.json.prev"), b"{").unwrap();
    let error = format!("{:#}", Kvlb::start(with_state(&place, dir.path())).await.unwrap_err());
    assert!(error.contains("repair or remove the files"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_directory_that_takes_nothing_refuses_changes_and_traffic_flows() {
    let (place, dir) = (Place::new(), temp_dir().unwrap());
    // A file where the directory should be: no start, and the reason.
    fs::write(dir.path().join("state"), b"").unwrap();
    let error = format!("{:#}", Kvlb::start(with_state(&place, dir.path())).await.unwrap_err());
    assert!(error.contains("state directory"), "{error}");
    fs::remove_file(dir.path().join("state")).unwrap();
    drop(place);

    let stage = Stage::with(
        1,
        json!({}),
        |mut config| {
            config.args.extend(["--state-dir".into(), dir.path().join("state").to_str().unwrap().into()]);
            config
        },
        |engine| engine,
    )
    .await;
    // What the next version would be written to is a directory: root's writes fail too.
    let blocker = dir.path().join("state/rules.json.tmp");
    fs::create_dir(&blocker).unwrap();
    let rule = stage.place.rule(1, &json!({"port": 8081}));
    let (status, answer) = stage.kvlb.api("POST", LB, Some(&rule)).await.unwrap();
    assert_eq!((status, &answer["error"]), (503, &json!("not_durable")), "{answer}");
    let (status, answer) = stage.kvlb.api("DELETE", &format!("{LB}/id/1"), None).await.unwrap();
    assert_eq!((status, &answer["error"]), (503, &json!("not_durable")), "{answer}");
    stage.ask(&completion("the old rules serve on")).await;
    fs::remove_dir(&blocker).unwrap();
    stage.create(&rule).await;
    stage.close().await;
}

/// What `get lb` notes of the first rule.
async fn notes(stage: &Stage) -> String {
    let (_, all) = stage.kvlb.api("GET", &format!("{LB}/all"), None).await.unwrap();
    all["lbAttr"][0]["notes"].to_string()
}

async fn until_noted(stage: &Stage, words: &str) {
    let noted = async || notes(stage).await.contains(words);
    let waited = eventually(SOON, &format!("the notes say `{words}`"), noted).await;
    if let Err(error) = waited {
        panic!("{error}; they say {}", notes(stage).await);
    }
}

/// The reason that an answer's headers give for a choice without blocks.
async fn reason(stage: &Stage, path: &str, body: &Value) -> String {
    let answer = exchange(stage.vip(), &post(path, &[], body.to_string().as_bytes())).await.unwrap();
    assert_eq!((answer.engine(), answer.head.status), ("engine-0", 200), "{}", answer.body.text());
    answer.head.header("x-kvlb-reason").unwrap_or_default().to_owned()
}

fn model(name: &str) -> impl Fn(EngineConfig) -> EngineConfig {
    let name = name.to_owned();
    move |config| EngineConfig { model: name.clone(), ..config }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tokenizer_that_is_missing_or_damaged_is_noted_and_its_repair_is_seen() {
    let dir = temp_dir().unwrap();
    let daemon = |mut config: KvlbConfig| {
        let at = config.args.iter().position(|arg| arg == "--tokenizer-dir").unwrap();
        config.args[at + 1] = dir.path().join("tokenizers").to_str().unwrap().to_owned();
        config
    };
    let stage = Stage::with(1, json!({}), daemon, model("org/broken")).await;
    let prompt = json!({"model": "org/broken", "prompt": "a few words that make a block or even two of them, sixteen tokens each", "max_tokens": 1});
    until_noted(&stage, "no folder org__broken in").await;
    assert!(reason(&stage, "/v1/completions", &prompt).await.contains("not_staged"));

    let folder = dir.path().join("tokenizers/org__broken");
    fs::create_dir_all(&folder).unwrap();
    until_noted(&stage, "tokenizer.json is missing in").await;
    let file = folder.join("tokenizer.json");
    // A pipe without a writer must not be waited for.
    nix::unistd::mkfifo(&file, Mode::S_IRWXU).unwrap();
    until_noted(&stage, "is no regular file").await;

    // Repaired, with chats still without a template, and then with one.
    fs::remove_file(&file).unwrap();
    fs::copy(super::stage::tiny().join("tokenizer.json"), &file).unwrap();
    until_noted(&stage, "no_template").await;
    let warm = async || reason(&stage, "/v1/completions", &prompt).await.is_empty();
    eventually(SOON, "the blocks of a completion are found", warm).await.unwrap();
    stage_tokenizer(dir.path(), "org__broken");
    until_noted(&stage, "null").await;
    let good = json!({"model": "org/broken", "prompt": "still there?", "max_tokens": 1});
    reason(&stage, "/v1/completions", &good).await;
    assert!(!stage.kvlb.log().contains("panicked"), "{}", stage.kvlb.log());
    stage.kvlb.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenizer_files_of_every_kind_of_damage_are_logged_and_requests_pass() {
    let stage = Stage::set(1, json!({})).await;
    let bpe = |model: &str| format!(r#"{{"version": "1.0", "model": {{"type": "BPE", {model}}}}}"#).into_bytes();
    for (number, damaged) in [
        Vec::new(),
        b"{}".to_vec(),
        b"\xff\x00".to_vec(),
        vec![b'['; 1_000_000],
        bpe(r#""vocab": {}, "merges": [7]"#),
        bpe(r#""vocab": {"a": 0, "b": 4294967295}, "merges": [["a", "b"]]"#),
        bpe(r#""vocab": {"a": -1}, "merges": []"#),
        bpe(r#""vocab": {"a": 99999999999}, "merges": []"#),
        [br#"{"version": "1.0", "x": ""#.to_vec(), vec![b'x'; 20 << 20]].concat(),
    ]
    .into_iter()
    .enumerate()
    {
        let model = format!("bad{number}");
        fs::write(stage_tokenizer(stage.dir.path(), &model).join("tokenizer.json"), damaged).unwrap();
        until_not_staged(&stage, &model).await;
    }
    let huge = stage_tokenizer(stage.dir.path(), "huge");
    fs::File::create(huge.join("tokenizer.json")).unwrap().set_len(300 << 20).unwrap();
    let device = stage_tokenizer(stage.dir.path(), "device");
    std::os::unix::fs::symlink("/dev/zero", device.join("config.json")).unwrap();
    let folder = stage_tokenizer(stage.dir.path(), "folder");
    fs::create_dir(folder.join("config.json")).unwrap();
    for model in ["huge", "device", "folder"] {
        until_not_staged(&stage, model).await;
    }
    let memory = stage.memory();
    assert!(memory < 512 << 20, "{memory} bytes");
    // One of them makes the library that reads it panic, which the log shows; nothing else came of it.
    stage.ask(&completion("still there?")).await;
    assert!(stage.kvlb.metric("kvlb_panics_total").await.unwrap().abs() < f64::EPSILON);
    stage.kvlb.stop().await.unwrap();
}

async fn until_not_staged(stage: &Stage, model: &str) {
    let body = json!({"model": model, "prompt": "a", "max_tokens": 1});
    let told =
        async || stage.try_ask(&body).await.unwrap().head.header("x-kvlb-reason") == Some("tokenize; not_staged");
    eventually(SOON, &format!("{model} is found to be of no use"), told).await.unwrap();
    let log = stage.kvlb.log();
    assert!(log.lines().any(|line| line.contains("tokenizer not usable") && line.contains(model)), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_that_never_end_or_make_no_sense_cost_a_miss_and_hold_nobody() {
    let stage = Stage::set(1, json!({})).await;
    let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}{% endfor %}{% endfor %}";
    let recursive = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    let doubling =
        format!("{{% set ns = namespace(t='x') %}}{}{{{{ ns.t }}}}", "{% set ns.t = ns.t ~ ns.t %}".repeat(64));
    for (number, (name, text)) in [
        ("three loops in each other", nested),
        ("a macro that calls itself", recursive),
        ("a text that doubles 64 times", &doubling),
        ("a text times a billion", "{{ 'x' * 1000000000 }}"),
        ("a text times 2^62", "{{ 'x' * 4611686018427387904 }}"),
        ("a list times a billion", "{{ [1] * 1000000000 }}"),
        ("a width of a billion", "{{ '%1000000000d' % 1 }}{{ 'x'.center(1000000000) }}"),
        ("another template", "{% include 'other' %}"),
        ("a division by zero", "{{ 1 // 0 }}{{ 1 % 0 }}"),
        ("numbers out of range", "{{ 9223372036854775807 + 9223372036854775807 }}{{ 2 ** 100000 }}"),
        ("messages out of range", "{{ messages[100].content }}{{ messages[-100] }}"),
        ("no template", "{% if %}{{ }}{%"),
    ]
    .into_iter()
    .enumerate()
    {
        let model = format!("t{number}");
        fs::write(stage_tokenizer(stage.dir.path(), &model).join("chat_template.jinja"), text).unwrap();
        let chat = json!({"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]});
        let missed = async || {
            let bytes = post("/v1/chat/completions", &[], chat.to_string().as_bytes());
            let start = tokio::time::Instant::now();
            let answer = exchange(stage.vip(), &bytes).await.unwrap();
            assert!(start.elapsed() < Duration::from_secs(3), "{name}: {:?}", start.elapsed());
            assert_eq!(answer.engine(), "engine-0", "{name}: {}", answer.body.text());
            let reason = answer.head.header("x-kvlb-reason").unwrap_or("none").to_owned();
            (!reason.contains("loading")).then_some(reason)
        };
        let reason = until_some(SOON, &format!("{name}: the template is looked at"), missed).await.unwrap();
        // One that burns all its fuel is filled aside, and may take longer than a choice waits.
        assert!(reason.contains("template") || reason.contains("budget"), "{name}: {reason}");
        let memory = stage.memory();
        assert!(memory < 512 << 20, "{name}: {memory} bytes");
    }
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_clients_make_up_cost_nothing() {
    let stage = Stage::set(1, json!({})).await;
    let ask = async |number: u32| {
        let body = json!({"model": format!("{}/{number}", "made-up".repeat(20)), "prompt": "a", "max_tokens": 1});
        let answer = stage.try_ask(&body).await.unwrap();
        assert_eq!((answer.engine(), answer.head.status), ("engine-0", 404), "the engine knows what it serves");
    };
    for number in 0..500 {
        ask(number).await;
    }
    let (memory, log) = (stage.memory(), stage.kvlb.log().len());
    for number in 500..2500 {
        ask(number).await;
    }
    let grown = stage.memory().saturating_sub(memory);
    assert!(grown < 8 << 20, "{grown} bytes more");
    let logged = stage.kvlb.log().len() - log;
    assert!(logged < 10_000, "{logged} bytes logged for 2000 requests");
    stage.close().await;
}

/// An engine that says odd things of itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_own_pages_are_endless_or_nonsense_is_served_nevertheless() {
    use kvlb_tests::harness::upstream::{Act, Upstream};
    let pages = [
        ("endless", b"HTTP/1.1 200 OK\r\n\r\n".to_vec().into_iter().chain(b"x".repeat(8 << 20)).collect::<Vec<u8>>()),
        ("nonsense", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"data\": ".to_vec()),
        ("deep", [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n".to_vec(), b"[".repeat(100_000)].concat()),
    ];
    let stage = Stage::set(1, json!({})).await;
    for (number, (name, page)) in pages.into_iter().enumerate() {
        let odd = Upstream::start(vec![Act::Read, Act::Send(page)]).await.unwrap();
        let mut rule = stage.place.rule(1, &json!({"port": 8090 + number, "probetype": "http", "proberesp": "never"}));
        rule["endpoints"] = json!([{"endpointIP": "127.0.0.1", "targetPort": odd.address().port()}]);
        stage.create(&rule).await;
        let asked = async || odd.received().len() >= 3;
        eventually(SOON, &format!("{name}: it is probed and asked for its models"), asked).await.unwrap();
    }
    stage.close().await;
}
