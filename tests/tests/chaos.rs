//! A short storm: engines fail in every way under many clients, and nobody is told anything that did not happen.
//! `cargo xtask chaos` is the long one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write as _;
use std::time::Duration;

use kvlb_tests::chaos::{Plan, run};

async fn a_storm(seed: u64, io: &str, pd: bool) {
    let args = ["--threads", "2", "--io", io].map(str::to_owned).to_vec();
    let plan = Plan { length: Duration::from_secs(12), clients: 60, engines: 4, pd, seed, args };
    let say = |line: &str| drop(writeln!(std::io::stderr(), "{line}"));
    let report = run(&plan, say).await.unwrap();
    say(&report.to_string());
    assert!(report.is_clean(), "{report}");
    assert!(
        report.verdicts.classes["200, whole"] > 200 && report.troubles.len() > 3,
        "too little to prove anything: {report}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_twisted_or_run_twice_in_a_storm_on_io_uring() {
    a_storm(1, "uring", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_twisted_or_run_twice_in_a_storm_on_epoll() {
    a_storm(2, "epoll", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_made_of_another_request_s_blocks_and_no_lease_is_left_in_a_storm_over_both_legs() {
    a_storm(3, "uring", true).await;
}
