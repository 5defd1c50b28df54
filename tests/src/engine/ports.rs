//! The ports of one life: which are taken, free ones where nothing is said, and the same again in the next life.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::sync::watch;

use super::Addresses;
use super::gate::Gate;
use super::handoff::KvConnector;
use super::life::Inherited;

/// LoxiLB's rule for the replay port where nothing says otherwise.
const REPLAY_PORT_OFFSET: u16 = 1000;

/// Tries to find free ports whose neighbours are free too.
const PORT_TRIES: usize = 64;

/// The listening sockets of one life.
#[derive(Debug)]
pub(super) struct Gates {
    pub(super) http: Gate,
    pub(super) ranks: Vec<RankGates>,
    /// Mooncake's bootstrap.
    pub(super) bootstrap: Option<Gate>,
}

/// Those of one rank.
#[derive(Debug)]
pub(super) struct RankGates {
    pub(super) events: Option<Gate>,
    pub(super) replay: Option<Gate>,
    pub(super) side_channel: Option<Gate>,
}

impl Gates {
    pub(super) fn first(inherited: &Inherited) -> anyhow::Result<Self> {
        let config = &inherited.config;
        let at = |port| SocketAddr::new(config.host, port);
        let http = Gate::bind(at(config.http_port), inherited.faults.http_gate())
            .with_context(|| format!("listen for HTTP on {}", at(config.http_port)))?;
        let bootstrap = SocketAddr::new(config.side_channel_host(), config.kv_bootstrap_port);
        let bootstrap = config.has_bootstrap().then(|| {
            Gate::bind(bootstrap, inherited.faults.side_channel_gate())
                .with_context(|| format!("listen for Mooncake's bootstrap on {bootstrap}"))
        });
        Ok(Self { http, ranks: RankGates::first(inherited)?, bootstrap: bootstrap.transpose()? })
    }

    pub(super) fn again(inherited: &Inherited, addresses: Addresses) -> anyhow::Result<Self> {
        let http = listen_again(addresses.http, inherited.faults.http_gate())?;
        let ranks = 0..usize::from(inherited.config.data_parallel_size);
        let ranks = ranks.map(|number| RankGates::again(inherited, addresses, number));
        let bootstrap = addresses.bootstrap.map(|address| listen_again(address, inherited.faults.side_channel_gate()));
        Ok(Self { http, ranks: ranks.collect::<anyhow::Result<_>>()?, bootstrap: bootstrap.transpose()? })
    }

    pub(super) fn addresses(&self) -> Addresses {
        let of_first = |gate: fn(&RankGates) -> Option<&Gate>| self.ranks.first().and_then(gate).map(Gate::address);
        Addresses {
            http: self.http.address(),
            events: of_first(|gates| gates.events.as_ref()),
            replay: of_first(|gates| gates.replay.as_ref()),
            side_channel: of_first(|gates| gates.side_channel.as_ref()),
            bootstrap: self.bootstrap.as_ref().map(Gate::address),
        }
    }
}

impl RankGates {
    /// Those of all ranks; where the first port is free to choose, the next ones must be free too.
    fn first(inherited: &Inherited) -> anyhow::Result<Vec<Self>> {
        let config = &inherited.config;
        let events = tried(config.events_port, || Self::first_events(inherited))?;
        let side_channels = tried(config.kv_side_channel_port, || Self::first_side_channels(inherited))?;
        let pairs = events.into_iter().zip(side_channels);
        Ok(pairs.map(|((events, replay), side_channel)| Self { events, replay, side_channel }).collect())
    }

    fn first_side_channels(inherited: &Inherited) -> anyhow::Result<Vec<Option<Gate>>> {
        let config = &inherited.config;
        let mut first = config.kv_side_channel_port;
        let gate = |rank| {
            if config.kv_connector == KvConnector::None {
                return Ok(None);
            }
            let address = SocketAddr::new(config.side_channel_host(), nth_port(first, rank)?);
            let gate = Gate::bind(address, inherited.faults.side_channel_gate())
                .with_context(|| format!("open the side channel on {address}"))?;
            first = gate.address().port() - rank;
            Ok(Some(gate))
        };
        (0..config.data_parallel_size).map(gate).collect()
    }

    /// Events and replay.
    fn first_events(inherited: &Inherited) -> anyhow::Result<Vec<(Option<Gate>, Option<Gate>)>> {
        let (config, faults) = (&inherited.config, &inherited.faults);
        let ranks = config.data_parallel_size;
        if config.no_events {
            return Ok((0..ranks).map(|_| (None, None)).collect());
        }
        let at = |port| SocketAddr::new(config.host, port);
        let listen = |port, open, what: &str| {
            Gate::bind(at(port), open).with_context(|| format!("listen for {what} on {}", at(port)))
        };
        let events = listen(config.events_port, faults.events_gate(), "subscribers")?;
        let events_port = events.address().port();
        let replay_port = match (config.no_replay, config.replay_port) {
            (true, _) => None,
            (false, Some(port)) => Some(port),
            (false, None) => {
                Some(events_port.checked_add(REPLAY_PORT_OFFSET).context("the event port + 1000 is no port")?)
            }
        };
        let replay = |port| listen(port, faults.replay_gate(), "replay requests");
        let replay_gate = replay_port.map(replay).transpose()?;
        let replay_port = replay_gate.as_ref().map(|gate| gate.address().port());
        let mut gates = vec![(Some(events), replay_gate)];
        for rank in 1..ranks {
            let events = listen(nth_port(events_port, rank)?, faults.events_gate(), "subscribers")?;
            let replay = replay_port.map(|port| nth_port(port, rank).and_then(replay)).transpose()?;
            gates.push((Some(events), replay));
        }
        Ok(gates)
    }

    pub(super) fn again(inherited: &Inherited, addresses: Addresses, rank: usize) -> anyhow::Result<Self> {
        let faults = &inherited.faults;
        let gate = |address: Option<SocketAddr>, open| {
            let Some(first) = address else { return Ok(None) };
            let port = nth_port(first.port(), u16::try_from(rank).context("the rank is no port offset")?)?;
            listen_again(SocketAddr::new(first.ip(), port), open).map(Some)
        };
        Ok(Self {
            events: gate(addresses.events, faults.events_gate())?,
            replay: gate(addresses.replay, faults.replay_gate())?,
            side_channel: gate(addresses.side_channel, faults.side_channel_gate())?,
        })
    }
}

/// How often, and how far apart, a port is asked for that belonged to the last life.
const AGAIN_TRIES: u32 = 100;
const AGAIN_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// Ports that begin with `first`: where that is free to choose, a neighbour that is taken is no end.
fn tried<T>(first: u16, mut ports: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let tries = if first == 0 { PORT_TRIES } else { 1 };
    for _ in 1..tries {
        if let Ok(ports) = ports() {
            return Ok(ports);
        }
    }
    ports()
}

/// The port of a rank whose first is `port`.
fn nth_port(port: u16, rank: u16) -> anyhow::Result<u16> {
    port.checked_add(rank).context("the ports of all ranks do not fit")
}

/// On a busy machine the last life's listener may still be closing.
fn listen_again(address: SocketAddr, open: watch::Receiver<bool>) -> anyhow::Result<Gate> {
    for _ in 1..AGAIN_TRIES {
        match Gate::bind(address, open.clone()) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => std::thread::sleep(AGAIN_PAUSE),
            bound => return bound.with_context(|| format!("listen again on {address}")),
        }
    }
    Gate::bind(address, open).with_context(|| format!("listen again on {address}"))
}
