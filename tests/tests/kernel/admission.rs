//! Admission: which frames pass at a device, which are dropped, and that the device is free again.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvlb::kernel::{
    AdmissionMode, Config, DropReason, Dropped, Error, FrameStats, Kernel, Phase, SynLimit, Vip, VipStats,
};
use socket2::{Domain, SockRef, Socket, Type};

use crate::frames::{self, ACK, FIN, IPV4, IPV6, RST, SYN, Sender, TCP, ethernet, padding, segment, tcp, v4, v6};
use crate::lab::{self, Inside, Lab};
use crate::{NONE, VIP, assert_refused, at, listen, reuseport_listener, vip};

const XDP_DROP: u64 = 1;
const XDP_PASS: u64 = 2;

/// Nobody's, but for being told from others.
const CLIENT: &str = "10.77.0.2";
const CLIENT6: &str = "fd77::2";
const VIP6: &str = "fd98::1";

/// A kernel with admission at these devices.
fn load(lab: &Inside, devices: &[&str]) -> Result<Kernel, Error> {
    let xdp_devices = devices.iter().map(|&device| device.to_owned()).collect();
    Kernel::load(&Config { pin_dir: lab.pins.clone(), xdp_devices })
}

/// What is counted of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Vip(VipStats),
    Frame(FrameStats),
}

/// The counters of all VIPs together, and of frames for none.
fn counters(kernel: &Kernel) -> (VipStats, FrameStats) {
    let stats = kernel.stats().unwrap().into_iter().map(|(_, stats)| stats);
    (stats.fold(NONE, VipStats::plus), kernel.frames().unwrap())
}

const SYN_PASSED: Counted = Counted::Vip(VipStats { syn_passed: 1, ..NONE });
const DENIED: Counted = Counted::Vip(VipStats { syn_denied: 1, ..NONE });
const CUT: Counted = Counted::Vip(VipStats { cut: 1, ..NONE });
const OTHER: Counted = Counted::Vip(VipStats { other: 1, ..NONE });
const NO_FRAMES: FrameStats = FrameStats { foreign: 0, fragments: 0, malformed: 0, chains: 0 };
const FOREIGN: Counted = Counted::Frame(FrameStats { foreign: 1, ..NO_FRAMES });
const LATER: Counted = Counted::Frame(FrameStats { fragments: 1, ..NO_FRAMES });
const MALFORMED: Counted = Counted::Frame(FrameStats { malformed: 1, ..NO_FRAMES });
const CHAIN: Counted = Counted::Frame(FrameStats { chains: 1, ..NO_FRAMES });

/// Port 80 is open to all; 81 to some networks; 82 is leaving.
fn vips() -> Vec<Vip> {
    let some = ["10.77.0.0/24", "10.0.0.9/32", "fd77::/64"].map(|network| {
        let (addr, bits) = network.split_once('/').unwrap();
        (addr.parse().unwrap(), bits.parse().unwrap())
    });
    let mut vips = Vec::new();
    for addr in [VIP, VIP6] {
        vips.push(vip(addr, 80, &[]));
        vips.push(Vip { allowed: some.to_vec(), ..vip(addr, 81, &[]) });
        vips.push(Vip { phase: Phase::Draining, ..vip(addr, 82, &[]) });
    }
    vips
}

