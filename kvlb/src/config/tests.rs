//! Flags and variables, one by one.

use std::num::NonZeroU64;

use super::*;
use crate::contract::NoneSeed;
use crate::fleet::Relief;
use crate::policy::{Blend, Settings};
use crate::secret::Hidden;
use crate::telemetry::access::{Destination, Sampling};
use crate::tls::{Files, Trust};

fn with_env<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Config, ConfigError> {
    Config::new(&UpFlags::default(), &Env::of(variables), 2)
}

#[test]
fn nothing_set_is_the_documented_default() {
    let config = with_env([]).unwrap();
    let expected = Config {
        api: "127.0.0.1:11111".parse().unwrap(),
        access: Access::default(),
        state_dir: Some("/var/lib/kvlb".into()),
        tokenizer_dir: "/etc/loxilb/tokenizers".into(),
        datapath: Datapath::Auto,
        pin_dir: "/sys/fs/bpf/kvlb".into(),
        xdp_devices: Vec::new(),
        io: Io::Auto,
        threads: 2,
        connections_max: None,
        head_max: 64 << 10,
        drain_timeout: Duration::from_secs(30),
        takeover: Takeover::No,
        takeover_socket: Some("/var/lib/kvlb/takeover.sock".into()),
        takeover_wait: Duration::from_mins(1),
        log_format: LogFormat::Text,
        log_level: "info".to_owned(),
        access_log: AccessLog { sampling: Sampling::Off, destination: Destination::Stdout },
        decision_log: None,
        trace_context: true,
        text_cache: 256 << 20,
        scrape_interval: Some(Duration::from_secs(5)),
        engine_key: None,
        zero_touch: None,
        kv: Kv {
            none_seed: NoneSeed::Unset,
            hash_debug: false,
            min_match_tokens: 16,
            settings: Settings::default(),
            relief: Relief::Auto,
            max_blocks: None,
            replay_offset: Some(1000),
            decision_budget: Duration::from_millis(20),
        },
        prefill_timeout: Duration::from_secs(30),
        warnings: Vec::new(),
    };
    assert_eq!(config, expected);
}

#[test]
fn a_core_is_left_to_the_rest_from_four_up() {
    let threads = |cores| Config::new(&UpFlags::default(), &Env::default(), cores).map(|config| config.threads);
    assert_eq!([0, 1, 2, 3, 4, 16].map(threads), [1, 1, 2, 3, 3, 15].map(Ok));
}

/// Every variable.
fn every_twin() -> Env {
    Env::of([
        ("KVLB_API", "[::1]:1"),
        ("KVLB_API_TOKEN_FILE", "/k/t"),
        ("KVLB_API_READ_TOKEN_FILE", "/k/r"),
        ("KVLB_API_OPEN_METRICS", "on"),
        ("KVLB_API_WITHOUT_TOKEN", "off"),
        ("KVLB_API_TLS_CERT", "/k/c"),
        ("KVLB_API_TLS_KEY", "/k/k"),
        ("KVLB_API_CLIENT_CA", "/k/ca"),
        ("KVLB_TOKENIZER_DIR", "/t"),
        ("KVLB_STATE_DIR", "/s"),
        ("KVLB_DATAPATH", "auto"),
        ("KVLB_XDP_DEV", "eth0,eth1"),
        ("KVLB_PIN_DIR", "/p"),
        ("KVLB_IO", "uring"),
        ("KVLB_THREADS", "7"),
        ("KVLB_CONNECTIONS_MAX", "9"),
        ("KVLB_HEAD_MAX_KIB", "8"),
        ("KVLB_DRAIN_TIMEOUT", "2m"),
        ("KVLB_DECISION_BUDGET_MS", "5"),
        ("KVLB_TEXT_CACHE_MIB", "3"),
        ("KVLB_SCRAPE_INTERVAL", "2"),
        ("KVLB_ACCESS_LOG", "sampled"),
        ("KVLB_ACCESS_LOG_FILE", "/a"),
        ("KVLB_TAKEOVER", "if-running"),
        ("KVLB_TAKEOVER_SOCKET", "/o"),
        ("KVLB_TAKEOVER_WAIT", "7s"),
        ("KVLB_ACCESS_LOG_SAMPLE", "7"),
        ("KVLB_DECISION_LOG", "/d"),
        ("KVLB_TRACE_CONTEXT", "off"),
        ("KVLB_LOG_FORMAT", "json"),
        ("KVLB_LOG_LEVEL", "warn,kvlb::ingest=debug"),
        ("KVLB_ENGINE_KEY", "k"),
        ("KVLB_LISTEN", "10.0.0.1:80"),
        ("KVLB_ENDPOINT", "http://a:8000, b:8000,,a:8000"),
    ])
}

