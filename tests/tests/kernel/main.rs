//! The kernel's share: connections to a VIP reach the proxy's listeners, the maps show the fleet's health, and nothing
//! is left behind.
//!
//! Real TCP in network namespaces of its own, so it needs root; without, each test says that it is skipped.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test says by a panic what went wrong")]

mod admission;
mod frames;
mod lab;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use kvlb::kernel::{
    Cleared, Config, DropReason, EndpointState, Error, Kernel, NoEndpoint, Phase, Vip, VipEndpoint, VipStats,
};
use lab::{Child, Lab, TCP, UDP};
use serde_json::Value;

/// The VIP of most tests, an address of no device.
const VIP: &str = "10.98.0.1";

const NONE: VipStats = VipStats {
    steered: 0,
    refused: 0,
    no_listener: 0,
    denied: 0,
    syn_passed: 0,
    syn_over_rate: 0,
    syn_denied: 0,
    cut: 0,
    other: 0,
};

#[test]
fn a_client_elsewhere_reaches_a_listener_on_loopback_that_sees_the_vip_as_its_own_address() {
    let Some(lab) = Lab::new() else { return };
    let client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    // The VIP is on the client's own network: only an answer to its ARP question gets a packet here.
    client.run(|| lab::sh("ip route add 10.98.0.0/24 dev wan"));
    lab.run(move |lab| {
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 8080, &[])]).unwrap();
        let stream = client.run(|| TcpStream::connect((VIP, 8080)).unwrap());
        let (accepted, peer) = accept(&listener);
        assert_eq!(accepted.local_addr().unwrap(), at(VIP, 8080));
        assert_eq!(peer.ip(), IpAddr::from([10, 77, 0, 2]));
        assert_eq!(stream.peer_addr().unwrap(), at(VIP, 8080));
        assert_eq!(kernel.stats().unwrap(), [(at(VIP, 8080), VipStats { steered: 1, ..NONE })]);
        kernel.shutdown().unwrap();
    });
}

/// The VIP of IPv6 that lies within a device's network.
const NEAR: &str = "fd98::1";

/// What a device has of it.
fn near_address() -> String {
    lab::sh("ip -6 addr show dev lan to fd98::1/128")
}

#[test]
fn a_neighbour_reaches_an_ipv6_vip_whose_device_has_it_as_long_as_kvlb_does() {
    let Some(lab) = Lab::new() else { return };
    let client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    lab.sh("ip addr add fd98::ff/64 dev lan nodad");
    client.run(|| lab::sh("ip addr add fd98::2/64 dev wan nodad"));
    lab.run(move |lab| {
        let before = (lab::local_table(), lab::sh("ip -6 addr"));
        let listener = listen("[::ffff:127.0.0.1]:0");
        let serve = |kernel: &mut Kernel| {
            kernel.set_listeners(&[listener.as_fd()]).unwrap();
            kernel.sync(&[vip(NEAR, 80, &[]), vip("fd99::1", 80, &[])]).unwrap();
        };
        let reached = || {
            let stream = client.run(|| TcpStream::connect_timeout(&at(NEAR, 80), Duration::from_secs(5)).unwrap());
            let (accepted, peer) = accept(&listener);
            assert_eq!(
                (accepted.local_addr().unwrap(), peer.ip()),
                (at(NEAR, 80), "fd98::2".parse::<IpAddr>().unwrap())
            );
            drop(stream);
        };
        let mut kernel = lab.load();
        serve(&mut kernel);
        reached();
        // Nothing is sent from it unasked, and the other one, which is of no device's network, is on none.
        assert!(near_address().contains("deprecated") && !lab::sh("ip -6 addr").contains("fd99"), "{}", near_address());
        kernel.sync(&[]).unwrap();
        assert_eq!((lab::local_table(), lab::sh("ip -6 addr")), before);
        serve(&mut kernel);
        kernel.shutdown().unwrap();
        assert_eq!((lab::local_table(), lab::sh("ip -6 addr")), before);

        // After a crash the next one takes it over, with what it is to remove.
        let crash = || {
            let mut child = Child::start(Command::new(lab::this_program()), "child_that_is_near", &lab.pins);
            child.wait_for("near");
            child.kill();
            assert!(near_address().contains(NEAR));
        };
        crash();
        let mut kernel = lab.load();
        serve(&mut kernel);
        reached();
        kernel.shutdown().unwrap();
        assert_eq!((lab::local_table(), lab::sh("ip -6 addr")), before);
        crash();
        assert_eq!(kvlb::kernel::clear(&lab.pins, false).unwrap().routes, [NEAR.parse::<IpAddr>().unwrap()]);
        assert_eq!((lab::local_table(), lab::sh("ip -6 addr")), before);

        // Who has it already keeps it.
        lab::sh("ip addr add fd98::1/128 dev lan nodad");
        let mut kernel = lab.load();
        serve(&mut kernel);
        reached();
        kernel.shutdown().unwrap();
        assert!(near_address().contains(NEAR) && !near_address().contains("deprecated"));
    });
}

