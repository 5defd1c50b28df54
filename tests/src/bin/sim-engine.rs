//! One simulated engine in a process of its own.
//!
//! Prints one JSON line with its addresses when it is ready, and ends on SIGTERM or SIGINT after answering what is under way.

use std::io::Write as _;

use anyhow::Context as _;
use clap::Parser;
use kvlb_tests::engine::{Engine, EngineConfig};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// A simulated vLLM: OpenAI HTTP, a real block pool, KV events over ZeroMQ, and faults through POST /debug/fault.
#[derive(Debug, Parser)]
#[command(about)]
struct Flags {
    #[command(flatten)]
    engine: EngineConfig,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let mut terminate = signal(SignalKind::terminate()).context("watch for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch for SIGINT")?;
    let mut engine = Engine::start(Flags::parse().engine).await.context("start the engine")?;
    announce(&engine).context("print the addresses")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    engine.stop().await;
    Ok(())
}

fn announce(engine: &Engine) -> std::io::Result<()> {
    let addresses = engine.addresses();
    let port = |address: Option<std::net::SocketAddr>| address.map(|address| address.port());
    let line = json!({
        "name": engine.name(), "host": addresses.http.ip(), "http_port": addresses.http.port(),
        "events_port": port(addresses.events), "replay_port": port(addresses.replay),
        "side_channel_port": port(addresses.side_channel), "bootstrap_port": port(addresses.bootstrap), "engine_id": engine.engine_id(0),
        "pid": std::process::id(),
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
