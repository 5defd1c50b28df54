//! Starting, stopping, and what runs out.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::on_both_back_ends;
use super::rig::{Ended, Endpoint, PATIENCE, Rig, eventually, get, post};
use crate::clock;
use crate::proxy::{Io, Link, bind};

on_both_back_ends![
    draining_finishes_streams_and_closes_what_is_idle,
    a_drain_ends_at_its_deadline,
    listeners_come_and_go_while_traffic_flows,
    a_released_listener_goes_on_elsewhere,
    threads_share_an_address,
    clients_beyond_the_limit_are_turned_away,
    clients_are_as_many_as_there_are_descriptors_for_beside_the_listeners,
    data_threads_say_how_they_fare,
];

fn draining_finishes_streams_and_closes_what_is_idle(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            if request.body == b"quick" {
                wire.send(&super::rig::ok(b"done"));
                continue;
            }
            wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n");
            std::thread::sleep(Duration::from_millis(300));
            wire.send(b"3\r\ndef\r\n0\r\n\r\n");
        }
    });
    let mut rig = Rig::start(io, &[endpoint.address]);
    let mut idle = rig.client();
    idle.ask(&post(b"quick"));
    let mut fresh = rig.client();
    let mut streams: Vec<_> = (0..20).map(|_| rig.client()).collect();
    for stream in &mut streams {
        stream.send(&post(b"stream"));
    }
    let mut waiting = rig.client();
    waiting.send(&post(b"late")[..30]);
    eventually("all are in flight", || rig.fake.in_flight() == 20);
    std::thread::sleep(Duration::from_millis(30));
    let drained = rig.drain(PATIENCE);
    assert_eq!(idle.ends_within(Duration::from_millis(200)), Some(Ended::Cleanly));
    assert_eq!(fresh.ends_within(Duration::from_millis(200)), Some(Ended::Cleanly));
    assert!(TcpStream::connect(rig.address).is_err(), "nobody is accepted any more");
    for stream in &mut streams {
        assert_eq!(stream.answer().body, b"abcdef");
        assert_eq!(stream.rest(), b"");
    }
    // A request that had begun is served, and told that it is the last.
    waiting.send(&post(b"late")[30..]);
    let answer = waiting.answer();
    assert_eq!((answer.status(), answer.field("connection")), (200, Some("close")));
    assert!(drained.join().unwrap() < Duration::from_secs(3));
    assert_eq!(rig.counts.get("opened"), rig.counts.get("closed"));
}

fn a_drain_ends_at_its_deadline(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n");
        assert!(wire.ends_within(PATIENCE).is_some());
    });
    let mut rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(&get("/"));
    client.head().unwrap();
    let drained = rig.drain(Duration::from_millis(200));
    let took = drained.join().unwrap();
    assert!((Duration::from_millis(190)..Duration::from_millis(1500)).contains(&took), "{took:?}");
    assert_eq!(client.rest(), b"3\r\nabc\r\n", "cut off, and visibly so");
    assert_eq!(rig.counts.get("opened"), rig.counts.get("closed"));
}

fn listeners_come_and_go_while_traffic_flows(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.ask(&get("/"));
    for link in 10..15 {
        let sockets = bind(SocketAddr::from(([127, 0, 0, 1], 0)), 1).unwrap();
        let address = sockets[0].local_addr().unwrap();
        rig.proxy().listen(Link(link), sockets);
        let mut other = super::rig::Wire::connect(address);
        assert_eq!(other.ask(&get("/")).body, b"hi");
        rig.proxy().unlisten(Link(link), false);
        eventually("the address is closed", || TcpStream::connect(address).is_err());
        assert_eq!(other.ask(&get("/")).body, b"hi", "a connection outlives its listener");
    }
    assert_eq!(client.ask(&get("/")).body, b"hi");
}

fn a_released_listener_goes_on_elsewhere(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let mut old = Rig::start(io, &[endpoint.address]);
    let new = Rig::start(io, &[endpoint.address]);
    let sockets = bind(SocketAddr::from(([127, 0, 0, 1], 0)), 1).unwrap();
    let address = sockets[0].local_addr().unwrap();
    let same = vec![sockets[0].try_clone().unwrap()];
    old.proxy().listen(Link(7), sockets);
    let mut early = super::rig::Wire::connect(address);
    assert_eq!(early.ask(&get("/")).body, b"hi");
    new.proxy().listen(Link(7), same);
    old.drain_released(Duration::from_secs(1)).join().unwrap();
    assert_eq!(early.rest(), b"");
    for _ in 0..20 {
        assert_eq!(super::rig::Wire::connect(address).ask(&get("/")).body, b"hi");
    }
}

fn threads_share_an_address(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::with(io, &[endpoint.address], |config| config.threads = 3);
    let mut clients: Vec<_> = (0..60).map(|_| rig.client()).collect();
    for client in &mut clients {
        assert_eq!(client.ask(&get("/")).body, b"hi");
    }
    assert!(endpoint.connections() >= 2, "more than one thread has asked");
    drop(clients);
    rig.settled();
}

fn clients_beyond_the_limit_are_turned_away(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::with(io, &[endpoint.address], |config| (config.connections_max, config.threads) = (2, 3));
    let (mut first, mut second) = (rig.client(), rig.client());
    assert_eq!(first.ask(&get("/")).body, b"hi");
    assert_eq!(second.ask(&get("/")).body, b"hi");
    assert!(rig.client().ends_within(PATIENCE).is_some());
    assert_eq!(rig.counts.get("refused too_many"), 1);
    drop(first);
    eventually("there is room again", || rig.counts.get("closed") == 1);
    assert_eq!(rig.client().ask(&get("/")).body, b"hi");
}

fn clients_are_as_many_as_there_are_descriptors_for_beside_the_listeners(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    // 200 for others, four listeners, and two for each of 17 clients.
    let rig = Rig::with(io, &[endpoint.address], |config| (config.descriptors, config.threads) = (200 + 4 + 2 * 17, 4));
    let mut clients: Vec<_> = (0..17).map(|_| rig.client()).collect();
    for client in &mut clients {
        assert_eq!(client.ask(&get("/")).body, b"hi");
    }
    assert!(rig.client().ends_within(PATIENCE).is_some());
    assert_eq!(rig.counts.get("refused too_many"), 1);
}

fn data_threads_say_how_they_fare(io: Io) {
    let rig = Rig::start(io, &[]);
    let start = clock::now();
    eventually("ticks come", || rig.counts.get("ticks") >= 4);
    assert!(start.elapsed() >= Duration::from_millis(150), "{:?}", start.elapsed());
}