/// As a child process of other tests: has a VIP of the device's network, and waits to be killed.
#[test]
fn child_that_is_near() {
    let Some(pin_dir) = lab::pin_dir_from_parent() else { return };
    let mut kernel = Kernel::load(&Config { pin_dir, ..Config::default() }).unwrap();
    kernel.sync(&[vip(NEAR, 80, &[])]).unwrap();
    lab::tell("near");
    loop {
        thread::park();
    }
}

#[test]
fn port_0_takes_the_ports_that_have_no_vip_of_their_own() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[]), vip(VIP, 0, &[])]).unwrap();
        for port in [1, 80, 443, 65535] {
            let _stream = TcpStream::connect((VIP, port)).unwrap();
            assert_eq!(accept(&listener).0.local_addr().unwrap(), at(VIP, port));
        }
        let steered = |(at, stats): (SocketAddr, VipStats)| (at.port(), stats.steered);
        assert_eq!(kernel.stats().unwrap().into_iter().map(steered).collect::<Vec<_>>(), [(0, 3), (80, 1)]);
    });
}

#[test]
fn what_is_not_for_a_vip_passes_untouched() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let (ours, others) = (listen("127.0.0.1:0"), listen("127.0.0.1:0"));
        kernel.set_listeners(&[ours.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        let there = others.local_addr().unwrap();
        let _stream = TcpStream::connect(there).unwrap();
        assert_eq!(accept(&others).0.local_addr().unwrap(), there);
        assert_refused(VIP, 81);
        assert_eq!(kernel.stats().unwrap()[0].1, NONE);
    });
}

#[test]
fn listeners_share_the_connections_and_each_finds_one_while_their_number_changes() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let listeners: Vec<_> = (0..4).map(|_| reuseport_listener(0)).collect();
        let fds: Vec<_> = listeners.iter().map(AsFd::as_fd).collect();
        kernel.set_listeners(&fds).unwrap();
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        let shares = connect_and_count(200, &listeners);
        assert_eq!(shares.iter().sum::<usize>(), 200, "{shares:?}");
        // 50 each is expected; fewer than 20 would be five standard deviations off.
        assert!(shares.iter().all(|share| *share >= 20), "{shares:?}");

        kernel.set_listeners(&fds[2..]).unwrap();
        let shares = connect_and_count(100, &listeners);
        assert_eq!((shares[0] + shares[1], shares[2] + shares[3]), (0, 100), "{shares:?}");

        // A client that never stops while data threads come and go.
        let client = thread::spawn(|| (0..1000).filter(|_| TcpStream::connect((VIP, 80)).is_err()).count());
        let mut turn = 1;
        while !client.is_finished() {
            kernel.set_listeners(&fds[..turn]).unwrap();
            turn = turn % 4 + 1;
        }
        assert_eq!(client.join().unwrap(), 0, "connections were refused");
        let stats = kernel.stats().unwrap()[0].1;
        assert_eq!(VipStats { steered: 0, ..stats }, NONE);
        assert!(stats.steered >= 1300, "{stats:?}");
    });
}

