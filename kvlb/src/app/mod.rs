//! The list of parts, in the order in which they start and stop.

mod bootstrap;
mod crew;
mod desk;
mod doctor;
mod down;
mod drops;
mod handles;
mod keys;
mod learn;
mod listen;
mod live;
mod meter;
mod pinning;
mod scrape;
mod steer;
mod takeover;
mod watch;
mod zero;

use std::hash::{BuildHasher as _, RandomState};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::config::{Config, Datapath};
use crate::control::{self, About, Api, Store, TakenOver};
use crate::discover::Asker;
use crate::handover::{self, Door, FromThis, Gift, Line};
use crate::kernel::Kernel;
use crate::proxy::{self, Proxy};
use crate::state::{self, State};
use crate::telemetry::access::{AccessLog, Destination, Sampling, Writer};
use crate::telemetry::decisions::DecisionLog;
use crate::telemetry::{Metrics, init_logs};
use crate::{clock, probe, staging};

pub use doctor::doctor;
pub use down::down;

use desk::Desk;
use keys::Keys;
use listen::{OwnVips, Steered};
use live::LiveState;
use meter::ProxyMeter;
use steer::Leaving;
use takeover::{Giver, Inheritance};
use zero::Zero;

/// Threads of the control side; the data side has its own.
const CONTROL_THREADS: usize = 2;
/// Time that the control side gets to end once the data side has.
const CONTROL_STOP: Duration = Duration::from_secs(2);

/// How long the API answers those who are connected once another process has taken over.
const API_GRACE: Duration = Duration::from_secs(3);

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

/// Threads that the control side may need at a time for what blocks, when it starts, and the few of everybody else.
const BLOCKING_THREADS: usize = 8;

/// Tries whether so many threads can be started: the runtime of the control side panics where they can not.
fn try_threads(count: usize) -> std::io::Result<()> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        // Until it is dropped, at the end of this block, none of them ends.
        let _held = gate.lock();
        let wait = || drop(gate.lock());
        (0..count).try_for_each(|_| std::thread::Builder::new().spawn_scoped(scope, wait).map(drop))
    })
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
    try_threads(CONTROL_THREADS + BLOCKING_THREADS + config.threads).context(
        "start threads: the limit of processes (ulimit -u, or pids.max of the cgroup) is too low for --threads and a dozen more",
    )?;
    let mut inheritance = Inheritance::ask(&config).context("take over")?;
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
    let store = open_store(&config, &state, inheritance.as_mut())?;
    let zero = config.zero_touch.clone().and_then(|pool| Zero::begin(pool, Arc::clone(&store)));
    let kernel = load_kernel(&config, &state, &runtime, inheritance.as_mut())?;
    let (log, writer) = open_access_log(&config, &metrics)?.unzip();
    let proxy = start_proxy(&config, &state, log.clone())?;
    let listener = takeover::api_listener(config.api, inheritance.as_mut())
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
        takeover: None,
    };
    announce(&about, &metrics, writes_to_stdout(&config));
    let asker = learn::asker(config.engine_key.as_ref()).context("make a client for the engines")?;
    let prober = probe::Asker::new(config.engine_key.as_deref()).context("make a client for probes")?;
    let live = Arc::new(LiveState::new(Arc::clone(&state), kernel.as_ref(), asker.clone(), config.kv.replay_offset));
    let proxy = Arc::new(proxy);
    let parts = Parts { config, state, keys, store, asker, prober, zero, kernel, proxy, log, live, about };
    runtime.block_on(parts.serve(listener, inheritance))?;
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
    store: Arc<Store>,
    asker: Asker,
    prober: probe::Asker,
    zero: Option<Zero>,
    kernel: Option<Arc<Mutex<Kernel>>>,
    proxy: Arc<Proxy>,
    log: Option<AccessLog>,
    live: Arc<LiveState>,
    about: About,
}