type Case = (&'static str, Vec<u8>, u64, Counted);

/// Segments to VIPs and elsewhere, of both families.
fn segments() -> Vec<Case> {
    let mut cases = Vec::new();
    for (client, vip, elsewhere) in [(CLIENT, VIP, "10.98.0.2"), (CLIENT6, VIP6, "fd98::2")] {
        let to = |port, flags| segment(at(client, 40_000), at(vip, port), flags);
        let from = |client: &str| segment(at(client, 40_000), at(vip, 81), SYN);
        let (stranger, other_family) = if vip == VIP { ("10.78.0.2", "0.0.0.0") } else { ("fd77:0:0:1::2", "::1") };
        cases.extend([
            ("a SYN", to(80, SYN), XDP_PASS, SYN_PASSED),
            ("a SYN that asks for ECN", to(80, SYN | 0xc0), XDP_PASS, SYN_PASSED),
            ("a SYN with FIN", to(80, SYN | FIN), XDP_PASS, SYN_PASSED),
            ("a SYN with ACK", to(80, SYN | ACK), XDP_PASS, OTHER),
            ("an ACK", to(80, ACK), XDP_PASS, OTHER),
            ("a RST", to(80, RST), XDP_PASS, OTHER),
            ("no flags", to(80, 0), XDP_PASS, OTHER),
            ("a SYN from a network that may", to(81, SYN), XDP_PASS, SYN_PASSED),
            ("a SYN from one that may not", from(stranger), XDP_DROP, DENIED),
            ("a SYN from nowhere", from(other_family), XDP_DROP, DENIED),
            ("an ACK from one that may not", segment(at(stranger, 1), at(vip, 81), ACK), XDP_PASS, OTHER),
            ("a SYN to a VIP that leaves", to(82, SYN), XDP_PASS, SYN_PASSED),
            ("a SYN to another port", to(83, SYN), XDP_PASS, FOREIGN),
            ("a SYN elsewhere", segment(at(client, 1), at(elsewhere, 80), SYN), XDP_PASS, FOREIGN),
        ]);
    }
    cases.push(("a SYN from the one host", segment(at("10.0.0.9", 1), at(VIP, 81), SYN), XDP_PASS, SYN_PASSED));
    cases.push(("a SYN from the next host", segment(at("10.0.0.8", 1), at(VIP, 81), SYN), XDP_DROP, DENIED));
    cases
}

/// What stands before TCP, and what cuts it off.
fn shapes() -> Vec<Case> {
    let (c4, a4): (IpAddr, IpAddr) = (CLIENT.parse().unwrap(), VIP.parse().unwrap());
    let (c6, a6): (IpAddr, IpAddr) = (CLIENT6.parse().unwrap(), VIP6.parse().unwrap());
    let (syn, ack) = (tcp(40_000, 80, SYN), tcp(40_000, 80, ACK));
    let four = |options, fragment, payload: &[u8]| ethernet(&[], IPV4, &v4(c4, a4, options, fragment, TCP, payload));
    let six = |headers: &[(u8, Vec<u8>)], payload: &[u8]| ethernet(&[], IPV6, &v6(c6, a6, headers, TCP, payload));
    let plain = v4(c4, a4, 0, 0, TCP, &syn);
    let mut wrong_length = plain.clone();
    wrong_length[0] = 0x44;
    let padded = [four(0, 0, &[]), syn.clone()].concat();
    let (hop, routing) = ((0, vec![1, 4, 0, 0, 0, 0]), |left| (43, vec![0, left, 0, 0, 0, 0]));
    let truncated = |bytes: usize| ethernet(&[], IPV4, &plain)[..bytes].to_vec();
    vec![
        ("one tag", ethernet(&[0x8100], IPV4, &plain), XDP_PASS, SYN_PASSED),
        ("two tags", ethernet(&[0x88a8, 0x8100], IPV6, &v6(c6, a6, &[], TCP, &syn)), XDP_PASS, SYN_PASSED),
        ("three tags", ethernet(&[0x88a8, 0x8100, 0x8100], IPV4, &plain), XDP_PASS, FOREIGN),
        ("ARP", ethernet(&[], 0x0806, &[0; 28]), XDP_PASS, FOREIGN),
        ("UDP", ethernet(&[], IPV4, &v4(c4, a4, 0, 0, 17, &syn)), XDP_PASS, FOREIGN),
        ("options of IPv4", four(10, 0, &syn), XDP_PASS, SYN_PASSED),
        ("a first fragment with all of TCP's head", four(0, 0x2000, &syn), XDP_PASS, SYN_PASSED),
        ("the same of an open connection", four(0, 0x2000, &ack), XDP_PASS, OTHER),
        ("a first fragment with the ports only", four(0, 0x2000, &syn[..8]), XDP_DROP, CUT),
        ("a first fragment without flags", four(0, 0x2000, &syn[..16]), XDP_DROP, CUT),
        ("a second fragment", four(0, 0x0001, &syn), XDP_PASS, LATER),
        ("a head that is too short", ethernet(&[], IPV4, &wrong_length), XDP_PASS, MALFORMED),
        ("TCP in the padding", padded, XDP_PASS, MALFORMED),
        ("no IP", truncated(14), XDP_PASS, MALFORMED),
        ("half of IP", truncated(24), XDP_PASS, MALFORMED),
        ("half of TCP", truncated(44), XDP_PASS, MALFORMED),
        ("all but a byte of TCP", truncated(53), XDP_PASS, MALFORMED),
        (
            "extension headers",
            six(&[hop, padding(), routing(0), frames::fragment(0, false)], &syn),
            XDP_PASS,
            SYN_PASSED,
        ),
        ("as many as are read", six(&vec![padding(); 8], &syn), XDP_PASS, SYN_PASSED),
        ("one more", six(&vec![padding(); 9], &syn), XDP_DROP, CHAIN),
        ("a long one", six(&[(60, vec![0; 2046])], &syn), XDP_PASS, SYN_PASSED),
        // Some 3500 bytes fit the first buffer of a frame under test (net/bpf/test_run.c).
        ("TCP in another buffer", six(&vec![(60, vec![0; 2046]); 3], &syn), XDP_PASS, SYN_PASSED),
        ("a first fragment of IPv6", six(&[frames::fragment(0, true)], &syn), XDP_PASS, SYN_PASSED),
        ("a cut one", six(&[frames::fragment(0, true)], &syn[..16]), XDP_DROP, CUT),
        ("a second one", six(&[frames::fragment(2, false)], &syn), XDP_PASS, LATER),
        ("one that is to go on", six(&[routing(1)], &syn), XDP_PASS, FOREIGN),
        ("encrypted", ethernet(&[], IPV6, &v6(c6, a6, &[], 50, &syn)), XDP_PASS, FOREIGN),
        ("a chain that is cut off", six(&[padding()], &[])[..56].to_vec(), XDP_PASS, MALFORMED),
    ]
}

#[test]
fn every_frame_gets_its_verdict_and_its_counter_and_stays_as_it_was() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = load(lab, &["lo"]).unwrap();
        kernel.sync(&vips()).unwrap();
        let program = kernel.admission_id().unwrap();
        for (what, frame, verdict, counted) in segments().into_iter().chain(shapes()) {
            let before = counters(&kernel);
            let (got, bytes) = lab::xdp_run(program, &frame, 1);
            assert_eq!(got, verdict, "{what}");
            assert!(bytes == frame, "{what}: the frame was changed");
            let after = counters(&kernel);
            let expected = match counted {
                Counted::Vip(vip) => (before.0.plus(vip), before.1),
                Counted::Frame(frame) => (before.0, before.1.plus(frame)),
            };
            assert_eq!(after, expected, "{what}");
        }
        kernel.shutdown().unwrap();
        assert!(!lab.pins.exists());
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it measures")]
fn a_source_has_one_bucket_for_all_ports_of_a_rule_and_others_have_their_own() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = load(lab, &["lo"]).unwrap();
        let syn = Some(SynLimit { rule: 7, per_sec: 1, burst: 5 });
        let others = Some(SynLimit { rule: 8, per_sec: 1, burst: 3 });
        let limited = |addr, port| Vip { syn, ..vip(addr, port, &[]) };
        let other = Vip { syn: others, ..vip(VIP, 82, &[]) };
        kernel.sync(&[limited(VIP, 80), limited(VIP, 81), limited(VIP6, 80), other, vip(VIP, 83, &[])]).unwrap();
        let mut log = kernel.take_log().unwrap();
        let program = kernel.admission_id().unwrap();
        let send = |client: &str, port, times| {
            let before = counters(&kernel).0;
            let vip = if client == CLIENT6 { VIP6 } else { VIP };
            lab::xdp_run(program, &segment(at(client, 40_000), at(vip, port), SYN), times);
            let after = counters(&kernel).0;
            (after.syn_passed - before.syn_passed, after.syn_over_rate - before.syn_over_rate)
        };
        let start = Instant::now();
        let lines = lab::captured(|| {
            let first = send(CLIENT, 80, 3);
            assert_eq!(first, (3, 0));
            let (rest, dropped) = send(CLIENT, 81, 1000);
            assert_eq!(rest + dropped, 1000);
            assert_eq!(send("10.77.0.3", 80, 1), (1, 0), "another source");
            assert_eq!(send(CLIENT, 82, 1), (1, 0), "another rule");
            assert_eq!(send(CLIENT, 83, 1000), (1000, 0), "no limit");
            assert_eq!(send(CLIENT6, 80, 1), (1, 0), "of whatever family");
            // A token falls each second, and no more than five are kept.
            assert!(3 + rest <= 5 + start.elapsed().as_secs(), "{rest}");
            assert!(3 + rest >= 5, "{rest}");
            thread::sleep(Duration::from_millis(1100));
            let (more, _) = send(CLIENT, 80, 1000);
            assert!(more >= 1 && 3 + rest + more <= 5 + start.elapsed().as_secs(), "{rest} and {more}");
            log.flush();
        });
        assert!(
            lines.contains("::ffff:10.77.0.2 sends more SYNs to VIP ::ffff:10.98.0.1 port 81 than rule 7"),
            "{lines}"
        );
        // On each CPU the first, second, fourth ... of some 2000.
        let cpus = thread::available_parallelism().unwrap().get();
        assert!(lines.lines().count() <= 11 * 3 * cpus, "{lines}");
        let buckets = lab::dump(&lab.pins.join("SYN"));
        assert_eq!(buckets.len(), 4, "{buckets:?}");
        assert!(buckets.iter().any(|entry| entry["key"]["rule"] == 8), "{buckets:?}");
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it measures")]
fn cpus_that_race_for_a_bucket_never_give_a_token_twice() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        const TIMES: u64 = 500_000;
        let mut kernel = load(lab, &["lo"]).unwrap();
        let syn = Some(SynLimit { rule: 7, per_sec: 100_000, burst: 10 });
        kernel.sync(&[Vip { syn, ..vip(VIP, 80, &[]) }]).unwrap();
        let program = kernel.admission_id().unwrap();
        let frame = segment(at(CLIENT, 40_000), at(VIP, 80), SYN);
        let start = Instant::now();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| lab::xdp_run(program, &frame, TIMES));
            }
        });
        let elapsed = start.elapsed();
        let stats = counters(&kernel).0;
        assert_eq!(stats.syn_passed + stats.syn_over_rate, 4 * TIMES);
        let budget = 10 + u64::try_from(elapsed.as_micros()).unwrap() / 10 + 1;
        assert!(stats.syn_passed <= budget, "{} of {budget} in {elapsed:?}", stats.syn_passed);
    });
}