#[test]
fn of_listeners_that_share_one_port_the_kernel_picks_the_one_that_the_program_names() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let first = reuseport_listener(0);
        let second = reuseport_listener(first.local_addr().unwrap().port());
        kernel.set_listeners(&[second.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        assert_eq!(connect_and_count(20, &[first, second]), [0, 20]);
    });
}

#[test]
fn a_vip_that_is_removed_or_drains_refuses_while_the_others_and_open_connections_go_on() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[]), vip(VIP, 81, &[]), vip(VIP, 82, &[])]).unwrap();
        let open = TcpStream::connect((VIP, 82)).unwrap();
        let (mut accepted, _) = accept(&listener);
        let draining = Vip { phase: Phase::Draining, ..vip(VIP, 82, &[]) };
        kernel.sync(&[vip(VIP, 80, &[]), draining.clone()]).unwrap();
        assert_refused(VIP, 81);
        assert_refused(VIP, 82);
        let _other = TcpStream::connect((VIP, 80)).unwrap();
        accept(&listener);

        kernel.sync(&[draining]).unwrap();
        accepted.write_all(b"still here\n").unwrap();
        let mut line = String::new();
        BufReader::new(open).read_line(&mut line).unwrap();
        assert_eq!(line, "still here\n");

        kernel.sync(&[]).unwrap();
        assert_eq!(kernel.stats().unwrap(), []);
        assert_eq!(lab::vip_routes(), "");
    });
}

#[test]
fn without_healthy_endpoints_the_proxy_gets_the_connection_or_the_kernel_resets_it_as_the_rule_says() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        let down = [endpoint(1, EndpointState::ProbeDown)];
        let reset = |endpoints| Vip { no_endpoint: NoEndpoint::Reset, ..vip(VIP, 81, endpoints) };
        kernel.sync(&[vip(VIP, 80, &down), reset(&down)]).unwrap();
        let _stream = TcpStream::connect((VIP, 80)).unwrap();
        accept(&listener);
        assert_refused(VIP, 81);
        let stats: Vec<_> = kernel.stats().unwrap().into_iter().map(|(_, stats)| stats).collect();
        assert_eq!(stats, [VipStats { steered: 1, ..NONE }, VipStats { refused: 1, ..NONE }]);

        kernel.sync(&[reset(&[endpoint(1, EndpointState::Up)])]).unwrap();
        assert!(TcpStream::connect((VIP, 81)).is_ok());
    });
}

#[test]
fn bpftool_prints_endpoints_and_their_state_by_name() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        use EndpointState::{AdminDown, BreakerOpen, Draining, HalfOpen, ProbeDown, Unknown, Up};
        let mut kernel = lab.load();
        for state in [ProbeDown, AdminDown, BreakerOpen, Draining, HalfOpen, Unknown] {
            kernel.sync(&[vip(VIP, 8080, &[endpoint(1, Up), endpoint(2, state)])]).unwrap();
            let shown = lab::dump(&lab.pins.join("VIPS"));
            assert_eq!(shown.len(), 1);
            let (key, info) = (&shown[0]["key"], &shown[0]["value"]);
            assert_eq!(key["port"], 8080);
            assert_eq!(key["addr"].as_array().unwrap()[12..], [10, 98, 0, 1]);
            assert_eq!((&info["ep_count"], &info["healthy"], &info["rule"]), (&2.into(), &1.into(), &7.into()));
            let base = usize::try_from(info["ep_base"].as_u64().unwrap()).unwrap();
            let shown = lab::dump(&lab.pins.join("EPS"));
            assert_eq!(shown[base]["value"]["state"], "Up");
            assert_eq!(shown[base + 1]["value"]["state"], format!("{state:?}"));
            assert_eq!(shown[base + 1]["value"]["port"], 8000);
        }
        let stats = lab::dump(&lab.pins.join("STATS"));
        assert_eq!(stats[0]["values"][0]["value"]["steered"], 0, "{}", stats[0]);
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it measures")]
fn a_change_of_health_of_a_hundred_vips_is_in_the_kernel_within_10_ms() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let of = |state| -> Vec<Vip> { (0..100).map(|port| vip(VIP, 8000 + port, &[endpoint(1, state)])).collect() };
        let lists = [of(EndpointState::Up), of(EndpointState::ProbeDown)];
        let mut times: Vec<_> = (0..12)
            .map(|turn| {
                let start = Instant::now();
                kernel.sync(&lists[turn % 2]).unwrap();
                start.elapsed()
            })
            .collect();
        times.sort();
        // The median: this machine does other things, too.
        assert!(times[6] < Duration::from_millis(10), "{times:?}");
    });
}