#[test]
fn every_flag_has_a_twin_and_wins_over_it() {
    let env = every_twin();
    let by_env = Config::new(&UpFlags::default(), &env, 2).unwrap();
    assert_eq!((by_env.api.to_string().as_str(), by_env.threads), ("[::1]:1", 7));
    assert_eq!((&by_env.tokenizer_dir, &by_env.pin_dir), (&PathBuf::from("/t"), &PathBuf::from("/p")));
    assert_eq!(by_env.state_dir, Some(PathBuf::from("/s")));
    assert_eq!((by_env.datapath, by_env.io, by_env.log_format), (Datapath::Auto, Io::Uring, LogFormat::Json));
    assert_eq!(by_env.xdp_devices, ["eth0", "eth1"]);
    assert_eq!((by_env.drain_timeout, by_env.kv.decision_budget), (Duration::from_mins(2), Duration::from_millis(5)));
    assert_eq!(by_env.log_level, "warn,kvlb::ingest=debug");
    assert_eq!((by_env.connections_max, by_env.head_max), (Some(9), 8 << 10));
    assert_eq!(by_env.scrape_interval, Some(Duration::from_secs(2)));
    assert_eq!((by_env.engine_key.as_deref(), by_env.text_cache), (Some("k"), 3 << 20));
    assert_eq!(by_env.zero_touch, Some(pool("10.0.0.1:80", &["a:8000", "b:8000"])));
    let seventh = Sampling::OneIn(NonZeroU64::new(7).unwrap());
    assert_eq!(by_env.access_log, AccessLog { sampling: seventh, destination: Destination::File("/a".into()) });
    assert_eq!(by_env.decision_log, Some("/d".into()));
    assert!(!by_env.trace_context);
    let of_takeover = |config: &Config| (config.takeover, config.takeover_socket.clone(), config.takeover_wait);
    assert_eq!(of_takeover(&by_env), (Takeover::IfRunning, Some("/o".into()), Duration::from_secs(7)));
    let access = |dir: &str, open_metrics| {
        let file = |name: &str| PathBuf::from(format!("{dir}/{name}"));
        Access {
            tokens: Some(TokenFiles { admin: file("t"), read: Some(file("r")) }),
            open_metrics,
            tls: Some(Files { cert: file("c"), key: file("k"), client_ca: Some(file("ca")) }),
        }
    };
    assert_eq!(by_env.access, access("/k", true));
    assert!(by_env.warnings.is_empty(), "{:?}", by_env.warnings);

    let text = |text: &str| Some(text.to_owned());
    let flags = UpFlags {
        listen: text("[::]:81"),
        endpoint: vec!["http://c:1/v1".to_owned()],
        engine_key: text("l"),
        api: text("127.0.0.1:2"),
        api_token_file: Some("/l/t".into()),
        api_read_token_file: Some("/l/r".into()),
        api_without_token: false,
        api_open_metrics: true,
        api_tls_cert: Some("/l/c".into()),
        api_tls_key: Some("/l/k".into()),
        api_client_ca: Some("/l/ca".into()),
        tokenizer_dir: Some("/u".into()),
        state_dir: None,
        no_state: true,
        datapath: text("auto"),
        pin_dir: Some("/q".into()),
        xdp_dev: vec!["eth2".to_owned()],
        io: text("epoll"),
        threads: text("1"),
        connections_max: text("10"),
        head_max_kib: text("1024"),
        drain_timeout: text("500ms"),
        takeover: text("required"),
        takeover_socket: Some("/v".into()),
        takeover_wait: text("9ms"),
        decision_budget_ms: text("9"),
        text_cache_mib: text("4"),
        scrape_interval: text("0"),
        access_log: text("full"),
        access_log_file: Some("-".into()),
        access_log_sample: text("8"),
        decision_log: Some("/e".into()),
        trace_context: text("on"),
        log_format: text("text"),
        log_level: text("debug"),
    };
    let by_flag = Config::new(&flags, &env, 2).unwrap();
    assert_eq!(of_takeover(&by_flag), (Takeover::Required, Some("/v".into()), Duration::from_millis(9)));
    assert_eq!((by_flag.connections_max, by_flag.head_max), (Some(10), 1 << 20));
    assert_eq!(by_flag.scrape_interval, None, "never");
    assert_eq!((by_flag.text_cache, by_flag.access), (4 << 20, access("/l", true)));
    assert_eq!((by_flag.api.port(), by_flag.threads, by_flag.state_dir), (2, 1, None));
    assert_eq!((&by_flag.tokenizer_dir, &by_flag.pin_dir), (&PathBuf::from("/u"), &PathBuf::from("/q")));
    assert_eq!((by_flag.datapath, by_flag.io, by_flag.log_format), (Datapath::Auto, Io::Epoll, LogFormat::Text));
    assert_eq!(by_flag.xdp_devices, ["eth2"]);
    assert_eq!(with_env([("KVLB_DATAPATH", "none")]).unwrap().datapath, Datapath::None);
    assert_eq!(
        (by_flag.drain_timeout, by_flag.kv.decision_budget),
        (Duration::from_millis(500), Duration::from_millis(9))
    );
    assert_eq!(by_flag.access_log, AccessLog { sampling: Sampling::Full, destination: Destination::Stdout });
    assert!(by_flag.trace_context && by_flag.warnings.len() == 1, "a sample of all is none: {:?}", by_flag.warnings);
    assert_eq!((by_flag.log_level.as_str(), by_flag.decision_log), ("debug", Some("/e".into())));
    assert_eq!((by_flag.engine_key.as_deref(), by_flag.zero_touch), (Some("l"), Some(pool("[::]:81", &["c:1"]))));
}

