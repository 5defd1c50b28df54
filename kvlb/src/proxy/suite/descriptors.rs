//! A process without a file descriptor left.
//!
//! The limit is the whole process's, so each back end's test runs in a process of its own: this very program, started
//! again for that one test.

use std::fs::File;
use std::net::TcpStream;
use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

use super::rig::{Endpoint, Rig, Wire, eventually, get, uring_is_here};
use crate::proxy::Io;

/// Tells a process of this program that it runs one test and nothing else.
const ALONE: &str = "TEST_ALONE";

#[test]
fn running_out_of_descriptors_is_survived() {
    for io in [Io::Uring, Io::Epoll] {
        if io == Io::Uring && !uring_is_here() {
            continue;
        }
        let this = std::env::current_exe().unwrap();
        let name = format!("{}::without_descriptors_on_{io}", module_path!().split_once("::").unwrap().1);
        let run = Command::new(this).args(["--exact", "--test-threads=1", &name]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(
            run.status.success() && said.contains("1 passed"),
            "{io}: {said}\n{}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
}

/// Run by [`running_out_of_descriptors_is_survived`] alone: it takes all of a process's descriptors.
#[test]
fn without_descriptors_on_uring() {
    if is_alone() {
        run_out(Io::Uring);
    }
}

/// As [`without_descriptors_on_uring`].
#[test]
fn without_descriptors_on_epoll() {
    if is_alone() {
        run_out(Io::Epoll);
    }
}

#[expect(clippy::disallowed_methods, reason = "a test talks to its own child, not to the daemon")]
fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

fn run_out(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut early = rig.client();
    assert_eq!(early.ask(&get("/")).body, b"hi");
    let (_soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 200, hard).unwrap();
    // Sockets that are made now can connect when there are no descriptors left.
    let late: Vec<_> = (0..5).map(|_| Socket::new(Domain::IPV4, Type::STREAM, None).unwrap()).collect();
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    for socket in &late {
        socket.connect(&rig.address.into()).unwrap();
    }
    eventually("accepting fails", || rig.counts.get("accept failed") >= 2);
    // A connection that is open is served as far as one to an endpoint can be had; it is never cut off.
    let answer = early.ask(&get("/"));
    assert!(answer.status() == 200 || answer.own_code() == "out_of_resources", "{}", answer.head);
    drop(taken);
    for socket in late {
        let mut client = Wire::new(TcpStream::from(socket));
        assert_eq!(client.ask(&get("/")).body, b"hi");
    }
    assert_eq!(early.ask(&get("/")).body, b"hi");
}