#[test]
fn a_vip_without_a_listener_refuses_and_the_programs_log_says_so() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let mut log = kernel.take_log().unwrap();
        kernel.sync(&[vip(VIP, 8080, &[])]).unwrap();
        for _ in 0..40 {
            assert_refused(VIP, 8080);
        }
        assert_eq!(kernel.stats().unwrap()[0].1, VipStats { no_listener: 40, ..NONE });
        let lines = lab::captured(|| log.flush());
        assert!(lines.contains("no listener for VIP ::ffff:10.98.0.1 port 8080 (rule 7)"), "{lines}");
        // On each CPU the first, second, fourth, eighth ... only. Two CPUs with 20 each say 5 + 5.
        let cpus = thread::available_parallelism().unwrap().get();
        assert!(lines.lines().count() <= 5 * cpus.max(2), "{lines}");
    });
}

#[test]
fn an_ipv6_vip_is_steered_to_a_listener_of_both_families_and_not_to_one_of_ipv4() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let (both, four) = (listen("[::ffff:127.0.0.1]:0"), listen("127.0.0.1:0"));
        kernel.set_listeners(&[both.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[]), vip("fd98::1", 80, &[])]).unwrap();
        let _stream = TcpStream::connect(("fd98::1", 80)).unwrap();
        assert_eq!(accept(&both).0.local_addr().unwrap(), at("fd98::1", 80));
        let _stream = TcpStream::connect((VIP, 80)).unwrap();
        assert_eq!(accept(&both).0.local_addr().unwrap(), at("::ffff:10.98.0.1", 80));

        kernel.set_listeners(&[four.as_fd()]).unwrap();
        assert_refused("fd98::1", 80);
        assert_eq!(kernel.stats().unwrap()[1].1, VipStats { steered: 1, no_listener: 1, ..NONE });
        assert!(lab::local_table().contains("fd98::1"));
        kernel.shutdown().unwrap();
        assert!(!lab::local_table().contains("fd98::1"));
    });
}

