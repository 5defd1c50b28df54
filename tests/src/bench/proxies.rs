//! The proxies, and how each is started so that it has one thread for the work and nothing to write.

use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cases::Upstream;
use super::child::{Cores, Running, ask};
use super::wire::{Request, Wish};

/// Where kvlb's API listens.
const API: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 11111);
/// The model that the small tokenizer belongs to.
pub(super) const MODEL: &str = "kvlb/bench";
/// The seed of the engines' names.
pub(super) const SEED: &str = "0";
/// Moves with every request whose endpoint the KV tier chose.
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";

/// What stands between client and upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proxy {
    /// Nothing
    Direct,
    /// kvlb with io_uring
    Kvlb,
    /// kvlb with epoll
    KvlbEpoll,
    /// HAProxy, the yardstick
    Haproxy,
    /// nginx
    Nginx,
    /// Envoy
    Envoy,
    /// vllm-router, round robin
    VllmRouter,
}

impl Proxy {
    pub(super) fn is_kvlb(self) -> bool {
        matches!(self, Self::Kvlb | Self::KvlbEpoll)
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

/// Where programs and files are.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Our own programs.
    pub(super) bin: PathBuf,
    /// The environment with what came from PyPI.
    pub(super) venv: PathBuf,
    /// Logs and configurations of this run.
    pub(super) dir: PathBuf,
}

impl Places {
    /// The program of a proxy; None where it is not installed.
    pub(super) fn program(&self, proxy: Proxy) -> Option<PathBuf> {
        let file = |path: PathBuf| Some(path).filter(|path| path.is_file());
        match proxy {
            Proxy::Direct | Proxy::Kvlb | Proxy::KvlbEpoll => file(self.bin.join("kvlb")),
            Proxy::Haproxy => on_path("haproxy"),
            Proxy::Nginx => on_path("nginx"),
            Proxy::Envoy => packaged_envoy(&self.venv).or_else(|| on_path("envoy")),
            Proxy::VllmRouter => file(self.venv.join("bin/vllm-router")).or_else(|| on_path("vllm-router")),
        }
    }

    /// What a proxy says its version is.
    pub(super) fn version(&self, proxy: Proxy) -> Option<String> {
        let flag = match proxy {
            Proxy::Direct => return None,
            // It does not say it, but its package does.
            Proxy::VllmRouter => return packaged_version(&self.venv, "vllm_router-"),
            Proxy::Nginx | Proxy::Haproxy => "-v",
            Proxy::Kvlb | Proxy::KvlbEpoll | Proxy::Envoy => "--version",
        };
        let output = Command::new(self.program(proxy)?).arg(flag).output().ok()?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let line = said.lines().map(str::trim).find(|line| !line.is_empty())?;
        // Envoy begins with its own path.
        Some(line.rsplit_once("version: ").map_or(line, |(_, version)| version).to_owned())
    }
}

/// Where Python packages are.
fn packages(venv: &Path) -> impl Iterator<Item = PathBuf> {
    let versions = fs::read_dir(venv.join("lib")).into_iter().flatten().flatten();
    versions.map(|version| version.path().join("site-packages"))
}

fn packaged_version(venv: &Path, prefix: &str) -> Option<String> {
    let entries = packages(venv).filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.find_map(|name| Some(name.strip_prefix(prefix)?.strip_suffix(".dist-info")?.to_owned()))
}

/// The Python package is a small program around the real one, which is what we start: it ends by its id, and is alone.
fn packaged_envoy(venv: &Path) -> Option<PathBuf> {
    packages(venv).map(|folder| folder.join("envoy/_bin/envoy")).find(|path| path.is_file())
}

#[expect(clippy::disallowed_methods, reason = "a bench is no part of the daemon, whose environment only config reads")]
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|dir| dir.join(name)).find(|file| file.is_file())
}

/// A proxy that answers.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) proxy: Proxy,
    pub(super) port: u16,
    running: Option<Running>,
}

impl Started {
    /// Starts `proxy` in front of two upstreams, and waits until it answers.
    pub(super) fn start(
        proxy: Proxy,
        upstream: Upstream,
        ends: [SocketAddr; 2],
        port: u16,
        places: &Places,
        cores: Cores,
    ) -> anyhow::Result<Self> {
        if proxy == Proxy::Direct {
            return Ok(Self { proxy, port: ends[0].port(), running: None });
        }
        let command = command(proxy, upstream, ends, port, places)?;
        let mut running = Running::start(command, cores.proxy, &places.dir.join(format!("{proxy}.log")))?;
        if proxy.is_kvlb() {
            running.wait_until(|| ask(API, "GET", "/netlox/v1/config/loadbalancer/all", "").is_ok_and(is_fine))?;
            create_rule(upstream, ends, port)?;
        }
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let first = match upstream {
            Upstream::Mock => Request::chat(port, 2048, Wish::Json(200)),
            Upstream::Announced | Upstream::Engines => Request::completion(port, 2048, MODEL, 0),
        };
        let body = first.body().to_owned();
        running.wait_until(|| ask(at, "POST", first.path(), &body).is_ok_and(is_fine))?;
        if upstream != Upstream::Mock && proxy.is_kvlb() {
            running.wait_until(|| metric("loxilb_kv_subscriber_connected").is_ok_and(|connected| connected >= 2.0))?;
        }
        Ok(Self { proxy, port, running: Some(running) })
    }

    /// Its process; None where there is no proxy.
    pub(super) fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(Running::pid)
    }

    pub(super) fn must_run(&mut self) -> anyhow::Result<()> {
        self.running.as_mut().map_or(Ok(()), Running::must_run)
    }
}

fn is_fine((status, _body): (u16, String)) -> bool {
    status == 200
}

