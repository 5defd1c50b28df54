//! What every request goes through.

use std::time::Duration;

use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, get, letter, ok, pattern, post};
use crate::proxy::{Event, Io};

on_both_back_ends![
    a_request_and_its_answer_pass_unchanged,
    connections_are_kept_on_both_sides,
    pipelined_requests_are_answered_in_order,
    what_follows_a_last_request_does_not_cut_its_answer,
    a_body_reaches_the_endpoint_byte_for_byte,
    encoded_answers_pass_untouched,
    any_method_and_path_pass,
    any_method_passes_with_its_body,
    a_form_with_a_file_passes_byte_for_byte_with_its_fields,
    fields_of_an_answer_pass,
    a_get_goes_past_a_dead_endpoint,
    an_answer_without_body_needs_none,
    http_1_0_gets_what_it_can_read,
    http_1_0_may_keep_its_connection,
    an_answer_that_ends_with_the_connection_ends_with_the_connection,
    a_connection_that_asks_to_close_is_closed,
    an_endpoint_that_closes_after_each_answer_costs_nothing,
    our_own_answers_keep_the_connection_where_they_can,
    decision_fields_are_added,
    the_list_of_models_is_joined_from_all_rules,
];

fn a_request_and_its_answer_pass_unchanged(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        let request = wire.request().unwrap();
        let lines: Vec<_> = request.head.split("\r\n").collect();
        assert_eq!(lines[0], "POST /v1/completions?a=%20b HTTP/1.1");
        assert_eq!(
            lines[1..4],
            ["Host: api.test", "X-Odd:  a  b".replace("  a", " a").as_str(), "Authorization: Bearer x"]
        );
        // Its own place in the trace is all that is new (see `trace`), beside what names the client.
        assert!(lines[4].starts_with("traceparent: 00-") && lines[4].len() == 68, "{}", lines[4]);
        assert_eq!(lines[5..8], ["x-forwarded-for: 127.0.0.1", "x-forwarded-proto: http", "content-length: 11"]);
        assert_eq!(lines[8..], ["", ""]);
        assert_eq!(request.body, b"{\"a\" :  1 }");
        wire.send(b"HTTP/1.1 201 Made It\r\nServer: x\r\nX-A: 1\r\nX-a: 2\r\nContent-Length: 3\r\n\r\nyes");
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    client.send(b"POST /v1/completions?a=%20b HTTP/1.1\r\nHost: api.test\r\nX-Odd:  a  b\r\nAuthorization: Bearer x\r\nContent-Length: 11\r\n\r\n{\"a\" :  1 }");
    let answer = client.answer();
    assert_eq!(answer.head, "HTTP/1.1 201 Made It\r\nServer: x\r\nX-A: 1\r\nX-a: 2\r\ncontent-length: 3\r\n\r\n");
    assert_eq!(answer.body, b"yes");
    assert_eq!(rig.fake.bodies.lock()[0].as_deref(), Ok(&b"{\"a\" :  1 }"[..]));
    let events = rig.fake.events.lock().clone();
    assert!(matches!(events[0], Event::Answered { position: 0, status: 201, .. }), "{events:?}");
    drop(client);
    rig.settled();
    assert_eq!((rig.counts.get("201"), rig.counts.get("left wait"), rig.counts.get("left stream")), (1, 0, 0));
}

fn connections_are_kept_on_both_sides(io: Io) {
    let endpoint = Endpoint::answering(b"hello");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..20 {
        assert_eq!(client.ask(&post(b"{}")).body, b"hello");
    }
    assert_eq!(endpoint.connections(), 1);
    assert_eq!((rig.counts.get("opened"), rig.counts.get("reused")), (1, 19));
}

fn pipelined_requests_are_answered_in_order(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let all: Vec<u8> = (0..20).flat_map(|number: usize| post(&vec![letter(number); 700 * number])).collect();
    for cut in [all.len(), 1, 90, 3000] {
        let mut client = rig.client();
        let (front, back) = all.split_at(cut);
        client.send(front);
        std::thread::sleep(Duration::from_millis(5));
        client.send(back);
        for number in 0..20 {
            assert_eq!(client.answer().body, vec![letter(number); 700 * number]);
        }
    }
}

fn what_follows_a_last_request_does_not_cut_its_answer(io: Io) {
    let (size, endings) = (2_000_000, [&b"content-length: 2000000\r\n"[..], b""]);
    for ending in endings {
        let endpoint = Endpoint::start(move |wire, _| {
            wire.request().unwrap();
            wire.send(&[b"HTTP/1.1 200 OK\r\n", ending, b"\r\n"].concat());
            wire.send(&pattern(size));
        });
        let rig = Rig::start(io, &[endpoint.address]);
        let mut client = rig.client();
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        client.send(&[b'x'; 10_000]);
        std::thread::sleep(Duration::from_millis(100));
        client.head().unwrap();
        // A slow reader: most of it is still in the kernel when the proxy has done its part.
        std::thread::sleep(Duration::from_millis(200));
        assert!(client.rest() == pattern(size));
    }
}