#[test]
fn every_verdict_is_the_programs_own_under_test_run() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        const SK_DROP: u64 = 0;
        const SK_PASS: u64 = 1;
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        let reset = Vip { no_endpoint: NoEndpoint::Reset, ..vip(VIP, 81, &[]) };
        let draining = Vip { phase: Phase::Draining, ..vip(VIP, 82, &[]) };
        let network = |text: &str, bits| (text.parse().unwrap(), bits);
        let allowed = |addr, networks: &[_]| Vip { allowed: networks.to_vec(), ..vip(addr, 84, &[]) };
        let (four, six) = ([network("10.77.0.0", 24)], [network("fd77::", 64)]);
        let reset6 = Vip { no_endpoint: NoEndpoint::Reset, ..vip("fd98::1", 81, &[]) };
        let mut all = vec![vip(VIP, 80, &[]), reset, draining, allowed(VIP, &four), vip("fd98::1", 80, &[]), reset6];
        all.extend([allowed("fd98::1", &six), allowed("10.98.0.3", &six), allowed("fd98::3", &four)]);
        kernel.sync(&all).unwrap();
        let program = kernel.program_id().unwrap();
        let cases = [
            (TCP, VIP, 80, SK_PASS),
            (TCP, VIP, 81, SK_DROP),
            (TCP, VIP, 82, SK_PASS),
            (TCP, VIP, 83, SK_PASS),
            (UDP, VIP, 81, SK_PASS),
            (TCP, "10.98.0.2", 81, SK_PASS),
            (TCP, VIP, 84, SK_PASS),
            (TCP, "10.98.0.3", 84, SK_DROP),
            // Steered to a listener of IPv4 only, which cannot take it.
            (TCP, "fd98::1", 80, SK_PASS),
            (TCP, "fd98::1", 81, SK_DROP),
            (TCP, "fd98::1", 84, SK_PASS),
            (TCP, "fd98::3", 84, SK_DROP),
        ];
        for (protocol, addr, port, verdict) in cases {
            let got = lab::test_run(program, protocol, at(addr, port));
            assert_eq!(got, verdict, "protocol {protocol}, {addr} port {port}");
        }
        let counted: Vec<_> = kernel.stats().unwrap().into_iter().map(|(_, stats)| stats).collect();
        let (steered, refused) = (VipStats { steered: 1, ..NONE }, VipStats { refused: 1, ..NONE });
        let (denied, no_listener) = (VipStats { denied: 1, ..NONE }, VipStats { no_listener: 1, ..NONE });
        let of_v4 = [steered, refused, NONE, steered, denied];
        assert_eq!(counted, [&of_v4[..], &[no_listener, refused, no_listener, denied]].concat());
    });
}

#[test]
fn steering_tells_of_those_that_it_refuses() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = lab.load();
        let reset = |addr, port| Vip { no_endpoint: NoEndpoint::Reset, ..vip(addr, port, &[]) };
        let closed = Vip { allowed: vec![("10.1.0.0".parse().unwrap(), 16)], ..vip(VIP, 82, &[]) };
        kernel.sync(&[vip(VIP, 80, &[]), reset(VIP, 81), reset("fd98::1", 81), closed]).unwrap();
        let mut drops = kernel.take_drops().unwrap();
        for (addr, port, reason) in [
            (VIP, 80, DropReason::NoListener),
            (VIP, 81, DropReason::NoEndpoint),
            (VIP, 82, DropReason::Denied),
            ("fd98::1", 81, DropReason::NoEndpoint),
        ] {
            // Another of the same reason on the same CPU is told of a tenth of a second later.
            thread::sleep(Duration::from_millis(120));
            let source = at(if addr == VIP { VIP } else { "::1" }, free_port());
            let socket =
                socket2::Socket::new(socket2::Domain::for_address(source), socket2::Type::STREAM, None).unwrap();
            socket.bind(&source.into()).unwrap();
            let refused = socket.connect(&at(addr, port).into()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            let told = drops.take().unwrap();
            assert_eq!((told.reason, told.between, told.rule), (reason, Some((source, at(addr, port))), Some(7)));
            assert_eq!((told.count, drops.take()), (1, None));
        }
    });
}

/// A port that nobody has, in a namespace of a test's own.
fn free_port() -> u16 {
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(20_000);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn every_map_that_can_have_types_has_them() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let config = Config { pin_dir: lab.pins.clone(), xdp_devices: vec!["lo".to_owned()] };
        let kernel = Kernel::load(&config).unwrap();
        let shown = |what: &str, id: u64| -> Value {
            serde_json::from_str(&lab::sh(&format!("bpftool --json {what} show id {id}"))).unwrap()
        };
        let program = shown("prog", kernel.admission_id().unwrap().into());
        let mut names = Vec::new();
        for id in program["map_ids"].as_array().unwrap() {
            let map = shown("map", id.as_u64().unwrap());
            let name = map["name"].as_str().unwrap().to_owned();
            // The kernel takes no types for rings; the log's are aya's own.
            if name.starts_with("KVLB_") && map["type"] != "ringbuf" {
                assert!(map["btf_id"].as_u64() > Some(0), "{map}");
                names.push(name);
            }
        }
        names.sort();
        assert_eq!(
            names,
            ["KVLB_ACL4", "KVLB_ACL6", "KVLB_FRAMES", "KVLB_SAMPLED", "KVLB_STATS", "KVLB_SYN", "KVLB_VIPS"]
        );
        let sampled = lab::sh("bpftool map dump name KVLB_SAMPLED");
        for field in ["\"next_ns\": 0", "\"untold\": 0", "\"pad\": 0"] {
            assert!(sampled.contains(field), "{sampled}");
        }
        kernel.shutdown().unwrap();
    });
}

