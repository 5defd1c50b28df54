//! Endpoints that fail, and what is sent twice.

use std::io::Write as _;
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::on_both_back_ends;
use super::rig::{Endpoint, PATIENCE, Rig, eventually, get, letter, ok, post};
use crate::clock;
use crate::proxy::{ConnectFailure, Event, Haste, Io};

on_both_back_ends![
    an_endpoint_that_refuses_is_passed_over,
    an_endpoint_that_does_not_answer_the_connect_is_passed_over,
    a_stale_connection_is_replaced_once_and_unseen,
    a_request_that_may_have_started_is_never_sent_again,
    a_busy_endpoint_is_passed_over_once,
    a_busy_answer_passes_when_nobody_has_a_better_one,
    a_busy_answer_comes_whole_also_when_its_body_comes_late,
    every_other_status_passes_at_once,
    each_limit_has_its_code,
    a_body_that_comes_by_the_byte_is_not_waited_for,
    limits_cut_an_answer_that_stands_still,
    a_reader_that_stands_still_is_not_its_endpoint_s_fault,
    a_reused_connection_that_dies_late_is_not_asked_again,
    a_panic_costs_one_connection,
    heavy_decisions_leave_the_data_thread_alone,
    others_are_served_while_every_decision_thread_is_busy,
    a_decision_that_holds_the_thread_is_noticed_and_one_on_the_pool_does_not,
    a_decision_that_takes_too_long_is_made_without_the_prompt,
];