fn a_body_reaches_the_endpoint_byte_for_byte(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let nested = ["[".repeat(2000), "]".repeat(2000)].concat();
    let bodies: [&[u8]; 8] = [
        b"{\"a\":1,\"a\":2}",
        b"{\"n\":1e400,\"s\":\"\\ud800\"}",
        b"\xff\xfe not json \x00\x01",
        nested.as_bytes(),
        b"",
        b"  {\r\n\t}  ",
        &vec![b'x'; 70_000],
        &[0; 3584],
    ];
    for body in bodies {
        let answer = client.ask(&post(body));
        assert_eq!(answer.body, body);
    }
    for size in
        (3000..4200).step_by(7).chain((15_000..17_000).step_by(97)).chain([65_536, 69_632, 262_144, 1 << 20, 3 << 20])
    {
        let body: Vec<u8> = pattern(size);
        assert!(client.ask(&post(&body)).body == body, "{size}");
    }
}

fn encoded_answers_pass_untouched(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        let request = wire.request().unwrap();
        assert_eq!(request.field("accept-encoding"), Some("gzip, br"));
        wire.send(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00");
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let answer = rig.client().ask(b"GET / HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip, br\r\n\r\n");
    assert_eq!((answer.field("content-encoding"), &answer.body[..]), (Some("gzip"), &b"\x1f\x8b\x08\x00"[..]));
}

fn any_method_and_path_pass(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            wire.send(&ok(request.head.lines().next().unwrap().as_bytes()));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for line in [
        "OPTIONS * HTTP/1.1",
        "OPTIONS /v1/chat/completions HTTP/1.1",
        "GET /v1/models/ HTTP/1.1",
        "GET /v1/models/mock HTTP/1.1",
        "PUT /v1/x HTTP/1.1",
        "DELETE /v1/x HTTP/1.1",
        "PATCH //odd///path?q=/a#b HTTP/1.1",
        "PURGE / HTTP/1.1",
        "TRACE / HTTP/1.1",
        "QUERY /%2e%2e/\u{e9} HTTP/1.1",
    ] {
        let answer = client.ask(format!("{line}\r\nHost: a\r\n\r\n").as_bytes());
        assert_eq!(String::from_utf8(answer.body).unwrap(), line);
    }
}

fn any_method_passes_with_its_body(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            let line = request.head.lines().next().unwrap().as_bytes();
            wire.send(&ok(&[line, b"|", &request.body].concat()));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(1 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        for method in ["PUT", "PATCH", "DELETE", "GET", "OPTIONS", "REPORT"] {
            let line = format!("{method} /v1/files/1 HTTP/1.1");
            for body in [pattern(7), pattern(100_000)] {
                let expected = [line.as_bytes(), b"|", &body].concat();
                let head = format!("{line}\r\nHost: a\r\nContent-Length: {}\r\n\r\n", body.len());
                assert!(client.ask(&[head.as_bytes(), &body].concat()).body == expected, "{method} {inspect:?}");
                let head = format!("{line}\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n", body.len());
                let answer = client.ask(&[head.as_bytes(), &body, b"\r\n0\r\n\r\n"].concat());
                assert!(answer.body == expected, "{method} in chunks, {inspect:?}");
            }
        }
    }
}

/// production-stack#733: a form without its Authorization.
fn a_form_with_a_file_passes_byte_for_byte_with_its_fields(io: Io) {
    const FORM: &str = "multipart/form-data; boundary=\"--a b?\"";
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            assert!(request.head.starts_with("POST /v1/audio/transcriptions HTTP/1.1\r\n"), "{}", request.head);
            assert_eq!(request.field("content-type"), Some(FORM));
            assert_eq!(request.field("authorization"), Some("Bearer sk-1"));
            wire.send(&ok(&request.body));
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for inspect in [Some(1 << 20), None] {
        *rig.fake.inspect.lock() = inspect;
        let mut client = rig.client();
        for size in [0, 300, 900_000] {
            let body = [
                &b"----a b?\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n----a b?\r\n"[..],
                b"Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n",
                &pattern(size),
                b"\r\n----a b?--\r\n",
            ]
            .concat();
            let head = format!(
                "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-1\r\n\
                 Content-Type: {FORM}\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            assert!(client.ask(&[head.as_bytes(), &body].concat()).body == body, "{size} {inspect:?}");
        }
    }
}

fn fields_of_an_answer_pass(io: Io) {
    const FIELDS: &str = "X-Accel-Buffering: no\r\nCache-Control: no-cache\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n\
                          X-Request-Id: 7\r\nopenai-processing-ms: 12\r\nRetry-After: 3\r\nVary: Origin\r\n\
                          Access-Control-Allow-Origin: *\r\n";
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(_request) = wire.request() {
            let front = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n";
            let hops = "Connection: keep-alive, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\n";
            let back = "transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
            wire.send(format!("{front}{hops}{FIELDS}{back}").as_bytes());
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..2 {
        let answer = client.ask(&post(b"{}"));
        assert!(answer.head.contains(FIELDS), "{}", answer.head);
        assert_eq!((answer.field("x-hop"), answer.field("keep-alive")), (None, None), "{}", answer.head);
        assert_eq!(answer.body, b"hi");
    }
    assert_eq!(endpoint.connections(), 1);
}

/// vllm-router#135: the list of models was asked of a dead endpoint.
fn a_get_goes_past_a_dead_endpoint(io: Io) {
    let endpoint = Endpoint::answering(b"models");
    let rig = Rig::start(io, &[Endpoint::refusing(), endpoint.address]);
    let mut client = rig.client();
    for path in ["/v1/models", "/health", "/version"] {
        assert_eq!(client.ask(&get(path)).body, b"models", "{path}");
    }
}

fn an_answer_without_body_needs_none(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            let answer: &[u8] = match request.head.split(' ').nth(1).unwrap() {
                "/204" => b"HTTP/1.1 204 No Content\r\n\r\n",
                "/304" => b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\netag: x\r\n\r\n",
                _ => b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n",
            };
            wire.send(answer);
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    assert_eq!(client.ask(&get("/204")).status(), 204);
    let not_modified = client.ask(&get("/304"));
    assert_eq!((not_modified.status(), not_modified.field("content-length")), (304, Some("10")));
    client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.head().unwrap(), "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n");
    client.send(b"HEAD /nobody HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(client.head().unwrap().starts_with("HTTP/1.1 404 Not Found\r\n"));
    client.send(&[get("/nobody"), get("/204")].concat());
    assert_eq!(client.answer().status(), 404, "no body follows the head, and the connection goes on");
    assert_eq!(client.answer().status(), 204);
    let mut client = rig.client();
    client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n");
    let refused = String::from_utf8(client.rest()).unwrap();
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.ends_with("\r\n\r\n"), "{refused}");
    assert_eq!(endpoint.connections(), 1);
}

fn http_1_0_gets_what_it_can_read(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            assert!(request.head.starts_with("GET /p HTTP/1.1\r\nhost: 127.0.0.1:"), "{}", request.head);
            wire.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n");
            std::thread::sleep(Duration::from_millis(20));
            wire.send(b"2;x=y\r\nde\r\n0\r\nx-t: 1\r\n\r\n");
        }
    });
    let rig = Rig::start(io, &[endpoint.address]);
    for wish in ["", "Connection: keep-alive\r\n"] {
        let mut client = rig.client();
        client.send(format!("GET /p HTTP/1.0\r\n{wish}\r\n").as_bytes());
        let all = String::from_utf8(client.rest()).unwrap();
        assert_eq!(all, "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcde");
    }
    assert_eq!(endpoint.connections(), 1, "the endpoint's connection is kept all the same");
}