#[test]
fn what_was_there_stays_and_what_was_added_goes() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        lab::sh("ip addr add 10.98.0.5/32 dev lo && ip route add local 10.98.7.0/24 dev lo");
        let before = lab::local_table();
        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        kernel.sync(&[vip("10.98.0.5", 80, &[]), vip("10.98.7.7", 80, &[]), vip(VIP, 80, &[])]).unwrap();
        for addr in ["10.98.0.5", "10.98.7.7", VIP] {
            let _stream = TcpStream::connect((addr, 80)).unwrap();
            accept(&listener);
        }
        assert_eq!(lab::vip_routes().lines().count(), 1, "{}", lab::vip_routes());
        let program = kernel.program_id().unwrap();
        kernel.shutdown().unwrap();
        assert_eq!(lab::local_table(), before);
        assert!(!lab.pins.exists());
        assert!(!lab::is_loaded(program));
    });
}

#[test]
fn an_address_that_its_device_loses_is_ours_to_route_from_the_next_list_on() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        lab::sh("ip addr add 10.98.0.1/32 dev lo");
        let mut kernel = lab.load();
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        assert_eq!(lab::vip_routes(), "");
        lab::sh("ip addr del 10.98.0.1/32 dev lo");
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        assert!(lab::vip_routes().contains(VIP));
        // And someone else's address beside our route survives its removal.
        lab::sh("ip addr add 10.98.0.1/32 dev lo");
        kernel.shutdown().unwrap();
        assert_eq!(lab::vip_routes(), "");
        assert!(lab::local_table().contains(VIP));
    });
}

#[test]
fn a_panic_cleans_up_like_a_stop() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let before = lab::local_table();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut kernel = lab.load();
            kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
            assert_ne!(lab::local_table(), before);
            resume_unwind(Box::new("without a message on the screen"));
        }));
        assert!(panicked.is_err());
        assert_eq!(lab::local_table(), before);
        assert!(!lab.pins.exists());
    });
}

#[test]
fn a_killed_process_leaves_pins_and_routes_that_the_next_start_takes_over() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let before = lab::local_table();
        let program = lab::kill_holder(&lab.pins);
        assert!(lab.pins.join("VIPS").exists());
        assert_eq!(lab::vip_routes().lines().count(), 2, "{}", lab::vip_routes());
        // Links are not pinned: the program is gone with its process.
        assert!(!lab::is_loaded(program));
        assert_refused(VIP, 80);

        let mut kernel = lab.load();
        let listener = listen("127.0.0.1:0");
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
        assert!(TcpStream::connect((VIP, 80)).is_ok());
        assert!(!lab::vip_routes().contains("10.98.0.2"), "{}", lab::vip_routes());
        kernel.shutdown().unwrap();
        assert_eq!(lab::local_table(), before);
        assert!(!lab.pins.exists());
    });
}

#[test]
fn a_start_that_serves_nothing_removes_a_dead_predecessors_routes_when_it_stops() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let before = lab::local_table();
        lab::kill_holder(&lab.pins);
        assert_ne!(lab::local_table(), before);
        lab.load().shutdown().unwrap();
        assert_eq!(lab::local_table(), before);
    });
}

