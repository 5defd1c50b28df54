//! The list of parts, in the order in which they start and stop.

mod crew;
mod desk;
mod keys;
mod learn;
mod listen;
mod live;
mod meter;
mod steer;
mod watch;
mod zero;

use std::hash::{BuildHasher as _, RandomState};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::config::{Config, Datapath};
use crate::control::{self, About, Api, Store};
use crate::discover::Asker;
use crate::kernel::Kernel;
use crate::proxy::{self, Proxy};
use crate::state::{self, State};
use crate::telemetry::access::{AccessLog, Destination, Sampling, Writer};
use crate::telemetry::{Metrics, init_logs};
use crate::{clock, probe, staging};

use desk::Desk;
use keys::Keys;
use live::LiveState;
use meter::ProxyMeter;
use zero::Zero;

/// Threads of the control side; the data side has its own.
const CONTROL_THREADS: usize = 2;
/// Time that the control side gets to end once the data side has.
const CONTROL_STOP: Duration = Duration::from_secs(2);

/// A change of the rules is answered when its VIPs take connections, or after this: writing a thousand VIPs to the kernel
/// takes milliseconds.
const IN_FORCE: Duration = Duration::from_secs(2);

/// Runs the daemon until it is told to stop.
pub fn up(config: Config) -> ExitCode {
    if let Err(error) = init_logs(config.log_format, &config.log_level) {
        return complain(&anyhow::anyhow!("set up logging: {error}"));
    }
    match run(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&error),
    }
}

/// Ends the process where the daemon does not start: the CLI's code for what has none of its own.
const FAILED: u8 = 7;

#[expect(clippy::print_stderr, reason = "why the daemon did not start belongs on the terminal, whatever the log level")]
fn complain(error: &anyhow::Error) -> ExitCode {
    eprintln!("kvlb: {error:#}");
    ExitCode::from(FAILED)
}