/// Answers every connection with one byte, until it is told to end.
fn serve(listener: TcpListener, stop: Arc<AtomicBool>) -> thread::JoinHandle<()> {
    // Linux keeps to it in accept, too (man 7 socket).
    SockRef::from(&listener).set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            // Who has left meanwhile is not answered.
            if let Ok((mut stream, _)) = listener.accept() {
                drop(stream.write_all(b"!"));
            }
        }
    })
}

/// Whether a client at `from` is answered by `to` within two seconds.
fn answered(from: &str, to: SocketAddr) -> bool {
    let patience = Duration::from_secs(2);
    let ask = || -> std::io::Result<u8> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.bind(&at(from, 0).into())?;
        socket.connect_timeout(&to.into(), patience)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(patience))?;
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        Ok(byte[0])
    };
    ask().is_ok_and(|byte| byte == b'!')
}

/// Who sends a flood, and hears no answer: nobody's address, so that no RST makes room for the next SYN.
const FLOODER: &str = "10.77.0.9";
/// SYNs a second of a flood.
const PER_SECOND: u64 = 200_000;

/// A flood of SYNs from one client beside others that behave, at a device whose driver takes the program or not; `None`: no
/// device has admission. How long each of the others' connections took, until it was answered or given up.
#[expect(clippy::disallowed_methods, reason = "it measures")]
fn flood(mode: Option<AdmissionMode>, seconds: u64, cookies: bool) -> Vec<Duration> {
    const RATE: u32 = 100;
    const BURST: u32 = 50;
    let total = seconds * PER_SECOND;
    let Some(lab) = Lab::new() else { return Vec::new() };
    let client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    client.run(|| lab::sh("ip addr add 10.77.0.3/24 dev wan && ip addr add 10.77.0.4/24 dev wan"));
    client.run(|| lab::sh("ip route add 10.98.0.0/24 via 10.77.0.1"));
    if mode == Some(AdmissionMode::Generic) {
        // A device that has no driver of its own takes the program behind it only.
        lab.sh(
            "ip link add bridge type bridge && ip link set lan master bridge && ip addr del 10.77.0.1/24 dev lan && \
                ip addr add 10.77.0.1/24 dev bridge && ip link set bridge up",
        );
    }
    // Without cookies, what passes of the flood waits for its answer in a queue: one as long as the proxy's.
    lab.sh(&format!("sysctl -qw net.ipv4.tcp_syncookies={} net.ipv4.tcp_max_syn_backlog=4096", u8::from(cookies)));
    let far = client.run(|| lab::mac("wan")).map(|byte| format!("{byte:02x}")).join(":");
    let near = if mode == Some(AdmissionMode::Generic) { "bridge" } else { "lan" };
    lab.sh(&format!("ip neigh add {FLOODER} lladdr {far} dev {near}"));
    let (tell, told) = std::sync::mpsc::channel();
    lab.run(move |lab| {
        let device = if mode == Some(AdmissionMode::Generic) { "bridge" } else { "lan" };
        let devices = mode.map(|_| device);
        let mut kernel = load(lab, devices.as_slice()).unwrap();
        assert_eq!(kernel.admission(), mode.map(|mode| (device.to_owned(), mode)).as_slice());
        let stop = Arc::new(AtomicBool::new(false));
        let listener = reuseport_listener(0);
        kernel.set_listeners(&[listener.as_fd()]).unwrap();
        let server = serve(listener, Arc::clone(&stop));
        let syn = Some(SynLimit { rule: 7, per_sec: RATE, burst: BURST });
        let limited = |port| Vip { syn, ..vip(VIP, port, &[]) };
        kernel.sync(&[limited(80), limited(81)]).unwrap();
        assert!(client.run(|| answered(CLIENT, at(VIP, 81))));

        let target = if device == "lan" { lab::mac("lan") } else { lab::mac("bridge") };
        let start = Instant::now();
        let (sent, lost, others, time) = client.run(move || {
            // More connections than any queue holds.
            let frames: Vec<_> = (0..40_000)
                .map(|port| {
                    let mut frame = frames::true_syn(at(FLOODER, 10_000 + port), at(VIP, 80));
                    frame[..6].copy_from_slice(&target);
                    frame
                })
                .collect();
            let sender = Sender::new("wan");
            let lost = lab::tx_dropped("wan");
            let running = AtomicBool::new(true);
            let (sent, others) = thread::scope(|scope| {
                let asking: Vec<_> = ["10.77.0.3", "10.77.0.4"]
                    .into_iter()
                    .map(|from| {
                        let running = &running;
                        scope.spawn(move || {
                            let mut answers = Vec::new();
                            while running.load(Ordering::Relaxed) {
                                let asked = Instant::now();
                                answers.push((answered(from, at(VIP, 81)), asked.elapsed()));
                                thread::sleep(Duration::from_millis(20));
                            }
                            answers
                        })
                    })
                    .collect();
                let sent = sender.flood(&frames, PER_SECOND, total);
                running.store(false, Ordering::Relaxed);
                (sent, asking.into_iter().map(|asking| asking.join().unwrap()).collect::<Vec<_>>())
            });
            (sent, lab::tx_dropped("wan") - lost, others, start.elapsed())
        });
        // The last frames may still be on their way.
        let mut stats = kernel.stats().unwrap()[0].1;
        for _ in 0..100 {
            if mode.is_none() || stats.syn_passed + stats.syn_over_rate == sent {
                break;
            }
            thread::sleep(Duration::from_millis(10));
            stats = kernel.stats().unwrap()[0].1;
        }
        let others: Vec<_> = others.into_iter().flatten().collect();
        let answers = others.iter().filter(|(answered, _)| *answered).count();
        lab::tell(&format!(
            "{mode:?}: {sent} sent in {time:?}, {lost} lost before the device, {stats:?}, others {answers} of {}",
            others.len()
        ));
        // As many as this machine sends: what passes depends on the time only, and no count on either.
        assert!(sent >= total / 10, "this machine is too busy for a flood: {sent}");
        if mode.is_some() {
            let budget = u64::from(BURST) + u64::try_from(time.as_millis()).unwrap() * u64::from(RATE) / 1000 + 1;
            assert!(stats.syn_passed <= budget, "{} passed of {budget}", stats.syn_passed);
            assert!(stats.syn_passed >= u64::from(BURST), "{stats:?}");
            // A frame that the cable drops is not sent in most cases, and its sender told so.
            let counted = stats.syn_over_rate + stats.syn_passed;
            assert!(counted == sent || counted == sent - lost, "{sent} sent, {lost} lost, {stats:?}");
            assert_eq!((stats.syn_denied, stats.cut), (0, 0));
            assert!(others.len() >= 20 && answers == others.len(), "{answers} of {} were answered", others.len());
        }
        tell.send(others.into_iter().map(|(_, took)| took).collect()).unwrap();
        kernel.shutdown().unwrap();
        stop.store(true, Ordering::Relaxed);
        server.join().unwrap();
    });
    told.recv().unwrap()
}