#[test]
fn what_a_crash_left_is_removed_without_a_start_and_a_running_one_is_named() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let before = lab::local_table();
        assert_eq!(kvlb::kernel::clear(&lab.pins, false).unwrap(), Cleared::default());
        assert!(!lab.pins.exists());
        let mut child = Child::start(Command::new(lab::this_program()), "child_that_holds", &lab.pins);
        child.wait_for("holding ");
        assert_eq!(kvlb::kernel::holders(&lab.pins), [child.id()]);
        assert!(matches!(kvlb::kernel::clear(&lab.pins, true), Err(Error::InUse { .. })));
        child.kill();
        assert_eq!(kvlb::kernel::holders(&lab.pins), [0; 0]);
        // One more, whose pins are lost, and one of IPv6.
        lab::sh("ip route add local 10.98.0.9 dev lo proto 75 && ip -6 route add local fd98::9 dev lo proto 75");
        let cleared = kvlb::kernel::clear(&lab.pins, false).unwrap();
        let addrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        assert_eq!(cleared.routes, addrs(&[VIP, "10.98.0.2"]));
        assert_eq!((cleared.pins.len(), cleared.others), (8, addrs(&["10.98.0.9", "fd98::9"])));
        assert!(!lab.pins.exists());
        let cleared = kvlb::kernel::clear(&lab.pins, true).unwrap();
        assert_eq!((cleared.routes, cleared.others), (addrs(&["10.98.0.9", "fd98::9"]), Vec::new()));
        assert_eq!(lab::local_table(), before);
    });
}

#[test]
fn one_process_holds_a_pin_directory_and_another_runs_beside_it_in_its_own() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut first = lab.load();
        let refused = Kernel::load(&Config { pin_dir: lab.pins.clone(), ..Config::default() }).unwrap_err();
        assert!(matches!(refused, Error::InUse { .. }), "{refused:?}");
        let beside = lab.pins.parent().unwrap().join(format!("{}-b", lab.pins.file_name().unwrap().display()));
        let mut second = Kernel::load(&Config { pin_dir: beside.clone(), ..Config::default() }).unwrap();
        let (one, two) = (listen("127.0.0.1:0"), listen("127.0.0.1:0"));
        first.set_listeners(&[one.as_fd()]).unwrap();
        second.set_listeners(&[two.as_fd()]).unwrap();
        let seconds = [vip("10.98.0.2", 80, &[]), vip(VIP, 81, &[])];
        first.sync(&[vip(VIP, 80, &[])]).unwrap();
        second.sync(&seconds).unwrap();
        let _streams = (TcpStream::connect((VIP, 80)).unwrap(), TcpStream::connect(("10.98.0.2", 80)).unwrap());
        assert_eq!(accept(&one).0.local_addr().unwrap(), at(VIP, 80));
        assert_eq!(accept(&two).0.local_addr().unwrap(), at("10.98.0.2", 80));
        let _stream = TcpStream::connect((VIP, 81)).unwrap();
        assert_eq!(accept(&two).0.local_addr().unwrap(), at(VIP, 81));

        first.shutdown().unwrap();
        assert!(TcpStream::connect(("10.98.0.2", 80)).is_ok());
        assert!(beside.join("VIPS").exists());
        // The address that both served was routed by the one that stopped.
        second.sync(&seconds).unwrap();
        assert!(TcpStream::connect((VIP, 81)).is_ok());
        second.shutdown().unwrap();
        assert!(!beside.exists());
    });
}

#[test]
fn without_privileges_the_error_says_which_are_missing_and_nothing_is_left() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(["--bounding-set", "-all", "--inh-caps", "-all"]).arg(lab::this_program());
        let output = Child::start(setpriv, "child_that_loads", &lab.pins).finish();
        assert!(output.contains("no privilege to") && output.contains("CAP_BPF"), "{output}");
        assert!(!lab.pins.exists());
    });
}

#[test]
fn the_privileges_that_the_error_names_are_enough() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut setpriv = Command::new("setpriv");
        let caps = "-all,+bpf,+net_admin";
        setpriv.args(["--bounding-set", caps, "--inh-caps", "-all"]).arg(lab::this_program());
        let output = Child::start(setpriv, "child_that_loads", &lab.pins).finish();
        assert!(output.contains("loaded"), "{output}");
        assert!(!lab.pins.exists());
    });
}