#[test]
fn an_api_that_others_reach_needs_a_token_unless_it_is_said_that_it_does_not() {
    let with = |api: &str, change: fn(&mut UpFlags)| {
        let mut flags = UpFlags { api: Some(api.to_owned()), ..UpFlags::default() };
        change(&mut flags);
        Config::new(&flags, &Env::default(), 2).map(|config| config.access)
    };
    for api in ["127.0.0.1:11111", "127.9.8.7:1", "[::1]:11111", "[::ffff:127.0.0.1]:11111"] {
        assert_eq!(with(api, |_| {}), Ok(Access::default()), "{api}");
    }
    for api in [
        "0.0.0.0:11111",
        "[::]:11111",
        "192.0.2.1:11111",
        "[2001:db8::1]:11111",
        "[::ffff:192.0.2.1]:1",
        "[::ffff:0.0.0.0]:1",
    ] {
        let error = with(api, |_| {}).unwrap_err();
        assert_eq!(error, ConfigError::Unguarded { name: "--api", address: api.parse().unwrap() });
        let text = error.to_string();
        for part in ["--api-token-file", "127.0.0.1:", "--api-without-token", "[api_unguarded]", api] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let token = with(api, |flags| flags.api_token_file = Some("/t".into())).unwrap();
        assert_eq!(token.tokens, Some(TokenFiles { admin: "/t".into(), read: None }), "{api}");
        assert_eq!(with(api, |flags| flags.api_without_token = true), Ok(Access::default()), "{api}");
    }
    let error = Config::new(&UpFlags::default(), &Env::of([("KVLB_API", "[::]:5")]), 2).unwrap_err().to_string();
    assert!(error.starts_with("KVLB_API [::]:5 can be reached"), "{error}");
}

