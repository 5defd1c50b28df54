//! Rules for tests.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::{
    BlendRule, BreakerRule, Endpoint, EndpointKey, EngineType, ExactMode, Keying, KvRule, Limits, Mode, Monitor,
    Pinning, PortRange, Role, Rule, RuleId, RuleKey, Score, Selector, TierWeights,
};
use crate::contract::{BlockSize, HashAlgo};

/// A single-pool rule on 10.10.10.254:8080 with no endpoints.
pub(crate) fn rule() -> Rule {
    Rule {
        id: RuleId(1),
        key: RuleKey {
            vip: IpAddr::V4(Ipv4Addr::new(10, 10, 10, 254)),
            ports: PortRange::single(8080),
            host: String::new(),
            path_prefix: String::new(),
            model: None,
        },
        name: String::new(),
        selector: Selector::RoundRobin,
        mode: Mode::FullProxy,
        endpoints: Vec::new(),
        monitor: Monitor::default(),
        kv: KvRule {
            mode: ExactMode::SinglePool,
            engine: EngineType::Vllm,
            block_size: BlockSize::new(16).expect("16 is not zero"),
            algo: HashAlgo::Sha256Cbor,
            zmq_port: 5557,
            replay_port: None,
            warmup: Duration::from_secs(30),
            dp_ranks: None,
            keying: Keying::Auto,
            tier_weights: TierWeights::default(),
            observe: false,
            score: Score::Prefix,
            blend: BlendRule::default(),
        },
        pinning: Pinning::default(),
        allowed_sources: Vec::new(),
        syn: None,
        no_endpoint: crate::fleet::NoEndpoint::Proxy,
        decision_headers: false,
        max_inspect_bytes: 32 << 20,
        connections_max: None,
        forwarded_headers: true,
        client_half_close: false,
        hash_load_factor: 125,
        limits: Limits::default(),
        breaker: Some(BreakerRule::default()),
        admission: None,
        split: crate::fleet::SplitRule::default(),
        admin_down: false,
    }
}

/// An endpoint on a documentation address.
pub(crate) fn endpoint(last_octet: u8, role: Role) -> Endpoint {
    Endpoint {
        key: EndpointKey { host: format!("192.0.2.{last_octet}"), port: 8000 },
        weight: 1,
        role,
        admin_down: false,
        monitor: None,
        zmq_port: None,
        replay_port: None,
    }
}