#[test]
fn the_daemon_may_move_it_between_threads() {
    fn moves<T: Send>() {}
    moves::<Kernel>();
}

/// As a child process of other tests: loads, serves, and waits to be killed.
#[test]
fn child_that_holds() {
    let Some(pin_dir) = lab::pin_dir_from_parent() else { return };
    let mut kernel = Kernel::load(&Config { pin_dir, ..Config::default() }).unwrap();
    kernel.sync(&[vip(VIP, 80, &[]), vip("10.98.0.2", 80, &[])]).unwrap();
    lab::tell(&format!("holding {}", kernel.program_id().unwrap()));
    loop {
        thread::park();
    }
}

/// As a child process of other tests: says how loading and serving went.
#[test]
fn child_that_loads() {
    let Some(pin_dir) = lab::pin_dir_from_parent() else { return };
    let run = || -> Result<(), Error> {
        let mut kernel = Kernel::load(&Config { pin_dir, ..Config::default() })?;
        kernel.set_listeners(&[listen("127.0.0.1:0").as_fd()])?;
        kernel.sync(&[vip(VIP, 80, &[])])?;
        kernel.shutdown()
    };
    match run() {
        Ok(()) => lab::tell("loaded"),
        Err(error) => lab::tell(&format!("{error} ({error:?})")),
    }
}

fn at(addr: &str, port: u16) -> SocketAddr {
    SocketAddr::new(addr.parse().unwrap(), port)
}

fn endpoint(last: u8, state: EndpointState) -> VipEndpoint {
    VipEndpoint {
        addr: [10, 0, 0, last].into(),
        port: 8000,
        state,
        weight: 1,
        may_be_asked: state == EndpointState::Up,
    }
}

fn vip(addr: &str, port: u16, endpoints: &[VipEndpoint]) -> Vip {
    Vip {
        addr: addr.parse().unwrap(),
        port,
        rules: vec![7],
        endpoints: endpoints.to_vec(),
        no_endpoint: NoEndpoint::Proxy,
        phase: Phase::Serving,
        allowed: Vec::new(),
        syn: None,
    }
}

fn listen(addr: &str) -> TcpListener {
    TcpListener::bind(addr).unwrap()
}

/// A listener on loopback that lets others share its port (any port for 0), and keeps more connections that nobody
/// takes than the 128 of the standard library's.
fn reuseport_listener(port: u16) -> TcpListener {
    use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, sockopt};
    let fd = socket::socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    socket::setsockopt(&fd, sockopt::ReusePort, &true).unwrap();
    socket::bind(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, port)).unwrap();
    socket::listen(&fd, Backlog::new(4096).unwrap()).unwrap();
    fd.into()
}

/// The next connection to `listener`, which the client has made already.
fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let (_, stream, peer) = accept_any(std::slice::from_ref(listener));
    (stream, peer)
}

/// The next connection to one of `listeners`, and to which.
fn accept_any(listeners: &[TcpListener]) -> (usize, TcpStream, SocketAddr) {
    // The kernel may hand the last packet of the handshake on a moment later.
    for _ in 0..5000 {
        for (index, listener) in listeners.iter().enumerate() {
            listener.set_nonblocking(true).unwrap();
            if let Ok((stream, peer)) = listener.accept() {
                stream.set_nonblocking(false).unwrap();
                return (index, stream, peer);
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("the connection is at none of these listeners after 5 s");
}

/// How many of `count` connections to the VIP each listener takes.
fn connect_and_count(count: usize, listeners: &[TcpListener]) -> Vec<usize> {
    let mut shares = vec![0; listeners.len()];
    for _ in 0..count {
        let _stream = TcpStream::connect((VIP, 80)).unwrap();
        let (index, ..) = accept_any(listeners);
        shares[index] += 1;
    }
    shares
}

fn assert_refused(addr: &str, port: u16) {
    let error = TcpStream::connect((addr, port)).expect_err("nobody listens there");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{addr} port {port}: {error}");
}