#[test]
fn half_of_a_guard_is_refused() {
    type Change = fn(&mut UpFlags);
    let cases: [(Change, &str); 6] = [
        (|f| f.api_read_token_file = Some("/r".into()), "--api-read-token-file needs --api-token-file too"),
        (|f| f.api_tls_cert = Some("/c".into()), "--api-tls-cert needs --api-tls-key too"),
        (|f| f.api_tls_key = Some("/k".into()), "--api-tls-key needs --api-tls-cert too"),
        (|f| f.api_client_ca = Some("/a".into()), "--api-client-ca needs --api-tls-cert too"),
        (
            |f| (f.api_tls_key, f.api_client_ca) = (Some("/k".into()), Some("/a".into())),
            "--api-tls-key needs --api-tls-cert too",
        ),
        (
            |f| (f.api_token_file, f.api_without_token) = (Some("/t".into()), true),
            "--api-token-file and --api-without-token contradict each other",
        ),
    ];
    for (change, expected) in cases {
        let mut flags = UpFlags::default();
        change(&mut flags);
        let error = Config::new(&flags, &Env::default(), 2).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_client_shows_one_token_and_a_flag_wins_over_variables() {
    let hidden = |text: &str| Some(Credential::Token(Hidden::from(text)));
    let read = |flags: ClientFlags, env: &[(&str, &str)]| {
        Client::new(&flags, &Env::of(env.iter().copied())).map(|client| client.credential)
    };
    let none = ClientFlags::default;
    let token = || ClientFlags { token: Some(Hidden::from("flag")), ..none() };
    let file = || ClientFlags { token_file: Some("/flag".into()), ..none() };
    let both = [("KVLB_TOKEN", "variable"), ("KVLB_TOKEN_FILE", "/variable")];
    assert_eq!(read(none(), &[]), Ok(None));
    assert_eq!(read(none(), &both[..1]), Ok(hidden("variable")));
    assert_eq!(read(none(), &both[1..]), Ok(Some(Credential::File("/variable".into()))));
    assert_eq!(read(token(), &both), Ok(hidden("flag")));
    assert_eq!(read(file(), &both), Ok(Some(Credential::File("/flag".into()))));
    assert_eq!(read(none(), &both), Err(ConfigError::Both("KVLB_TOKEN", "KVLB_TOKEN_FILE")));
    let two = ClientFlags { token_file: Some("/flag".into()), ..token() };
    assert_eq!(read(two, &[]), Err(ConfigError::Both("--token", "--token-file")));
    let shown = format!("{:?} {:?}", token(), Client::new(&token(), &Env::default()));
    assert!(shown.contains("hidden") && !shown.contains("\"flag\""), "{shown}");
}

#[test]
fn who_speaks_https_says_whom_to_trust_and_who_does_not_has_no_use_for_it() {
    let https = || ClientFlags { protocol: Some("https".to_owned()), ..ClientFlags::default() };
    let trust = |flags: &ClientFlags, env: &[(&str, &str)]| Client::new(flags, &Env::of(env.iter().copied()));
    let client = trust(&https(), &[]).unwrap();
    assert_eq!((client.url.as_str(), client.trust), ("https://127.0.0.1:11111", Some(Trust::default())));
    let by_env = trust(
        &ClientFlags::default(),
        &[("KVLB_PROTOCOL", "https"), ("KVLB_CACERT", "/a"), ("KVLB_CERT", "/c"), ("KVLB_KEY", "/k")],
    );
    let own = Some((PathBuf::from("/c"), PathBuf::from("/k")));
    assert_eq!(by_env.unwrap().trust, Some(Trust { ca: Some("/a".into()), blindly: false, own }));
    let blind = trust(&https(), &[("KVLB_INSECURE", "1")]).unwrap();
    assert_eq!(blind.trust, Some(Trust { blindly: true, ..Trust::default() }));
    // Variables may be meant for other calls; flags are meant for this one.
    assert_eq!(trust(&ClientFlags::default(), &[("KVLB_CACERT", "/a")]).unwrap().trust, None);
    for (flags, expected) in [
        (ClientFlags { cacert: Some("/a".into()), ..ClientFlags::default() }, "--cacert needs --protocol https too"),
        (ClientFlags { insecure: true, ..ClientFlags::default() }, "--insecure needs --protocol https too"),
        (ClientFlags { cert: Some("/c".into()), ..https() }, "--cert needs --key too"),
        (ClientFlags { key: Some("/k".into()), ..https() }, "--key needs --cert too"),
        (
            ClientFlags { insecure: true, cacert: Some("/a".into()), ..https() },
            "--insecure and --cacert contradict each other",
        ),
    ] {
        assert_eq!(trust(&flags, &[]).unwrap_err().to_string(), expected);
    }
}

fn pool(listen: &str, endpoints: &[&str]) -> ZeroTouch {
    let endpoints = endpoints.iter().map(|text| crate::discover::place(text).unwrap()).collect();
    ZeroTouch { listen: listen.parse().unwrap(), endpoints }
}

#[test]
fn a_pool_without_a_body_needs_both_of_its_flags() {
    let error = |listen: Option<&str>, endpoints: &[&str]| {
        let flags = UpFlags {
            listen: listen.map(str::to_owned),
            endpoint: endpoints.iter().map(|&text| text.to_owned()).collect(),
            ..UpFlags::default()
        };
        Config::new(&flags, &Env::default(), 2).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(error(Some("127.0.0.1:80"), &[]), Err("--listen needs --endpoint too".to_owned()));
    assert_eq!(error(None, &["a:1"]), Err("--endpoint needs --listen too".to_owned()));
    assert!(error(Some("80"), &["a:1"]).is_err_and(|text| text.starts_with("--listen is \"80\"; allowed: an address")));
    assert!(error(Some("127.0.0.1:0"), &["a:1"]).is_err());
    assert!(error(Some("127.0.0.1:80"), &["https://a:1"]).is_err_and(|text| text.contains("plain http only")));
    assert!(error(Some("127.0.0.1:80"), &["a b"]).is_err_and(|text| text.contains("http://HOST:PORT")));
}

#[test]
fn a_state_directory_by_flag_wins_over_no_state_by_variable() {
    let env = Env::of([("KVLB_NO_STATE", "1")]);
    assert_eq!(Config::new(&UpFlags::default(), &env, 2).map(|c| c.state_dir), Ok(None));
    let flags = UpFlags { state_dir: Some("/s".into()), ..UpFlags::default() };
    assert_eq!(Config::new(&flags, &env, 2).map(|c| c.state_dir), Ok(Some("/s".into())));
    let both = UpFlags { no_state: true, ..flags };
    assert!(matches!(Config::new(&both, &env, 2), Err(ConfigError::Both(..))));
}

#[test]
fn the_documents_variables_have_their_effect() {
    let config = with_env([
        ("LLB_KV_NONE_HASH_SEED", "0"),
        ("LLB_KV_HASH_DEBUG", "1"),
        ("LLB_KV_MIN_MATCH_TOKENS", "0"),
        ("LOXILB_KV_LB_MODE", "off"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "120"),
        ("LOXILB_KV_LOAD_PENALTY", "1000"),
        ("LOXILB_KV_CAP_SUM_MILLI", "7642155"),
        ("LOXILB_KV_SPILL_RELIEF", "no"),
        ("LOXILB_KV_MAX_BLOCKS", "1000"),
        ("LLB_KV_REPLAY_PORT_OFFSET", "0"),
        ("LOXILB_KV_COLDSTART_SEED_N", "0"),
        ("LOXILB_KV_COLDSTART_MIN_BLOCKS", "0"),
        ("LLB_PD_PREFILL_TIMEOUT_SEC", "180"),
    ])
    .unwrap();
    let kv = &config.kv;
    assert_eq!((&kv.none_seed, kv.hash_debug, kv.min_match_tokens), (&NoneSeed::Text("0".to_owned()), true, 0));
    assert_eq!((kv.settings.blend, kv.settings.mean_load_factor), (Blend::Off, 120));
    assert_eq!((kv.relief, kv.max_blocks, kv.replay_offset), (Relief::Off, Some(1000), None));
    let settings = &kv.settings;
    assert_eq!((settings.load_penalty, settings.cap_sum_milli), (1_000, Some(7_642_155)));
    assert_eq!((settings.seed_every, settings.seed_min_blocks), (0, 1));
    assert_eq!(config.prefill_timeout, Duration::from_mins(3));
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn the_seed_is_text_and_empty_is_not_unset() {
    let seed = |text| with_env([("LLB_KV_NONE_HASH_SEED", text)]).map(|config| config.kv.none_seed);
    for text in ["", "0", "00", "random", " 0"] {
        assert_eq!(seed(text), Ok(NoneSeed::Text(text.to_owned())));
    }
    let warnings = with_env([("LLB_KV_NONE_HASH_SEED", "abc")]).unwrap().warnings;
    assert!(warnings[0].contains("LLB_KV_NONE_HASH_SEED is \"abc\""));
}

#[test]
fn a_bad_value_is_refused_by_name_with_what_is_allowed() {
    for (name, value, allowed) in [
        ("KVLB_API", "11111", "127.0.0.1:11111"),
        ("KVLB_API", "localhost:11111", "127.0.0.1:11111"),
        ("KVLB_API", "127.0.0.1:70000", "127.0.0.1:11111"),
        ("KVLB_DATAPATH", "xdp", "auto, none"),
        ("KVLB_IO", "io_uring", "auto, uring, epoll"),
        ("KVLB_THREADS", "0", "1 to 1024"),
        ("KVLB_THREADS", "two", "1 to 1024"),
        ("KVLB_THREADS", "-1", "1 to 1024"),
        ("KVLB_CONNECTIONS_MAX", "0", "1 to 4294967295"),
        ("KVLB_HEAD_MAX_KIB", "3", "4 to 1024"),
        ("KVLB_DRAIN_TIMEOUT", "30 seconds", "500ms"),
        ("KVLB_DRAIN_TIMEOUT", "25h", "0 to 24h"),
        ("KVLB_DRAIN_TIMEOUT", "99999999999999999999s", "0 to 24h"),
        ("KVLB_DRAIN_TIMEOUT", "-1", "0 to 24h"),
        ("KVLB_DECISION_BUDGET_MS", "0", "1 to 10000"),
        ("KVLB_LOG_FORMAT", "xml", "text, json"),
        ("KVLB_LOG_LEVEL", "loud", "debug"),
        ("KVLB_LOG_LEVEL", "kvlb=", "debug"),
        ("KVLB_NO_STATE", "maybe", "true"),
        ("LLB_KV_HASH_DEBUG", "2", "1, true"),
        ("LLB_KV_MIN_MATCH_TOKENS", "4097", "0 to 4096"),
        ("LLB_KV_MIN_MATCH_TOKENS", "-1", "0 to 4096"),
        ("LOXILB_KV_LB_MODE", "hardest", "off, hard"),
        ("LOXILB_KV_LOAD_PENALTY", "0", "1 to 100000"),
        ("LOXILB_KV_CAP_SUM_MILLI", "1910538", "1910539 to 122274480"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "99", "100 to 1000"),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "1001", "100 to 1000"),
        ("LOXILB_KV_SPILL_RELIEF", "sometimes", "auto"),
        ("LOXILB_KV_MAX_BLOCKS", "999", "1000 to 100000000"),
        ("LOXILB_KV_MAX_BLOCKS", "100000001", "1000 to 100000000"),
        ("LLB_KV_REPLAY_PORT_OFFSET", "65535", "0 to 65534"),
        ("LOXILB_KV_COLDSTART_SEED_N", "x", "0 to 1000000"),
        ("LOXILB_KV_COLDSTART_MIN_BLOCKS", "1.5", "0 to 100000000"),
        ("LLB_PD_PREFILL_TIMEOUT_SEC", "0", "1 to 86400"),
    ] {
        let error = with_env([(name, value)]).map_err(|error| error.to_string());
        let named =
            |text: &String| text.starts_with(&format!("{name} is {value:?}; allowed: ")) && text.contains(allowed);
        assert!(error.as_ref().is_err_and(named), "{name}={value}: {error:?}");
    }
    let flags = UpFlags { threads: Some("0".to_owned()), ..UpFlags::default() };
    let error = Config::new(&flags, &Env::of([("KVLB_THREADS", "4")]), 2).map_err(|error| error.to_string());
    assert_eq!(error, Err("--threads is \"0\"; allowed: 1 to 1024".to_owned()));
}

#[test]
fn an_empty_variable_is_an_unset_one_except_the_seed() {
    let config = with_env([("KVLB_IO", ""), ("KVLB_THREADS", ""), ("LOXILB_KV_LB_MODE", ""), ("KVLB_NO_STATE", "")]);
    assert_eq!(config, with_env([]));
}

#[test]
fn misspelt_and_unserved_variables_are_told() {
    let warnings = with_env([
        ("KVLB_THREDS", "3"),
        ("LLB_KV_NON_HASH_SEED", "0"),
        ("LLB_KV_LOADGUARD", "1"),
        ("KVLB_PORT", "tcp://10.0.0.1:80"),
        ("KVLB_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("KVLB_SERVICE_HOST", "10.0.0.1"),
        ("LLB_HOME", "/"),
        ("PATH", "/bin"),
    ])
    .unwrap()
    .warnings;
    assert_eq!(
        warnings,
        [
            "LLB_KV_LOADGUARD has no effect: the load bound of LOXILB_KV_LB_MODE=hard does its work",
            "KVLB_THREDS is no variable of kvlb; did you mean KVLB_THREADS?",
            "LLB_KV_NON_HASH_SEED is no variable of kvlb; did you mean LLB_KV_NONE_HASH_SEED?",
        ]
    );
}

#[test]
fn a_client_reaches_the_api_where_flags_and_variables_say() {
    let url = |flags: &ClientFlags, env: &[(&'static str, &'static str)]| {
        Client::new(flags, &Env::of(env.iter().copied())).map(|client| client.url).map_err(|error| error.to_string())
    };
    let server = |host: &str| ClientFlags { apiserver: Some(host.to_owned()), ..ClientFlags::default() };
    assert_eq!(url(&ClientFlags::default(), &[]), Ok("http://127.0.0.1:11111".to_owned()));
    assert_eq!(url(&server("lb.example"), &[]), Ok("http://lb.example:11111".to_owned()));
    assert_eq!(url(&server("::1"), &[]), Ok("http://[::1]:11111".to_owned()));
    assert_eq!(url(&server("[::1]"), &[("KVLB_APIPORT", "9")]), Ok("http://[::1]:9".to_owned()));
    assert_eq!(url(&ClientFlags::default(), &[("KVLB_APISERVER", "10.0.0.1")]), Ok("http://10.0.0.1:11111".to_owned()));
    // Set by Kubernetes beside a service named kvlb, and not meant for us.
    assert_eq!(url(&ClientFlags::default(), &[("KVLB_PORT", "tcp://1.1.1.1:80")]), url(&ClientFlags::default(), &[]));
    assert!(url(&server("10.0.0.1:11111"), &[]).is_err_and(|text| text.contains("--port")));
    assert!(url(&server(""), &[]).is_err());
    let port = ClientFlags { port: Some("0".to_owned()), ..ClientFlags::default() };
    assert!(url(&port, &[]).is_err_and(|text| text == "--port is \"0\"; allowed: 1 to 65535"));
    let tls = ClientFlags { protocol: Some("https".to_owned()), ..ClientFlags::default() };
    assert_eq!(url(&tls, &[]), Ok("https://127.0.0.1:11111".to_owned()));
}