fn run(config: Config) -> Result<()> {
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    if let Err(error) = proxy::raise_descriptor_limit() {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("kvlb-control")
        .enable_all()
        .build()
        .context("start the control threads")?;
    let metrics = Arc::new(Metrics::new().context("register the metrics")?);
    let keys = Keys::read(&config.access, &metrics)?;
    let state = Arc::new(State::new(state_config(&config), Arc::clone(&metrics)));
    keys.warn(&config, &state);
    let store = open_store(&config, &state)?;
    let zero = config.zero_touch.clone().and_then(|pool| Zero::begin(pool, Arc::clone(&store)));
    let kernel = load_kernel(&config, &state, &runtime)?;
    let (log, writer) = open_access_log(&config, &metrics)?.unzip();
    let proxy = start_proxy(&config, &state, log.clone())?;
    let listener = runtime
        .block_on(TcpListener::bind(config.api))
        .with_context(|| format!("listen on the API address {}; --api names another", config.api))?;
    let about = About {
        datapath: if kernel.is_some() { "sk_lookup" } else { "none" }.to_owned(),
        datapath_detail: state
            .degraded()
            .into_iter()
            .find(|(what, _)| *what == "datapath")
            .map(|d| d.1)
            .unwrap_or_default(),
        io: proxy.engine().label().to_owned(),
        threads: proxy.threads(),
        api: listener.local_addr().context("read the API's address")?,
        tls: keys.tls.is_some(),
        tokens: keys.word(),
        state_dir: config.state_dir.clone(),
    };
    announce(&about, &metrics, writes_to_stdout(&config));
    let (stop_api, api_stopped) = oneshot::channel::<()>();
    let asker = learn::asker(config.engine_key.as_ref()).context("make a client for the engines")?;
    let prober = probe::Asker::new(config.engine_key.as_deref()).context("make a client for probes")?;
    let live = Arc::new(LiveState::new(Arc::clone(&state), kernel.as_ref(), asker.clone(), config.kv.replay_offset));
    let api = Api::new(live, about);
    api.ready(store);
    let parts = Parts { config, state, keys, asker, prober, zero, kernel, proxy: Arc::new(proxy), log };
    runtime.block_on(parts.serve(listener, api, api_stopped, stop_api))?;
    runtime.shutdown_timeout(CONTROL_STOP);
    if let Some(writer) = writer {
        writer.finish(CONTROL_STOP);
    }
    tracing::info!("stopped");
    Ok(())
}

/// What runs, once it does.
struct Parts {
    config: Config,
    state: Arc<State>,
    keys: Keys,
    asker: Asker,
    prober: probe::Asker,
    zero: Option<Zero>,
    kernel: Option<Arc<Mutex<Kernel>>>,
    proxy: Arc<Proxy>,
    log: Option<AccessLog>,
}

impl Parts {
    async fn serve(
        self,
        listener: TcpListener,
        api: Arc<Api>,
        api_stopped: oneshot::Receiver<()>,
        stop_api: oneshot::Sender<()>,
    ) -> Result<()> {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut tasks = JoinSet::new();
        let Self { config, state, keys, asker, prober, zero, kernel, proxy, log } = self;
        tasks.spawn(staging::keep_loaded(config.tokenizer_dir.clone(), Arc::clone(&state)));
        tasks.spawn(watch::keep_watching(Arc::clone(&state), prober, config.kv.replay_offset));
        if let Some(zero) = zero {
            tasks.spawn(zero.follow(Arc::clone(&state), asker.clone()));
        }
        if let Some(log) = log.filter(|_| !writes_to_stdout(&config)) {
            tasks.spawn(reopen_on_hangup(log, signal(SignalKind::hangup())?));
        }
        tasks.spawn(learn::keep_learning(Arc::clone(&state), asker));
        // A datapath is on its way: whoever writes a rule from now on waits for it.
        state.datapath_serves(Some(0));
        match &kernel {
            Some(kernel) => {
                let program_log = kernel.lock().take_log();
                if let Some(log) = program_log {
                    tasks.spawn(log.drain());
                }
                listen::behind_kernel(kernel, &proxy).context("give the listeners to the kernel")?;
                tasks.spawn(steer::keep_steering(Arc::clone(kernel), Arc::clone(&state), config.drain_timeout));
            }
            None => {
                tasks.spawn(listen::keep_bound(Arc::clone(&proxy), Arc::clone(&state)));
            }
        }
        // The API answers, and the log says ready, when the rules that are there already are served.
        let first = Arc::clone(&state);
        let served = tokio::task::spawn_blocking(move || first.wait_for_datapath(IN_FORCE)).await;
        if !served.unwrap_or(false) {
            tracing::warn!("the datapath does not serve all rules yet");
        }
        let stop = async move {
            // A dropped sender means the same: stop.
            let _asked_or_gone = api_stopped.await;
        };
        let api = tokio::spawn(control::serve(listener, api, Arc::clone(&keys.guard), keys.tls.clone(), stop));
        let fresh = keys.keep_fresh(Arc::clone(&state));
        tasks.spawn(async move {
            if let Err(error) = fresh.await {
                tracing::error!(error = format!("{error:#}"), "the API's tokens and certificate are not read again");
            }
        });
        tracing::info!("ready");
        tokio::select! {
            _ = term.recv() => tracing::info!("SIGTERM: draining"),
            _ = int.recv() => tracing::info!("SIGINT: draining"),
        }
        tasks.shutdown().await;
        state.datapath_serves(None);
        drain(proxy, kernel, config.drain_timeout, (&mut term, &mut int)).await;
        drop(stop_api);
        if tokio::time::timeout(CONTROL_STOP, api).await.is_err() {
            tracing::warn!("the API did not end in time");
        }
        Ok(())
    }
}

/// Lets requests on their way finish, then takes the kernel side down. A second signal ends the waiting.
async fn drain(
    proxy: Arc<Proxy>,
    kernel: Option<Arc<Mutex<Kernel>>>,
    timeout: Duration,
    (term, int): (&mut tokio::signal::unix::Signal, &mut tokio::signal::unix::Signal),
) {
    let drained = tokio::task::spawn_blocking(move || match Arc::try_unwrap(proxy) {
        Ok(proxy) => proxy.drain(clock::now() + timeout, false),
        Err(_shared) => tracing::error!("the data side is still in use and cannot be drained"),
    });
    tokio::select! {
        done = drained => if let Err(error) = done { tracing::error!(%error, "draining failed") },
        _ = term.recv() => tracing::warn!("told to stop again: streams are cut"),
        _ = int.recv() => tracing::warn!("told to stop again: streams are cut"),
    }
    // Routes go last: without them the streams above could not have ended.
    if let Some(Ok(kernel)) = kernel.map(Arc::try_unwrap)
        && let Err(error) = kernel.into_inner().shutdown()
    {
        tracing::warn!(error = &error as &dyn std::error::Error, "could not clean up in the kernel");
    }
}

fn state_config(config: &Config) -> state::Config {
    state::Config {
        none_seed: config.kv.none_seed.clone(),
        settings: config.kv.settings,
        spill_relief: config.kv.relief.forced(),
        min_match_tokens: config.kv.min_match_tokens,
        max_blocks: config.kv.max_blocks,
        text_bytes: config.text_cache,
        index_seed: RandomState::new().hash_one(std::process::id()),
        ..state::Config::default()
    }
}

/// Loads the rules and puts them in force: before anything listens, so that the first connection finds them.
fn open_store(config: &Config, state: &Arc<State>) -> Result<Arc<Store>> {
    let publish = {
        let state = Arc::clone(state);
        move |rules: Vec<_>| {
            state.publish(&rules);
            if !state.wait_for_datapath(IN_FORCE) {
                tracing::warn!("the datapath is late with a change of the rules");
            }
        }
    };
    let store = Store::open(config.state_dir.as_deref(), publish).context("load the rules")?;
    if !store.trouble().is_empty() {
        state.degrade("state_dir", store.trouble().join("; "));
    }
    Ok(Arc::new(store))
}

/// The kernel side, where it is wanted and possible.
fn load_kernel(config: &Config, state: &State, runtime: &Runtime) -> Result<Option<Arc<Mutex<Kernel>>>> {
    if config.datapath == Datapath::None {
        return Ok(None);
    }
    let _entered = runtime.enter();
    match Kernel::load(&crate::kernel::Config { pin_dir: config.pin_dir.clone() }) {
        Ok(kernel) => Ok(Some(Arc::new(Mutex::new(kernel)))),
        // Another kvlb holds the maps: binding its VIPs beside it would only split the traffic.
        Err(error @ crate::kernel::Error::InUse { .. }) => Err(error).context("load the kernel programs"),
        Err(error) => {
            let why = format!("{error}; kvlb binds the VIPs itself");
            tracing::warn!(error = &error as &dyn std::error::Error, "no kernel datapath: kvlb binds the VIPs itself");
            state.degrade("datapath", why);
            Ok(None)
        }
    }
}

/// The access log, where it is wanted.
fn open_access_log(config: &Config, metrics: &Metrics) -> Result<Option<(AccessLog, Writer)>> {
    let wanted = &config.access_log;
    AccessLog::open(wanted.sampling, &wanted.destination, metrics).context("--access-log-file")
}

/// Whether lines of the access log go to standard output, where nothing else may stand between them then.
fn writes_to_stdout(config: &Config) -> bool {
    let wanted = &config.access_log;
    wanted.sampling != Sampling::Off && wanted.destination == Destination::Stdout
}

/// Opens the access log's file anew for each SIGHUP, as those who rotate logs expect. Without such a file SIGHUP ends kvlb,
/// as it ends any program whose terminal goes.
async fn reopen_on_hangup(log: AccessLog, mut hangup: tokio::signal::unix::Signal) {
    while hangup.recv().await.is_some() {
        log.reopen();
    }
}

fn start_proxy(config: &Config, state: &Arc<State>, log: Option<AccessLog>) -> Result<Proxy> {
    let settings = proxy::Config {
        threads: config.threads,
        io: config.io,
        decision_budget: config.kv.decision_budget,
        trace_context: config.trace_context,
        access_log: log,
        ..proxy::Config::default()
    };
    let logs = config.access_log.sampling != Sampling::Off;
    let desk = Arc::new(Desk::new(Arc::clone(state), config.kv.hash_debug, logs));
    let meter: Arc<dyn proxy::Meter> = Arc::new(ProxyMeter::new(Arc::clone(&state.metrics)));
    Proxy::start(settings, &desk, &meter).context("start the data threads")
}

/// Says what was started: on the terminal for people, in the log for machines, and as a metric.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the operator who starts kvlb is told what it does")]
fn announce(about: &About, metrics: &Metrics, aside: bool) {
    let version = env!("CARGO_PKG_VERSION");
    let line = format!(
        "kvlb {version}: datapath {}, io {}, {} data thread{}, API {}://{}",
        about.datapath,
        about.io,
        about.threads,
        if about.threads == 1 { "" } else { "s" },
        if about.tls { "https" } else { "http" },
        about.api
    );
    if aside {
        eprintln!("{line}");
    } else {
        println!("{line}");
    }
    metrics.build_info.with_label_values(&[version, about.datapath.as_str(), about.io.as_str()]).set(1);
    tracing::info!(version, datapath = about.datapath, io = about.io, threads = about.threads, api = %about.api, "started");
}