/// Not a test of its own: what others wait while one source floods, with admission and without, in the same run, for
/// `docs/kernel.md` (`--ignored --nocapture`).
#[test]
#[ignore = "it measures, and promises nothing"]
fn what_others_wait_in_a_flood() {
    for cookies in [true, false] {
        let p99 = |mode| {
            let mut took = flood(mode, 10, cookies);
            took.sort();
            let at = |percent: usize| took.get(took.len() * percent / 100).copied().unwrap_or_default();
            lab::tell(&format!("{mode:?}: {} connections, p50 {:?}, p99 {:?}", took.len(), at(50), at(99)));
            at(99).as_secs_f64()
        };
        let modes = [None, Some(AdmissionMode::Native), Some(AdmissionMode::Generic)];
        let [off, native, generic] = modes.map(p99);
        let (native, generic) = (off / native, off / generic);
        lab::tell(&format!(
            "SYN cookies {cookies}: p99 without admission is {native:.1} times that of native, {generic:.1} of generic"
        ));
    }
}

#[test]
fn a_flood_from_one_source_takes_its_tokens_and_nobody_elses_in_the_driver() {
    flood(Some(AdmissionMode::Native), 3, true);
}

#[test]
fn a_flood_from_one_source_takes_its_tokens_and_nobody_elses_behind_the_driver() {
    flood(Some(AdmissionMode::Generic), 3, true);
}