impl Parts {
    #[expect(clippy::too_many_lines, reason = "the order of a life, from the first listener to the last stream")]
    async fn serve(mut self, listener: std::net::TcpListener, mut inheritance: Option<Inheritance>) -> Result<()> {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (guard, tls) = (Arc::clone(&self.keys.guard), self.keys.tls.clone());
        let mut followers = self.follow()?;
        let mut warm = true;
        if let Some(inheritance) = &mut inheritance {
            let warming = inheritance.warm_up(&self.state, self.config.takeover_wait);
            warm = tokio::select! {
                warm = warming => warm.context("take over")?,
                _ = term.recv() => anyhow::bail!("told to stop before the takeover"),
                _ = int.recv() => anyhow::bail!("told to stop before the takeover"),
            };
        }
        let mut ways = self.open(inheritance.as_mut())?;
        let given_door = inheritance.as_mut().and_then(|given| given.take(Gift::Door).pop());
        let from = inheritance.as_ref().map(|given| given.offer().clone());
        let api_socket = listener.try_clone().context("keep the API's socket")?;
        let listener = TcpListener::from_std(listener).context("serve the API")?;
        self.about.takeover = from.as_ref().map(|from| TakenOver {
            version: from.version.clone(),
            pid: from.pid,
            at: u64::try_from(clock::unix_seconds()).unwrap_or_default(),
            warm,
        });
        let (stop_api, api_stopped) = oneshot::channel::<()>();
        let api = Api::new(Arc::clone(&self.live) as Arc<dyn control::Live>, self.about.clone());
        api.ready(Arc::clone(&self.store));
        let leaving = Arc::clone(&api);
        let serve_api = move |api| {
            tokio::spawn(control::serve(listener, api, guard, tls, async move {
                // A dropped sender means the same: stop.
                let _asked_or_gone = api_stopped.await;
            }))
        };
        let (datapath, api) = match inheritance {
            None => {
                let datapath = self.keep_open(ways);
                // The API answers, and the log says ready, when the rules that are there already are served.
                self.wait_until_served().await;
                (datapath, serve_api(api))
            }
            Some(inheritance) => {
                let api = serve_api(api);
                let hang_up = inheritance.hang_up().context("take over")?;
                let mut waiting = tokio::task::spawn_blocking(move || inheritance.ready());
                let agreed = tokio::select! {
                    agreed = &mut waiting => agreed.context("take over")?.map_err(Into::into),
                    _ = term.recv() => Err(anyhow::anyhow!("told to stop before the kvlb before let go")),
                    _ = int.recv() => Err(anyhow::anyhow!("told to stop before the kvlb before let go")),
                };
                if let Err(error) = agreed {
                    hang_up();
                    // What was accepted in the meantime is served to its end; the sockets are the other's.
                    drop((followers, stop_api));
                    let Self { proxy, kernel, config, .. } = self;
                    drop(kernel);
                    drain(proxy, None, config.drain_timeout, true, (&mut term, &mut int)).await;
                    return Err(error.context("take over"));
                }
                self.complete(&mut ways);
                takeover::count_taken(&self.state.metrics, warm);
                let datapath = self.keep_open(ways);
                self.wait_until_served().await;
                self.store.go_on();
                (datapath, api)
            }
        };
        let handing_over = datapath.1;
        let mut datapath = datapath.0;
        let door = self.open_door(given_door);
        let (ready, mut next) = mpsc::channel::<Line>(1);
        let giver = door.as_ref().map(|door| self.giver(door, api_socket, handing_over));
        let mut offering = JoinSet::new();
        if let Some(giver) = &giver {
            offering.spawn(takeover::keep_offering(Arc::clone(giver), ready));
        }
        tracing::info!("ready");
        let handed = tokio::select! {
            _ = term.recv() => { tracing::info!("SIGTERM: draining"); None },
            _ = int.recv() => { tracing::info!("SIGINT: draining"); None },
            Some(line) = next.recv() => { tracing::info!("the next kvlb serves: draining"); Some(line) },
        };
        // From here on the socket of takeovers is the next one's, or nobody's.
        offering.shutdown().await;
        datapath.shutdown().await;
        self.state.datapath_serves(None);
        if handed.is_none() {
            // Who waits for an endpoint has nothing under way there: another kvlb may have room at once.
            self.state.admission.drain();
        }
        let Self { proxy, kernel, config, .. } = self;
        let Some(line) = handed else {
            if let Some(giver) = giver {
                giver.close();
            }
            followers.shutdown().await;
            drop(door);
            drain(proxy, kernel, config.drain_timeout, false, (&mut term, &mut int)).await;
            drop(stop_api);
            return end_api(api).await;
        };
        if let Some(door) = &door {
            door.lock().leave();
        }
        if let Some(kernel) = &kernel
            && let Err(error) = kernel.lock().let_go()
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "this process still steers until it ends");
        }
        leaving.leave();
        let answered = tokio::time::sleep(API_GRACE);
        release(line).await;
        drain(proxy, kernel, config.drain_timeout, true, (&mut term, &mut int)).await;
        followers.shutdown().await;
        // Who has connected to the API and not asked yet is answered by this process.
        answered.await;
        drop(stop_api);
        end_api(api).await
    }

    /// Starts what follows rules and engines.
    fn follow(&mut self) -> Result<JoinSet<()>> {
        let mut tasks = JoinSet::new();
        if let Some(log) = self.log.take().filter(|_| !writes_to_stdout(&self.config)) {
            tasks.spawn(reopen_on_hangup(log, signal(SignalKind::hangup())?));
        }
        let fresh = self.keys.clone().keep_fresh(Arc::clone(&self.state));
        tasks.spawn(async move {
            if let Err(error) = fresh.await {
                tracing::error!(error = format!("{error:#}"), "the API's tokens and certificate are not read again");
            }
        });
        let (state, config) = (&self.state, &self.config);
        tasks.spawn(staging::keep_loaded(config.tokenizer_dir.clone(), Arc::clone(state)));
        tasks.spawn(watch::keep_watching(Arc::clone(state), self.prober.clone(), config.kv.replay_offset));
        if let Some(zero) = self.zero.take() {
            tasks.spawn(zero.follow(Arc::clone(state), self.asker.clone()));
        }
        tasks.spawn(learn::keep_learning(Arc::clone(state), self.asker.clone()));
        tasks.spawn(bootstrap::keep_asking(Arc::clone(state), self.asker.clone()));
        if let Some(every) = config.scrape_interval {
            tasks.spawn(scrape::keep_scraping(Arc::clone(state), self.asker.clone(), every));
        }
        if let Some(kernel) = &self.kernel {
            let (log, drops) = {
                let mut kernel = kernel.lock();
                (kernel.take_log(), kernel.take_drops())
            };
            if let Some(log) = log {
                tasks.spawn(log.drain());
            }
            if let Some(drops) = drops {
                tasks.spawn(drops::keep_telling(drops, Arc::clone(state)));
            }
        }
        Ok(tasks)
    }

    /// Accepts from the first sockets: those of a process before, or those behind the kernel's steering.
    fn open(&self, inheritance: Option<&mut Inheritance>) -> Result<Ways> {
        let Some(kernel) = &self.kernel else {
            let mut vips = OwnVips::default();
            if let Some(given) = inheritance {
                vips.adopt(given.sockets(Gift::Vip), &self.state.table(), &self.proxy);
            }
            return Ok(Ways::Bound(vips));
        };
        let taking_over = inheritance.is_some();
        let before = inheritance.map(|given| given.sockets(Gift::Steered)).unwrap_or_default();
        let steered = Steered::begin(kernel, &self.proxy, before).context("give the listeners to the kernel")?;
        let mut leaving = Leaving::default();
        if taking_over {
            steer::sync(kernel, &self.state, &mut leaving, self.config.drain_timeout);
            kernel.lock().attach().context("attach the kernel program")?;
        }
        Ok(Ways::Steered(steered, leaving))
    }

    /// Takes the rest, once the process before has let go of it.
    fn complete(&self, ways: &mut Ways) {
        match (ways, &self.kernel) {
            (Ways::Steered(steered, leaving), Some(kernel)) => {
                let owned = kernel.lock().own();
                match owned {
                    Ok(vips) => *leaving = Leaving::after(vips),
                    Err(error) => {
                        tracing::error!(error = &error as &dyn std::error::Error, "not all pins are replaced");
                    }
                }
                let admits = kernel.lock().admit();
                match admits {
                    Ok(()) => self.state.recovered(NO_ADMISSION),
                    Err(error) => {
                        tracing::error!(error = &error as &dyn std::error::Error, "SYNs are not judged");
                        self.state.degrade(NO_ADMISSION, format!("SYNs are not judged: {error}"));
                    }
                }
                if let Err(error) = steered.top_up(kernel, &self.proxy) {
                    tracing::warn!(error = format!("{error:#}"), "not every data thread has a listening socket");
                }
            }
            (Ways::Bound(vips), _) => vips.top_up(&self.proxy),
            (Ways::Steered(..), None) => {}
        }
    }

    /// Follows the rules with the sockets. A datapath is on its way: whoever writes a rule from now on waits for it.
    fn keep_open(&self, ways: Ways) -> (JoinSet<()>, Arc<AtomicBool>) {
        let mut tasks = JoinSet::new();
        let handing_over = Arc::new(AtomicBool::new(false));
        self.state.datapath_serves(Some(0));
        let state = Arc::clone(&self.state);
        match (ways, &self.kernel) {
            (Ways::Steered(_, leaving), Some(kernel)) => {
                tasks.spawn(steer::keep_steering(leaving, Arc::clone(kernel), state, self.config.drain_timeout));
            }
            (Ways::Bound(vips), _) => {
                let held = Arc::clone(&handing_over);
                tasks.spawn(listen::keep_bound(vips, Arc::clone(&self.proxy), state, held));
            }
            (Ways::Steered(..), None) => {}
        }
        (tasks, handing_over)
    }

    async fn wait_until_served(&self) {
        let state = Arc::clone(&self.state);
        let served = tokio::task::spawn_blocking(move || state.wait_for_datapath(IN_FORCE)).await;
        if !served.unwrap_or(false) {
            tracing::warn!("the datapath does not serve all rules yet");
        }
    }

    /// Where the next takeover comes through; without it kvlb serves all the same.
    fn open_door(&self, given: Option<std::os::fd::OwnedFd>) -> Option<Arc<Mutex<Door>>> {
        let path = self.config.takeover_socket.as_deref()?;
        let door = given.map_or_else(|| Door::open(path), |given| Ok(Door::given(given, path)));
        match door {
            Ok(door) => {
                self.state.recovered(NO_DOOR);
                Some(Arc::new(Mutex::new(door)))
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no takeover can be asked for");
                self.state.degrade(
                    NO_DOOR,
                    format!("{:#}; --takeover-socket names another place", anyhow::Error::new(error)),
                );
                None
            }
        }
    }

    fn giver(&self, door: &Arc<Mutex<Door>>, api: std::net::TcpListener, handing_over: Arc<AtomicBool>) -> Arc<Giver> {
        Arc::new(Giver {
            state: Arc::clone(&self.state),
            store: Arc::clone(&self.store),
            door: Arc::clone(door),
            proxy: Arc::downgrade(&self.proxy),
            kernel: self.kernel.as_ref().map(Arc::downgrade),
            api,
            state_dir: self.config.state_dir.clone(),
            handing_over,
            talking: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }
}

/// The name of the degraded state in which no takeover can be asked for.
const NO_DOOR: &str = "takeover_socket";

/// The name of the degraded state in which devices lack the admission that they were to have.
const NO_ADMISSION: &str = "xdp";

/// How VIP traffic comes in.
enum Ways {
    /// Through the kernel.
    Steered(Steered, Leaving),
    /// By sockets of the VIPs' own.
    Bound(OwnVips),
}

/// Tells the process that has taken over that everything is its own now.
async fn release(mut line: Line) {
    let told = tokio::task::spawn_blocking(move || line.send(&FromThis::Released)).await;
    match told {
        Ok(Ok(())) => {}
        Ok(Err(handover::Error::Gone)) => tracing::error!("the process that has taken over has ended"),
        Ok(Err(error)) => tracing::error!(%error, "the process that has taken over is not told so"),
        Err(error) => tracing::error!(%error, "the process that has taken over is not told so"),
    }
}

async fn end_api(api: tokio::task::JoinHandle<()>) -> Result<()> {
    if tokio::time::timeout(CONTROL_STOP, api).await.is_err() {
        tracing::warn!("the API did not end in time");
    }
    Ok(())
}

/// Lets requests on their way finish, then takes the kernel side down. A second signal ends the waiting.
async fn drain(
    proxy: Arc<Proxy>,
    kernel: Option<Arc<Mutex<Kernel>>>,
    timeout: Duration,
    release: bool,
    (term, int): (&mut tokio::signal::unix::Signal, &mut tokio::signal::unix::Signal),
) {
    let drained = tokio::task::spawn_blocking(move || match Arc::try_unwrap(proxy) {
        Ok(proxy) => proxy.drain(clock::now() + timeout, release),
        Err(_shared) => tracing::error!("the data side is still in use and cannot be drained"),
    });
    // Where another process has taken over nobody has told this one to stop yet.
    let mut told = !release;
    let mut drained = std::pin::pin!(drained);
    loop {
        tokio::select! {
            done = &mut drained => {
                if let Err(error) = done {
                    tracing::error!(%error, "draining failed");
                }
                break;
            }
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        if told {
            tracing::warn!("told to stop again: streams are cut");
            break;
        }
        told = true;
        tracing::info!("told to stop: streams are ending already; told again, they are cut");
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
        spill_relief: config.kv.relief,
        min_match_tokens: config.kv.min_match_tokens,
        prefill_timeout: config.prefill_timeout,
        max_blocks: config.kv.max_blocks,
        text_bytes: config.text_cache,
        index_seed: RandomState::new().hash_one(std::process::id()),
        ..state::Config::default()
    }
}

/// Loads the rules and puts them in force: before anything listens, so that the first connection finds them.
fn open_store(config: &Config, state: &Arc<State>, before: Option<&mut Inheritance>) -> Result<Arc<Store>> {
    let publish = {
        let state = Arc::clone(state);
        move |rules: Vec<_>| {
            state.publish(&rules);
            if !state.wait_for_datapath(IN_FORCE) {
                tracing::warn!("the datapath is late with a change of the rules");
            }
        }
    };
    let store = match before {
        Some(before) => Store::take_over(before.rules()?, publish),
        None => Store::open(config.state_dir.as_deref(), publish),
    };
    let store = store.context("load the rules")?;
    if !store.trouble().is_empty() {
        state.degrade("state_dir", store.trouble().join("; "));
    }
    Ok(Arc::new(store))
}

fn kernel_config(config: &Config) -> crate::kernel::Config {
    crate::kernel::Config { pin_dir: config.pin_dir.clone(), xdp_devices: config.xdp_devices.clone() }
}

/// The kernel side, where it is wanted and possible.
fn load_kernel(
    config: &Config,
    state: &State,
    runtime: &Runtime,
    before: Option<&mut Inheritance>,
) -> Result<Option<Arc<Mutex<Kernel>>>> {
    if config.datapath == Datapath::None {
        return Ok(None);
    }
    let _entered = runtime.enter();
    let settings = kernel_config(config);
    if let Some(before) = before {
        // Traffic goes on coming as it did: another way is for a restart.
        let Some(lock) = before.take(Gift::PinLock).pop() else {
            let without = config.xdp_devices.is_empty();
            anyhow::ensure!(
                without,
                "--xdp-dev: the running kvlb binds the VIPs itself, which a takeover does not change"
            );
            return Ok(None);
        };
        let kernel = Kernel::join(&settings, lock.into()).context("load the kernel programs")?;
        return Ok(Some(Arc::new(Mutex::new(kernel))));
    }
    match Kernel::load(&settings) {
        Ok(kernel) => Ok(Some(Arc::new(Mutex::new(kernel)))),
        // Who names devices wants them guarded, or to know.
        Err(error) if !config.xdp_devices.is_empty() => Err(error).context("load the kernel programs (--xdp-dev)"),
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
    let defaults = proxy::Config::default();
    let settings = proxy::Config {
        threads: config.threads,
        io: config.io,
        connections_max: config.connections_max.unwrap_or(defaults.connections_max),
        head_max: config.head_max,
        decision_budget: config.kv.decision_budget,
        trace_context: config.trace_context,
        access_log: log,
        ..defaults
    };
    let decisions = config.decision_log.as_ref().map(|path| {
        DecisionLog::open(path, &state.metrics).with_context(|| format!("--decision-log {}", path.display()))
    });
    let logs = config.access_log.sampling != Sampling::Off;
    let desk = Arc::new(Desk::new(Arc::clone(state), config.kv.hash_debug, logs, decisions.transpose()?));
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