fn an_endpoint_that_refuses_is_passed_over(io: Io) {
    let endpoint = Endpoint::answering(b"third");
    let rig = Rig::start(io, &[Endpoint::refusing(), Endpoint::refusing(), endpoint.address, Endpoint::refusing()]);
    let mut client = rig.client();
    for _ in 0..20 {
        assert_eq!(client.ask(&post(b"{}")).body, b"third");
    }
    let events = rig.fake.events.lock().clone();
    assert_eq!(events[0], Event::ConnectFailed { position: 0, failure: ConnectFailure::Refused });
    assert_eq!(events[1], Event::ConnectFailed { position: 1, failure: ConnectFailure::Refused });
    assert_eq!((rig.counts.get("retried connect"), rig.counts.get("connect refused")), (40, 40));
    assert_eq!(rig.fake.retries_left.load(Ordering::SeqCst), i64::MAX, "what no endpoint saw costs no retry budget");
    // A body that goes through has not been touched either when the connect fails.
    *rig.fake.inspect.lock() = None;
    assert_eq!(client.ask(&post(&vec![b'x'; 100_000])).body, b"third");
    *rig.fake.endpoints.lock() = vec![Endpoint::refusing(), Endpoint::refusing()];
    let answer = client.ask(&post(b"{}"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (502, "backend_unreachable"));
    rig.fake.endpoints.lock().clear();
    let answer = client.ask(&post(b"{}"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (503, "no_healthy_backend"));
}

fn an_endpoint_that_does_not_answer_the_connect_is_passed_over(io: Io) {
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    full.listen(0).unwrap();
    let full = TcpListener::from(full);
    let address = full.local_addr().unwrap();
    let _queue: Vec<_> = (0..4)
        .filter_map(|_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok())
        .collect();
    let endpoint = Endpoint::answering(b"second");
    let rig = Rig::start(io, &[address, endpoint.address]);
    rig.fake.limits.lock().connect = Duration::from_millis(150);
    let start = clock::now();
    assert_eq!(rig.client().ask(&post(b"{}")).body, b"second");
    assert!((Duration::from_millis(140)..Duration::from_secs(2)).contains(&start.elapsed()), "{:?}", start.elapsed());
    let first = rig.fake.events.lock()[0];
    assert_eq!(first, Event::ConnectFailed { position: 0, failure: ConnectFailure::TimedOut });
}

fn a_stale_connection_is_replaced_once_and_unseen(io: Io) {
    // Reads the second request of each connection and closes without a word; some with a reset.
    let endpoint = Endpoint::start(|wire, number| {
        wire.request().unwrap();
        wire.send(&ok(number.to_string().as_bytes()));
        wire.request();
        if number % 2 == 1 {
            socket2::SockRef::from(&wire.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for number in 0..10 {
        let body = vec![b'x'; 30_000 * number];
        assert_eq!(client.ask(&post(&body)).body, number.to_string().as_bytes());
    }
    assert_eq!(rig.counts.get("retried stale_connection"), 9);
    assert_eq!(rig.fake.retries_left.load(Ordering::SeqCst), i64::MAX);
    // Idle connections that the endpoint has closed are not even tried.
    let endpoint = Endpoint::start(|wire, number| {
        wire.request().unwrap();
        wire.send(&ok(number.to_string().as_bytes()));
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for number in 0..10 {
        assert_eq!(client.ask(&get("/")).body, number.to_string().as_bytes());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((rig.counts.get("retried stale_connection"), rig.counts.get("reused")), (0, 0));
}

fn a_request_that_may_have_started_is_never_sent_again(io: Io) {
    let spare = Endpoint::answering(b"spare");
    // On a fresh connection: silence, a broken head.
    for front in ["", "HTTP/1.1 200 OK\r\ncontent-le"] {
        let endpoint = Endpoint::start(move |wire, _| {
            wire.request().unwrap();
            wire.send(front.as_bytes());
        });
        let rig = Rig::start(io, &[endpoint.address, spare.address]);
        let mut client = rig.client();
        let answer = client.ask(&post(b"{}"));
        assert_eq!((answer.status(), answer.own_code().as_str()), (502, "backend_died"));
        assert_eq!((endpoint.connections(), spare.connections()), (1, 0));
        assert_eq!(*rig.fake.events.lock(), [Event::Died { position: 0, status: 502 }]);
        assert_eq!(client.ask(&get("/nobody")).status(), 404, "the client's connection goes on");
    }
    // On a reused connection: once a byte of the answer has come, and on the fresh one that replaced it.
    let endpoint = Endpoint::start(|wire, number| {
        if number == 0 {
            wire.request().unwrap();
            wire.send(&ok(b"first"));
            wire.request().unwrap();
            wire.send(b"H");
        } else {
            wire.request().unwrap();
        }
    });
    let rig = Rig::start(io, &[endpoint.address, spare.address]);
    let mut client = rig.client();
    assert_eq!(client.ask(&post(b"{}")).body, b"first");
    assert_eq!(client.ask(&post(b"{}")).own_code(), "backend_died");
    assert_eq!(endpoint.connections(), 1);
    let endpoint = Endpoint::start(|wire, number| {
        wire.request().unwrap();
        if number == 0 {
            wire.send(&ok(b"first"));
            wire.request().unwrap();
        }
    });
    rig.fake.endpoints.lock()[0] = endpoint.address;
    assert_eq!(client.ask(&post(b"{}")).body, b"first");
    assert_eq!(client.ask(&post(b"{}")).own_code(), "backend_died");
    assert_eq!((endpoint.connections(), spare.connections()), (2, 0));
}

fn busy(status: u16) -> Endpoint {
    Endpoint::start(move |wire, _| {
        while let Some(_request) = wire.request() {
            let head = format!("HTTP/1.1 {status} Busy\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\n");
            wire.send(&[head.as_bytes(), b"busy"].concat());
        }
    })
}

fn a_busy_endpoint_is_passed_over_once(io: Io) {
    for status in [503, 429] {
        let (first, second) = (busy(status), Endpoint::answering(b"second"));
        let rig = Rig::start(io, &[first.address, second.address]);
        let mut client = rig.client();
        for _ in 0..5 {
            let answer = client.ask(&post(&[b'x'; 5000]));
            assert_eq!((answer.status(), &answer.body[..]), (200, &b"second"[..]));
        }
        assert_eq!(rig.counts.get("retried busy"), 5);
        drop(client);
        rig.settled();
    }
}

fn a_busy_answer_passes_when_nobody_has_a_better_one(io: Io) {
    let (first, second, third) = (busy(503), busy(429), Endpoint::answering(b"third"));
    let dying = Endpoint::start(|wire, _| drop(wire.request()));
    let rig = Rig::start(io, &[]);
    let mut client = rig.client();
    for (endpoints, status) in [
        (vec![first.address], 503),
        // Two tries are enough: what the second says is the answer.
        (vec![first.address, second.address, third.address], 429),
        (vec![first.address, Endpoint::refusing()], 503),
        (vec![first.address, Endpoint::refusing(), third.address], 200),
        (vec![second.address, dying.address, third.address], 429),
    ] {
        *rig.fake.endpoints.lock() = endpoints;
        let answer = client.ask(&post(b"{}"));
        assert_eq!(answer.status(), status);
        if status != 200 {
            assert_eq!((answer.field("retry-after"), &answer.body[..]), (Some("7"), &b"busy"[..]));
        }
    }
    *rig.fake.endpoints.lock() = vec![first.address, third.address];
    rig.fake.retries_left.store(0, Ordering::SeqCst);
    assert_eq!(client.ask(&post(b"{}")).status(), 503, "the retry budget is spent");
    rig.fake.retries_left.store(10, Ordering::SeqCst);
    *rig.fake.inspect.lock() = None;
    assert_eq!(client.ask(&post(&vec![b'x'; 100_000])).status(), 503, "a body that went through cannot go again");
}

fn a_busy_answer_comes_whole_also_when_its_body_comes_late(io: Io) {
    let heads = ["content-length: 12\r\n", "transfer-encoding: chunked\r\n", "connection: close\r\n"];
    let late = |status: u16| {
        Endpoint::start(move |wire, number| {
            while let Some(_request) = wire.request() {
                let framing = heads[number % heads.len()];
                wire.send(format!("HTTP/1.1 {status} Busy\r\nretry-after: 7\r\n{framing}\r\n").as_bytes());
                std::thread::sleep(Duration::from_secs(1));
                let in_chunks = framing.starts_with("transfer");
                for piece in ["busy", " and", " so "] {
                    let chunk = format!("4\r\n{piece}\r\n");
                    // Nobody wants it where another's answer came.
                    if wire.stream.write_all(if in_chunks { chunk.as_bytes() } else { piece.as_bytes() }).is_err() {
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
                let end = if in_chunks { &b"0\r\n\r\n"[..] } else { b"" };
                if wire.stream.write_all(end).is_err() || framing.starts_with("connection") {
                    return;
                }
            }
        })
    };
    let (first, second) = (late(503), late(429));
    let dying = Endpoint::start(|wire, _| {
        wire.request();
        // The body that is kept comes and ends meanwhile.
        std::thread::sleep(Duration::from_millis(1500));
    });
    let rig = Rig::start(io, &[]);
    for (endpoints, status) in [
        (vec![first.address], 503),
        (vec![first.address, Endpoint::refusing()], 503),
        (vec![first.address, dying.address], 503),
        (vec![first.address, second.address], 429),
    ] {
        *rig.fake.endpoints.lock() = endpoints;
        let clients = heads.map(|_| {
            let mut client = rig.client();
            client.send(&post(b"{}"));
            client
        });
        for mut client in clients {
            let answer = client.answer();
            assert_eq!((answer.status(), answer.field("retry-after")), (status, Some("7")));
            assert_eq!(answer.body, b"busy and so ", "{}", answer.head);
        }
    }
    rig.settled();
}

fn every_other_status_passes_at_once(io: Io) {
    let spare = Endpoint::answering(b"spare");
    for status in [400, 404, 422, 500, 501, 502, 504, 418, 299] {
        let endpoint = busy(status);
        let rig = Rig::start(io, &[endpoint.address, spare.address]);
        let answer = rig.client().ask(&post(b"{}"));
        assert_eq!((answer.status(), &answer.body[..]), (status, &b"busy"[..]));
    }
    assert_eq!(spare.connections(), 0);
}

fn each_limit_has_its_code(io: Io) {
    let endpoint = Endpoint::start(|wire, _| drop(wire.rest()));
    let rig = Rig::with(io, &[endpoint.address], |config| {
        config.client_head = Duration::from_millis(80);
        config.client_idle = Duration::from_millis(150);
    });
    rig.fake.limits.lock().request_body = Duration::from_millis(80);
    let mut client = rig.client();
    client.send(b"GET / HTTP/1.1\r\nHo");
    let answer = client.answer();
    assert_eq!((answer.status(), answer.own_code().as_str()), (408, "request_timeout"));
    assert_eq!(client.rest(), b"");
    for inspect in [Some(1 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        client.send(&post(&[b'x'; 1000])[..600]);
        let answer = client.answer();
        assert_eq!((answer.status(), answer.own_code().as_str()), (408, "request_body_timeout"), "{inspect:?}");
        assert_eq!(client.rest(), b"");
    }
    *rig.fake.inspect.lock() = Some(1 << 20);
    rig.fake.limits.lock().first_byte = Some(Duration::from_millis(80));
    let answer = rig.client().ask(&post(b"{}"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (504, "first_byte_timeout"));
    rig.fake.limits.lock().first_byte = None;
    rig.fake.limits.lock().total = Some(Duration::from_millis(80));
    let answer = rig.client().ask(&post(b"{}"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (504, "total_timeout"));
    let timeouts =
        rig.fake.events.lock().iter().filter(|event| matches!(event, Event::TimedOut { position: 0, .. })).count();
    assert_eq!(timeouts, 2);
    // A client that says nothing is closed without a word.
    let start = clock::now();
    let mut silent = rig.client();
    assert_eq!(silent.rest(), b"");
    assert!((Duration::from_millis(140)..Duration::from_secs(2)).contains(&start.elapsed()), "{:?}", start.elapsed());
    rig.settled();
}

fn a_body_that_comes_by_the_byte_is_not_waited_for(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(request.body.len().to_string().as_bytes()));
        }
    });
    let cut_off = Endpoint::start(|wire, _| drop(wire.rest()));
    let rig = Rig::start(io, &[]);
    rig.fake.limits.lock().request_body = Duration::from_millis(400);
    let chunked = "Transfer-Encoding: chunked";
    for inspect in [Some(1 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        *rig.fake.endpoints.lock() = vec![cut_off.address];
        for (framing, piece) in [("Content-Length: 100000", "x"), (chunked, "1\r\nx\r\n")] {
            let mut client = rig.client();
            let begun = clock::now();
            client.send(format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n").as_bytes());
            // Each comes well within the limit.
            while begun.elapsed() < PATIENCE
                && client.stream.write_all(piece.as_bytes()).is_ok()
                && !client.has_answer()
            {
                std::thread::sleep(Duration::from_millis(40));
            }
            let took = begun.elapsed();
            let answer = client.answer();
            assert_eq!(
                (answer.status(), answer.own_code().as_str()),
                (408, "request_body_timeout"),
                "{framing} {inspect:?}"
            );
            assert!(took > Duration::from_millis(390) && took < Duration::from_secs(3), "{took:?}");
        }
        // Slow, but not that slow: 10 KB/s, for longer than the limit.
        *rig.fake.endpoints.lock() = vec![endpoint.address];
        for (framing, piece) in
            [("Content-Length: 12000", "x".repeat(400)), (chunked, format!("190\r\n{}\r\n", "x".repeat(400)))]
        {
            let mut client = rig.client();
            client.send(format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n").as_bytes());
            for _ in 0..30 {
                std::thread::sleep(Duration::from_millis(40));
                client.send(piece.as_bytes());
            }
            if framing == chunked {
                client.send(b"0\r\n\r\n");
            }
            assert_eq!(client.answer().body, b"12000", "{framing} {inspect:?}");
        }
    }
    rig.settled();
}

fn limits_cut_an_answer_that_stands_still(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n");
        std::thread::sleep(Duration::from_millis(60));
        wire.send(b"3\r\ndef\r\n");
        wire.rest();
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for total in [None, Some(Duration::from_millis(150))] {
        rig.fake.limits.lock().idle = Some(total.unwrap_or(Duration::from_millis(100)));
        rig.fake.limits.lock().total = total;
        let start = clock::now();
        let mut client = rig.client();
        client.send(&post(b"{}"));
        client.head().unwrap();
        assert_eq!(client.rest(), b"3\r\nabc\r\n3\r\ndef\r\n", "no end, and no answer of ours in the middle");
        assert!(
            (Duration::from_millis(140)..Duration::from_secs(2)).contains(&start.elapsed()),
            "{:?}",
            start.elapsed()
        );
    }
    rig.settled();
}

fn a_reader_that_stands_still_is_not_its_endpoint_s_fault(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        drop(wire.stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n"));
        // Until the proxy has had enough.
        while wire.stream.write_all(&[b'x'; 10_000]).is_ok() {}
    });
    let rig = Rig::start(io, &[endpoint.address]);
    rig.fake.limits.lock().idle = Some(Duration::from_millis(100));
    let mut client = rig.client();
    client.send(&post(b"{}"));
    eventually("the request is over", || !rig.fake.told.lock().is_empty());
    let told = rig.fake.told.lock()[0].events.clone();
    assert_eq!(told.last(), Some(&Event::CutOff { position: Some(0) }), "{told:?}");
    rig.settled();
}

fn a_reused_connection_that_dies_late_is_not_asked_again(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(&ok(b"first"));
        wire.request();
        // It has worked on this one.
        std::thread::sleep(Duration::from_millis(1300));
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    assert_eq!(client.ask(&post(b"{}")).body, b"first");
    let answer = client.ask(&post(b"{}"));
    assert_eq!((answer.status(), answer.own_code().as_str()), (502, "backend_died"));
    assert_eq!((rig.counts.get("reused"), endpoint.connections()), (1, 1));
    drop(client);
    rig.settled();
}

fn a_panic_costs_one_connection(io: Io) {
    let endpoint = Endpoint::answering(b"fine");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut bystander = rig.client();
    assert_eq!(bystander.ask(&post(b"{}")).body, b"fine");
    rig.fake.panics.store(true, Ordering::SeqCst);
    let mut unlucky = rig.client();
    unlucky.send(&post(b"{}"));
    assert_eq!(unlucky.rest(), b"");
    rig.fake.panics.store(false, Ordering::SeqCst);
    assert_eq!(bystander.ask(&post(b"{}")).body, b"fine");
    // On the worker pool: the request goes on without its prompt.
    rig.fake.panics.store(true, Ordering::SeqCst);
    rig.fake.heavy.store(true, Ordering::SeqCst);
    assert_eq!(bystander.ask(&post(b"{}")).body, b"fine");
    assert_eq!(*rig.fake.hasty.lock(), [Haste::Budget]);
    drop(bystander);
    rig.settled();
    assert_eq!(rig.counts.get("panicked"), 1);
}

fn heavy_decisions_leave_the_data_thread_alone(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::with(io, &[endpoint.address], |config| config.decision_budget = Duration::from_secs(5));
    rig.fake.heavy.store(true, Ordering::SeqCst);
    *rig.fake.decision_takes.lock() = Duration::from_millis(300);
    let mut slow = rig.client();
    let body = vec![b'x'; 200_000];
    slow.send(&post(&body));
    std::thread::sleep(Duration::from_millis(50));
    rig.fake.heavy.store(false, Ordering::SeqCst);
    *rig.fake.decision_takes.lock() = Duration::ZERO;
    let start = clock::now();
    assert_eq!(rig.client().ask(&post(b"quick")).body, b"quick");
    assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
    assert!(slow.answer().body == body);
    assert_eq!(rig.counts.get("offloaded"), 1);
    assert!(rig.fake.hasty.lock().is_empty());
}

fn others_are_served_while_every_decision_thread_is_busy(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::with(io, &[endpoint.address], |config| {
        config.decision_budget = PATIENCE;
        config.decision_threads = 2;
    });
    rig.fake.heavy_from.store(10_000, Ordering::SeqCst);
    let shut = rig.fake.gate.write();
    // Two are being decided, two more wait for a thread.
    let mut heavy: Vec<_> = (0..4).map(|_| rig.client()).collect();
    for (number, client) in heavy.iter_mut().enumerate() {
        client.send(&post(&vec![letter(number); 400_000]));
    }
    eventually("all are handed over", || rig.counts.get("offloaded") == 4);
    eventually("two are under way", || rig.fake.begun.load(Ordering::SeqCst) == 2);
    let mut light: Vec<_> = (0..10).map(|_| rig.client()).collect();
    for number in 0..100 {
        let body = number.to_string();
        assert_eq!(light[number % 10].ask(&post(body.as_bytes())).body, body.as_bytes());
    }
    assert_eq!(rig.fake.begun.load(Ordering::SeqCst), 2);
    assert!(rig.fake.bodies.lock().iter().flatten().all(|body| body.len() < 10_000), "no heavy one is decided yet");
    drop(shut);
    for (number, client) in heavy.iter_mut().enumerate() {
        assert!(client.answer().body == vec![letter(number); 400_000]);
    }
    assert_eq!((rig.fake.begun.load(Ordering::SeqCst), rig.counts.get("offloaded")), (4, 4));
    assert!(rig.fake.hasty.lock().is_empty());
}

fn a_decision_that_holds_the_thread_is_noticed_and_one_on_the_pool_does_not(io: Io) {
    let endpoint = Endpoint::answering(b"fine");
    let rig = Rig::with(io, &[endpoint.address], |config| config.decision_budget = PATIENCE);
    let ticks = |count| eventually("ticks", || rig.counts.get("ticks") >= count);
    ticks(3);
    let busy = rig.counts.get("busy ticks");
    ticks(rig.counts.get("ticks") + 3);
    assert_eq!(rig.counts.get("busy ticks"), busy, "nobody has asked for anything");
    *rig.fake.decision_takes.lock() = Duration::from_millis(300);
    rig.fake.heavy.store(true, Ordering::SeqCst);
    assert_eq!(rig.client().ask(&post(b"{}")).body, b"fine");
    ticks(rig.counts.get("ticks") + 3);
    assert!(rig.counts.get("busy ticks") > busy && rig.counts.get("longest hold") < 300);
    rig.fake.heavy.store(false, Ordering::SeqCst);
    assert_eq!(rig.client().ask(&post(b"{}")).body, b"fine");
    ticks(rig.counts.get("ticks") + 3);
    assert!(rig.counts.get("longest hold") >= 300);
}

fn a_decision_that_takes_too_long_is_made_without_the_prompt(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::with(io, &[endpoint.address], |config| {
        config.decision_budget = Duration::from_millis(30);
        config.decision_threads = 1;
        config.decision_queue = 1;
    });
    rig.fake.heavy.store(true, Ordering::SeqCst);
    *rig.fake.decision_takes.lock() = Duration::from_millis(400);
    let mut clients: Vec<_> = (0..4).map(|_| rig.client()).collect();
    let start = clock::now();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(&post(&vec![letter(number); 50_000]));
    }
    for (number, client) in clients.iter_mut().enumerate() {
        assert!(client.answer().body == vec![letter(number); 50_000]);
    }
    assert!(start.elapsed() < Duration::from_millis(390), "{:?}", start.elapsed());
    let hasty = rig.fake.hasty.lock().clone();
    assert_eq!(hasty.len(), 4);
    assert!(hasty.contains(&Haste::Budget) && hasty.contains(&Haste::QueueFull), "{hasty:?}");
}