#[test]
fn who_may_not_connect_is_dropped_at_the_device_and_refused_without_one() {
    let Some(lab) = Lab::new() else { return };
    let client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    client.run(|| lab::sh("ip addr add 10.77.0.3/24 dev wan && ip route add 10.98.0.0/24 via 10.77.0.1"));
    client.run(|| lab::sh("ip addr add fd77::2/64 dev wan nodad && ip route add fd98::/64 via fd77::1"));
    lab.sh("ip addr add fd77::1/64 dev lan nodad");
    lab.run(move |lab| {
        let networks = [("10.77.0.2".parse().unwrap(), 32), ("fd77::2".parse().unwrap(), 128)];
        let stop = Arc::new(AtomicBool::new(false));
        for devices in [&["lan"][..], &[]] {
            let mut kernel = load(lab, devices).unwrap();
            let listener = listen("[::ffff:127.0.0.1]:0");
            kernel.set_listeners(&[listener.as_fd()]).unwrap();
            let server = serve(listener, Arc::clone(&stop));
            let allowed = |addr| Vip { allowed: networks.to_vec(), ..vip(addr, 80, &[]) };
            kernel.sync(&[allowed(VIP), allowed(VIP6)]).unwrap();
            assert!(client.run(|| answered(CLIENT, at(VIP, 80))));
            assert!(client.run(|| answered(CLIENT6, at(VIP6, 80))));
            assert!(!client.run(|| answered("10.77.0.3", at(VIP, 80))));
            let stats = kernel.stats().unwrap();
            if devices.is_empty() {
                assert_eq!((stats[0].1.denied, stats[0].1.syn_denied, stats[0].1.steered), (1, 0, 1), "{stats:?}");
            } else {
                // A client tries again after a second.
                assert!(stats[0].1.denied == 0 && (1..=3).contains(&stats[0].1.syn_denied), "{stats:?}");
            }
            // From this host itself no frame arrives at a device.
            assert_refused(VIP, 80);
            assert_refused(VIP6, 80);
            let stats = kernel.stats().unwrap();
            assert_eq!(stats[1].1.denied, 1, "{stats:?}");
            // A change of the list counts for the next connection.
            kernel.sync(&[vip(VIP, 80, &[]), allowed(VIP6)]).unwrap();
            assert!(client.run(|| answered("10.77.0.3", at(VIP, 80))));
            let left = lab::dump(&lab.pins.join("ACL4"));
            assert_eq!(left.len(), 1, "the list of the other VIP: {left:?}");
            kernel.sync(&[vip(VIP, 80, &[])]).unwrap();
            assert_eq!(lab::dump(&lab.pins.join("ACL4")).len() + lab::dump(&lab.pins.join("ACL6")).len(), 0);
            kernel.shutdown().unwrap();
            stop.store(true, Ordering::Relaxed);
            server.join().unwrap();
            stop.store(false, Ordering::Relaxed);
        }
    });
}

