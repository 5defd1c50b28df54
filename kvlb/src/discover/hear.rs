//! What an engine announces, listened to for a while.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::preflight::{Heard, Ours, Socket};
use crate::clock;
use crate::contract::Rehash;
use crate::contract::attest::{Contract, Leg};
use crate::fleet::{EndpointKey, Keying};
use crate::ingest::{self, ReplayPort, Subscription};
use crate::state::index::{Index, IndexConfig};
use crate::state::kv::{EndpointKv, Naming, ReplayState};

/// How often what was heard is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// After a replay has ended without a verdict, live events get this long.
const AFTER_REPLAY: Duration = Duration::from_millis(500);
/// A port that takes longer to connect to is as good as closed.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Names kept of one engine while it is listened to: the verdict needs the first few only.
const NAMES_MAX: usize = 10_000;

/// Listens to an engine's events, its replay first, until they tell whether its names are ours, for `limit` at most.
pub async fn hear(place: &EndpointKey, ours: &Ours, limit: Duration) -> Heard {
    let index = Index::new(IndexConfig { max_blocks: Some(NAMES_MAX), ..IndexConfig::default() });
    // Whether names agree is what is asked, so they stay as the engine gives them.
    let naming = Naming {
        algo: ours.algo,
        seed: ours.seed.clone(),
        block_size: ours.block_size,
        keying: Keying::Parity,
        rehash: Rehash::new(0),
    };
    let kv = Arc::new(EndpointKv::new(Arc::new(index), &naming));
    let (_port, replay) = watch::channel(ours.replay_port.map_or(ReplayPort::Off, ReplayPort::Port));
    let subscription = Subscription {
        feed: 0,
        label: place.to_string(),
        host: place.host.clone(),
        port: ours.zmq_port,
        replay,
        http: Some(place.to_string()),
    };
    let (_never, stop) = watch::channel(false);
    let verdict = async {
        let began = clock::now();
        let mut settled = None;
        while clock::now().duration_since(began) < limit {
            let status = kv.status(clock::now());
            let told = *status.contract != Contract::Unverified && !is_vague(&status.contract);
            let replayed = matches!(status.replay, ReplayState::Applied | ReplayState::Unavailable | ReplayState::Off);
            if status.connected && replayed {
                settled.get_or_insert_with(clock::now);
            }
            let waited = settled.is_some_and(|since| clock::now().duration_since(since) >= AFTER_REPLAY);
            if (told && replayed) || waited {
                break;
            }
            sleep(LOOK_EVERY).await;
        }
    };
    tokio::select! {
        () = ingest::follow(subscription, Arc::clone(&kv), stop) => {}
        () = verdict => {}
    }
    heard(&kv, place, ours.zmq_port).await
}

/// A mismatch that the engine's label may yet explain.
fn is_vague(contract: &Contract) -> bool {
    contract.leg() == Some(Leg::Unknown)
}

/// What is known of an engine's announcements now.
pub async fn heard(kv: &EndpointKv, place: &EndpointKey, port: u16) -> Heard {
    let status = kv.status(clock::now());
    let socket = if status.connected { Socket::Open } else { Socket::Closed(why_closed(place, port).await) };
    let contract = Contract::clone(&status.contract);
    Heard { socket, replay: status.replay, blocks: status.blocks as u64, contract }
}

async fn why_closed(place: &EndpointKey, port: u16) -> String {
    let connected = tokio::net::TcpStream::connect((place.host.as_str(), port));
    match timeout(CONNECT_TIMEOUT, connected).await {
        Ok(Ok(_stream)) => "something listens there, and does not publish events".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_late) => format!("no answer within {} ms", CONNECT_TIMEOUT.as_millis()),
    }
}