/// Requests that kvlb's KV tier has routed so far.
pub(super) fn hits() -> anyhow::Result<f64> {
    metric(HITS)
}

/// The sum over all series of a family of kvlb's.
fn metric(family: &str) -> anyhow::Result<f64> {
    let (status, page) = ask(API, "GET", "/netlox/v1/metrics", "")?;
    ensure!(status == 200, "kvlb's metrics answer {status}");
    let of_family = |line: &&str| line.split(['{', ' ']).next() == Some(family);
    Ok(page.lines().filter(of_family).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
}

fn create_rule(upstream: Upstream, ends: [SocketAddr; 2], port: u16) -> anyhow::Result<()> {
    let endpoints = ends.map(|end| json!({"endpointIP": end.ip(), "targetPort": end.port(), "weight": 1}));
    let mut rule = json!({
        "serviceArguments": {"externalIP": "127.0.0.1", "port": port, "protocol": "tcp", "sel": 0, "mode": 4},
        "endpoints": endpoints,
    });
    if upstream != Upstream::Mock {
        let kv = [("kvExactMode", json!(3)), ("kvZmqPort", json!(5557)), ("kvBlockSize", json!(16))];
        for (field, value) in kv {
            rule["serviceArguments"][field] = value;
        }
        rule["serviceArguments"]["kvHashAlgo"] = json!("sha256_cbor");
    }
    let (status, said) = ask(API, "POST", "/netlox/v1/config/loadbalancer", &rule.to_string())?;
    ensure!(status == 200, "kvlb refuses the rule with {status}: {said}");
    Ok(())
}

fn command(
    proxy: Proxy,
    upstream: Upstream,
    ends: [SocketAddr; 2],
    port: u16,
    places: &Places,
) -> anyhow::Result<Command> {
    let program = places.program(proxy).with_context(|| format!("find {proxy}"))?;
    let mut command = Command::new(program);
    match proxy {
        Proxy::Direct => bail!("nothing stands there"),
        Proxy::Kvlb | Proxy::KvlbEpoll => {
            let io = if proxy == Proxy::Kvlb { "uring" } else { "epoll" };
            command.args(["up", "--threads", "1", "--no-state", "--datapath", "none", "--api", &API.to_string()]);
            command.args(["--io", io, "--drain-timeout", "500ms", "--log-level", "warn"]);
            if upstream != Upstream::Mock {
                command.arg("--tokenizer-dir").arg(stage_tokenizer(&places.dir)?).env("LLB_KV_NONE_HASH_SEED", SEED);
            }
        }
        Proxy::Haproxy => {
            let conf = write_conf(places, "haproxy.cfg", include_str!("conf/haproxy.cfg"), ends, port)?;
            command.arg("-db").arg("-f").arg(conf);
        }
        Proxy::Nginx => {
            let conf = write_conf(places, "nginx.conf", include_str!("conf/nginx.conf"), ends, port)?;
            command.arg("-e").arg(places.dir.join("nginx.err")).arg("-c").arg(conf);
        }
        Proxy::Envoy => {
            let conf = write_conf(places, "envoy.yaml", include_str!("conf/envoy.yaml"), ends, port)?;
            command.args(["--concurrency", "1", "-l", "error", "--disable-hot-restart", "-c"]).arg(conf);
        }
        Proxy::VllmRouter => {
            let urls = ends.map(|end| format!("http://{end}"));
            command.arg("--worker-urls").args(urls).args(["--policy", "round_robin", "--host", "127.0.0.1"]);
            command.args(["--port", &port.to_string(), "--prometheus-port", "9301", "--log-level", "error"]);
        }
    }
    Ok(command)
}

fn write_conf(places: &Places, name: &str, text: &str, ends: [SocketAddr; 2], port: u16) -> anyhow::Result<PathBuf> {
    let [first, second] = ends;
    let text = text
        .replace("@PORT@", &port.to_string())
        .replace("@DIR@", &places.dir.to_string_lossy())
        .replace("@FIRST@", &first.to_string())
        .replace("@SECOND@", &second.to_string())
        .replace("@FIRST_HOST@", &first.ip().to_string())
        .replace("@FIRST_PORT@", &first.port().to_string())
        .replace("@SECOND_HOST@", &second.ip().to_string())
        .replace("@SECOND_PORT@", &second.port().to_string());
    let path = places.dir.join(name);
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// The small tokenizer of the tests, laid out as an operator would lay out a model's.
fn stage_tokenizer(dir: &Path) -> anyhow::Result<PathBuf> {
    let staged = dir.join("tokenizers");
    let folder = staged.join(MODEL.replace('/', "__"));
    fs::create_dir_all(&folder).context("make the tokenizer directory")?;
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tokenizer().join(file), folder.join(file)).with_context(|| format!("stage {file}"))?;
    }
    Ok(staged)
}

/// The small tokenizer of the tests.
pub(super) fn tokenizer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tiny-tokenizer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_have_no_place_left_open() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { bin: PathBuf::new(), venv: PathBuf::new(), dir: dir.path().to_owned() };
        let ends = ["127.0.0.1:9101", "127.0.0.1:9102"].map(|end| end.parse().unwrap());
        for text in [include_str!("conf/haproxy.cfg"), include_str!("conf/nginx.conf"), include_str!("conf/envoy.yaml")]
        {
            let conf = fs::read_to_string(write_conf(&places, "conf", text, ends, 9400).unwrap()).unwrap();
            // Envoy's types have an @ of their own.
            assert!(!conf.replace("\"@type\"", "").contains('@'), "{conf}");
            assert!(conf.contains("9400") && conf.contains("9101") && conf.contains("9102"));
        }
    }
}