#[test]
fn a_device_is_free_again_after_a_stop_a_panic_and_a_kill() {
    let Some(lab) = Lab::new() else { return };
    let _client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    lab.run(|lab| {
        assert!(!lab::has_xdp("lan"));
        let kernel = load(lab, &["lan", "lo"]).unwrap();
        let expected = [("lan".to_owned(), AdmissionMode::Native), ("lo".to_owned(), AdmissionMode::Generic)];
        assert_eq!(kernel.admission(), expected);
        assert!(lab::has_xdp("lan") && lab::has_xdp("lo"));
        let program = kernel.admission_id().unwrap();
        kernel.shutdown().unwrap();
        assert!(!lab::has_xdp("lan") && !lab::has_xdp("lo") && !lab::is_loaded(program));

        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _kernel = load(lab, &["lan"]).unwrap();
            assert!(lab::has_xdp("lan"));
            resume_unwind(Box::new("without a message on the screen"));
        }));
        assert!(panicked.is_err() && !lab::has_xdp("lan") && !lab.pins.exists());

        let mut child = lab::Child::start(Command::new(lab::this_program()), "admission::child_that_admits", &lab.pins);
        let program = child.wait_for("admitting ").parse().unwrap();
        assert!(lab::has_xdp("lan"));
        child.kill();
        assert!(!lab::is_loaded(program));
        assert!(!lab::has_xdp("lan"));
        load(lab, &["lan"]).unwrap().shutdown().unwrap();
        assert!(!lab.pins.exists());
    });
}

#[test]
fn the_privileges_for_steering_are_enough_for_admission() {
    let Some(lab) = Lab::new() else { return };
    let _client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    lab.run(|lab| {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(["--bounding-set", "-all,+bpf,+net_admin", "--inh-caps", "-all"]).arg(lab::this_program());
        let mut child = lab::Child::start(setpriv, "admission::child_that_admits", &lab.pins);
        child.wait_for("admitting ");
        assert!(lab::has_xdp("lan"));
        child.kill();
        lab.load().shutdown().unwrap();
    });
}

#[test]
fn who_sent_too_much_before_a_crash_has_no_new_burst_after_it_unless_the_maps_are_anothers() {
    let Some(lab) = Lab::new() else { return };
    let _client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    lab.run(|lab| {
        let syn = segment(at(CLIENT, 40_000), at(VIP, 80), SYN);
        let limited = Vip { syn: Some(SynLimit { rule: 7, per_sec: 1, burst: 1000 }), ..vip(VIP, 80, &[]) };
        // What passes of 2000 SYNs, by the program of a kvlb that is killed then.
        let crash = || {
            let this = Command::new(lab::this_program());
            let mut child = lab::Child::start(this, "admission::child_that_limits", &lab.pins);
            let program: u32 = child.wait_for("limiting ").parse().unwrap();
            lab::xdp_run(program, &syn, 2000);
            child.kill();
            assert!(!lab::is_loaded(program));
        };
        crash();
        let mut kernel = load(lab, &["lan"]).unwrap();
        kernel.sync(std::slice::from_ref(&limited)).unwrap();
        lab::xdp_run(kernel.admission_id().unwrap(), &syn, 100);
        let stats = counters(&kernel).0;
        assert!(stats.syn_passed < 50 && stats.syn_passed + stats.syn_over_rate == 100, "{stats:?}");
        kernel.shutdown().unwrap();
        // After a stop nothing is left, and a map of another object is not used.
        crash();
        lab::sh(&format!(
            "bpftool map update pinned {} key 0 0 0 0 value 1 2 3 4 5 6 7 8",
            lab.pins.join("STAMP").display()
        ));
        let mut kernel = load(lab, &["lan"]).unwrap();
        kernel.sync(&[limited]).unwrap();
        lab::xdp_run(kernel.admission_id().unwrap(), &syn, 100);
        assert_eq!(counters(&kernel).0.syn_passed, 100);
        assert_ne!(lab::dump(&lab.pins.join("STAMP"))[0]["value"]["object"], 0x0807_0605_0403_0201_u64);
        kernel.shutdown().unwrap();
        assert!(!lab.pins.exists());
    });
}