fn http_1_0_may_keep_its_connection(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..3 {
        let answer = client.ask(b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n");
        assert_eq!((answer.field("connection"), &answer.body[..]), (Some("keep-alive"), &b"hi"[..]));
    }
    let answer = client.ask(b"GET / HTTP/1.0\r\n\r\n");
    assert_eq!(answer.field("connection"), Some("close"));
    assert_eq!(client.rest(), b"");
}

fn an_answer_that_ends_with_the_connection_ends_with_the_connection(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nhello ");
        std::thread::sleep(Duration::from_millis(10));
        wire.send(&vec![b'w'; 100_000]);
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let answer = rig.client().ask(&get("/"));
    assert_eq!((answer.field("connection"), answer.body.len()), (Some("close"), 100_006));
    rig.settled();
    assert!(rig.fake.events.lock().iter().any(|event| matches!(event, Event::Finished { .. })));
}

fn a_connection_that_asks_to_close_is_closed(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let answer = client.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    assert_eq!(answer.field("connection"), Some("close"));
    assert_eq!(client.rest(), b"");
    rig.client().ask(&get("/"));
    assert_eq!(endpoint.connections(), 1, "the endpoint's side knows nothing of it");
}

fn an_endpoint_that_closes_after_each_answer_costs_nothing(io: Io) {
    let endpoint = Endpoint::start(|wire, number| {
        wire.request().unwrap();
        let connection = if number % 2 == 0 { "connection: close\r\n" } else { "" };
        wire.send(format!("HTTP/1.1 200 OK\r\n{connection}content-length: 2\r\n\r\nhi").as_bytes());
    });
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    for _ in 0..60 {
        let answer = client.ask(&post(b"{}"));
        assert_eq!((answer.status(), answer.field("connection")), (200, None));
    }
}

fn our_own_answers_keep_the_connection_where_they_can(io: Io) {
    let rig = Rig::start(io, &[]);
    let mut client = rig.client();
    for _ in 0..3 {
        let answer = client.ask(&post(b"{}"));
        assert_eq!((answer.status(), answer.own_code().as_str()), (503, "no_healthy_backend"));
    }
    let answer = client.ask(b"GET / HTTP/2.0\r\nHost: a\r\n\r\n");
    assert_eq!((answer.status(), answer.field("connection")), (505, Some("close")));
    assert_eq!(client.rest(), b"");
    drop(client);
    rig.settled();
    assert_eq!((rig.counts.get("opened"), rig.counts.get("503 no_healthy_backend")), (1, 3));
}

fn decision_fields_are_added(io: Io) {
    let endpoint = Endpoint::answering(b"hi");
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.fields.lock() = format!("x-kvlb-endpoint: e\r\nx-kvlb-tier: {}\r\n", "t".repeat(600)).into_bytes();
    let answer = rig.client().ask(&get("/"));
    assert_eq!((answer.field("x-kvlb-endpoint"), answer.field("x-kvlb-tier").unwrap().len()), (Some("e"), 600));
    assert_eq!(answer.body, b"hi");
}

fn the_list_of_models_is_joined_from_all_rules(io: Io) {
    let listing = |ids: &'static str, framing: &'static str| {
        Endpoint::start(move |wire, _| {
            let request = wire.request().unwrap();
            assert!(request.head.starts_with("GET /v1/models HTTP/1.1\r\n"));
            assert_eq!((request.field("accept-encoding"), request.field("authorization")), (None, Some("Bearer k")));
            let body = format!("{{\"object\":\"list\",\"data\":[{ids}]}}");
            match framing {
                "length" => wire.send(&ok(body.as_bytes())),
                "chunked" => wire.send(
                    format!(
                        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
                        body.len()
                    )
                    .as_bytes(),
                ),
                _ => wire.send(format!("HTTP/1.1 200 OK\r\n\r\n{body}").as_bytes()),
            }
        })
    };
    let first = listing("{\"id\":\"a\",\"x\":1}", "length");
    let second = listing("{\"id\":\"b\"},{\"id\":\"a\"}", "chunked");
    let third = listing("{\"id\":\"c\"}", "close");
    let rig = Rig::start(io, &[first.address, second.address, third.address, Endpoint::refusing()]);
    *rig.fake.rules_with_models.lock() = vec![0, 1, 3, 2];
    let mut client = rig.client();
    let ask = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\nAccept-Encoding: gzip\r\n\r\n";
    let answer = client.ask(ask);
    let expected = "{\"object\":\"list\",\"data\":[{\"id\":\"a\",\"x\":1},{\"id\":\"b\"},{\"id\":\"c\"}]}";
    assert_eq!((answer.status(), String::from_utf8(answer.body).unwrap().as_str()), (200, expected));
    // Nobody has a list: what one of them said is the answer.
    let locked = Endpoint::start(|wire, _| {
        wire.request().unwrap();
        wire.send(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 18\r\n\r\n{\"error\":\"no key\"}");
    });
    *rig.fake.endpoints.lock() = vec![locked.address, locked.address];
    *rig.fake.rules_with_models.lock() = vec![0, 1];
    let answer = client.ask(&get("/v1/models"));
    assert_eq!((answer.status(), &answer.body[..]), (401, &b"{\"error\":\"no key\"}"[..]));
    // One that says nothing does not keep the others' models back, even where its rule sets no limits.
    let silent = Endpoint::start(|wire, _| drop(wire.rest()));
    *rig.fake.endpoints.lock() = vec![silent.address, third.address];
    let answer = client.ask(ask);
    assert_eq!((answer.status(), &answer.body[..]), (200, &b"{\"object\":\"list\",\"data\":[{\"id\":\"c\"}]}"[..]));
    *rig.fake.endpoints.lock() = vec![Endpoint::refusing()];
    *rig.fake.rules_with_models.lock() = vec![0];
    assert_eq!(client.ask(&get("/v1/models/")).own_code(), "backend_unreachable");
}
