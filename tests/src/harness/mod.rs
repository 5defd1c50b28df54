//! What every test needs: waiting for a condition with a deadline, free ports, exact HTTP bytes, network namespaces, and the real
//! `kvlb` as a process.

pub mod dice;
pub mod http;
pub mod kvlb;
pub mod netns;
pub mod skips;
pub mod stage;
pub mod upstream;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::{Instant, sleep};

/// How often a condition is looked at while waiting for it.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Waits until `check` holds.
///
/// # Errors
/// When it does not within the time given; the error says what was waited for.
pub async fn eventually(within: Duration, what: &str, mut check: impl AsyncFnMut() -> bool) -> anyhow::Result<()> {
    until_some(within, what, async || check().await.then_some(())).await
}

/// Waits until `check` gives something, and returns it.
///
/// # Errors
/// As [`eventually`].
pub async fn until_some<T>(
    within: Duration,
    what: &str,
    mut check: impl AsyncFnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = check().await {
            return Ok(found);
        }
        anyhow::ensure!(Instant::now() < deadline, "not within {within:?}: {what}");
        sleep(LOOK_EVERY).await;
    }
}

/// A port nobody listens on at this moment. Somebody else may take it next: give port 0 to what can choose for itself.
///
/// # Errors
/// When the machine has no free port.
pub fn free_port() -> anyhow::Result<u16> {
    let [port] = free_ports()?;
    Ok(port)
}

/// Several different free ports.
///
/// # Errors
/// As [`free_port`].
pub fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    // All are held at once, so that none comes twice.
    let mut held = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).context("find a free port")?;
        *port = listener.local_addr().context("read the port found")?.port();
        held.push(listener);
    }
    Ok(ports)
}

/// A directory that goes with the returned value.
///
/// # Errors
/// When none can be made.
pub fn temp_dir() -> anyhow::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("kvlb-test-").tempdir().context("make a temporary directory")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{eventually, free_ports};

    #[tokio::test]
    async fn waiting_ends_with_the_condition_or_says_what_it_waited_for() {
        let mut looks = 0;
        let counted = async || {
            looks += 1;
            looks == 3
        };
        eventually(Duration::from_secs(5), "third look", counted).await.unwrap();
        let never = eventually(Duration::from_millis(20), "a miracle", async || false).await.unwrap_err();
        assert!(never.to_string().contains("a miracle"), "{never}");
    }

    #[test]
    fn free_ports_differ() {
        let [a, b, c] = free_ports().unwrap();
        assert!(a != b && b != c && a != c && a != 0);
    }
}