/// As a child process of other tests: limits a source, and waits to be killed.
#[test]
fn child_that_limits() {
    let Some(pin_dir) = lab::pin_dir_from_parent() else { return };
    let mut kernel = Kernel::load(&Config { pin_dir, xdp_devices: vec!["lan".to_owned()] }).unwrap();
    kernel.sync(&[Vip { syn: Some(SynLimit { rule: 7, per_sec: 1, burst: 1000 }), ..vip(VIP, 80, &[]) }]).unwrap();
    lab::tell(&format!("limiting {}", kernel.admission_id().unwrap()));
    loop {
        thread::park();
    }
}

/// As a child process of other tests: judges frames, and waits to be killed.
#[test]
fn child_that_admits() {
    let Some(pin_dir) = lab::pin_dir_from_parent() else { return };
    let kernel = Kernel::load(&Config { pin_dir, xdp_devices: vec!["lan".to_owned()] }).unwrap();
    lab::tell(&format!("admitting {}", kernel.admission_id().unwrap()));
    loop {
        thread::park();
    }
}

#[test]
fn a_device_that_is_not_there_or_is_held_is_refused_and_nothing_is_left() {
    let Some(lab) = Lab::new() else { return };
    let _client = lab.neighbour("10.77.0.1/24", "10.77.0.2/24");
    lab.run(|lab| {
        let missing = load(lab, &["lan", "wan"]).unwrap_err();
        assert!(matches!(&missing, Error::NoDevice { device } if device == "wan"), "{missing:?}");
        assert!(!lab::has_xdp("lan") && !lab.pins.exists());

        lab::sh("ip tuntap add dev tunnel mode tun");
        let tunnel = load(lab, &["lan", "tunnel"]).unwrap_err();
        assert!(matches!(&tunnel, Error::NotEthernet { device } if device == "tunnel"), "{tunnel:?}");
        assert!(!lab::has_xdp("lan") && !lab.pins.exists());

        let kernel = load(lab, &["lo"]).unwrap();
        let beside = lab.pins.parent().unwrap().join(format!("{}-b", lab.pins.file_name().unwrap().display()));
        let devices = vec!["lan".to_owned(), "lo".to_owned()];
        let held = Kernel::load(&Config { pin_dir: beside.clone(), xdp_devices: devices }).unwrap_err();
        assert!(matches!(&held, Error::DeviceHeld { device, .. } if device == "lo"), "{held:?}");
        assert!(held.to_string().contains("bpftool net"), "{held}");
        assert!(!lab::has_xdp("lan") && lab::has_xdp("lo") && !beside.exists());
        kernel.shutdown().unwrap();
    });
}

/// Not a test of its own: what a frame costs, for `docs/kernel.md` (`--ignored --nocapture`).
#[test]
#[ignore = "it measures, and promises nothing"]
fn what_a_frame_costs() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = load(lab, &["lo"]).unwrap();
        let mut all = vips();
        all.push(Vip { syn: Some(SynLimit { rule: 7, per_sec: 1, burst: 1 }), ..vip(VIP, 84, &[]) });
        kernel.sync(&all).unwrap();
        let program = kernel.admission_id().unwrap();
        let to = |port, flags| segment(at(CLIENT, 40_000), at(VIP, port), flags);
        let stranger = segment(at("10.78.0.2", 1), at(VIP, 81), SYN);
        let six = segment(at(CLIENT6, 40_000), at(VIP6, 80), ACK);
        let arp = ethernet(&[], 0x0806, &[0; 28]);
        for (what, frame) in [
            ("an ACK to a VIP", to(80, ACK)),
            ("the same over IPv6", six),
            ("a segment elsewhere", to(83, ACK)),
            ("ARP", arp),
            ("a SYN that passes", to(80, SYN)),
            ("a SYN that is denied", stranger),
            ("a SYN over the rate", to(84, SYN)),
        ] {
            lab::tell(&format!("{what}: {} ns", lab::xdp_cost(program, &frame)));
        }
    });
}

#[test]
fn the_maps_show_networks_buckets_and_counters_by_name() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = load(lab, &["lo"]).unwrap();
        let limited = SynLimit { rule: 7, per_sec: 5, burst: 9 };
        let mut all = vips();
        all[1].syn = Some(limited);
        kernel.sync(&all).unwrap();
        lab::xdp_run(kernel.admission_id().unwrap(), &segment(at(CLIENT, 1), at(VIP, 81), SYN), 1);
        let vips = lab::dump(&lab.pins.join("VIPS"));
        let value = |port: u16| vips.iter().find(|vip| vip["key"]["port"] == port && vip["value"]["syn_rule"] == 7);
        let shown = value(81).unwrap();
        assert_eq!((&shown["value"]["syn_per_sec"], &shown["value"]["syn_burst"]), (&5.into(), &9.into()));
        assert_eq!(shown["value"]["flags"], 8 + 4);
        for (pin, count) in [("ACL4", 2), ("ACL6", 1), ("SYN", 1)] {
            assert_eq!(lab::dump(&lab.pins.join(pin)).len(), count, "{pin}");
        }
        let source = &lab::dump(&lab.pins.join("SYN"))[0];
        assert!(source["key"]["rule"] == 7 && source["value"]["full_at"].as_u64() > Some(0), "{source}");
        let frames = lab::dump(&lab.pins.join("FRAMES"));
        assert_eq!(frames[0]["values"][0]["value"]["chains"], 0, "{frames:?}");
        let network = &lab::dump(&lab.pins.join("ACL4"))[0];
        assert!(network["value"] == 7 && network["key"]["data"]["list"] == shown["value"]["allowed"], "{network}");
    });
}

#[test]
fn the_programs_tell_of_drops_with_who_and_why_and_how_many_there_were() {
    let Some(lab) = Lab::new() else { return };
    lab.run(|lab| {
        let mut kernel = load(lab, &["lo"]).unwrap();
        let mut all = vips();
        all.push(Vip { syn: Some(SynLimit { rule: 9, per_sec: 1, burst: 1 }), ..vip(VIP, 84, &[]) });
        kernel.sync(&all).unwrap();
        let mut drops = kernel.take_drops().unwrap();
        let program = kernel.admission_id().unwrap();
        let (c6, a6): (IpAddr, IpAddr) = (CLIENT6.parse().unwrap(), VIP6.parse().unwrap());
        let chain = v6(c6, a6, &vec![padding(); 9], TCP, &tcp(40_000, 80, SYN));
        let cut = v4(CLIENT.parse().unwrap(), VIP.parse().unwrap(), 0, 0x2000, TCP, &tcp(40_001, 80, SYN)[..8]);
        let syn = |from: &str, to| segment(at(from, 40_000), at(if from.contains(':') { VIP6 } else { VIP }, to), SYN);
        let rule = Some(7);
        let cases = [
            (syn("10.78.0.2", 81), DropReason::Acl, Some((at("10.78.0.2", 40_000), at(VIP, 81))), rule),
            (syn(CLIENT, 84), DropReason::Rate, Some((at(CLIENT, 40_000), at(VIP, 84))), rule),
            (ethernet(&[], IPV4, &cut), DropReason::Cut, Some((at(CLIENT, 40_001), at(VIP, 80))), rule),
            (ethernet(&[], IPV6, &chain), DropReason::Chain, None, None),
        ];
        lab::xdp_run(program, &cases[1].0, 1);
        for (frame, reason, between, rule) in cases {
            lab::xdp_run(program, &frame, 1);
            let told = Dropped { reason, between, rule, count: 1 };
            assert_eq!((drops.take(), drops.take()), (Some(told), None), "{reason:?}");
        }
        // Of what follows at once nobody is told, until a tenth of a second later. Wherever the frames are run, each is in
        // one count.
        let six = syn("fd77:0:0:1::2", 81);
        let (mut told, mut events, many) = (0, 0, 20_000);
        for _ in 0..5 {
            lab::xdp_run(program, &six, many);
        }
        let cpus = thread::available_parallelism().unwrap().get();
        for _ in 0..50 * cpus {
            thread::sleep(Duration::from_millis(110 / 10));
            lab::xdp_run(program, &six, 1);
            while let Some(dropped) = drops.take() {
                assert_eq!(
                    (dropped.reason, dropped.between.unwrap().0),
                    (DropReason::Acl, at("fd77:0:0:1::2", 40_000))
                );
                (told, events) = (told + u64::from(dropped.count), events + 1);
            }
        }
        let counted = kernel.stats().unwrap().iter().map(|(_, stats)| stats.syn_denied).sum::<u64>();
        lab::tell(&format!("{counted} drops, {told} in {events} events"));
        assert!(told <= counted && told >= 5 * many / 2 && events <= 50 * cpus, "{told} of {counted} in {events}");
        kernel.shutdown().unwrap();
    });
}

#[test]
fn counters_of_every_kind_are_expected_of_some_frame() {
    let all = segments().into_iter().chain(shapes()).map(|(.., counted)| counted).collect::<Vec<_>>();
    for counted in [SYN_PASSED, DENIED, CUT, OTHER, FOREIGN, LATER, MALFORMED, CHAIN] {
        assert!(all.contains(&counted), "{counted:?}");
    }
}
