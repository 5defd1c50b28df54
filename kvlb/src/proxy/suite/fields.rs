//! Fields that an endpoint wants in the requests that it gets.

use super::on_both_back_ends;
use super::rig::{Endpoint, Rig, Wire, ok, post};
use crate::proxy::Io;

on_both_back_ends![
    an_endpoint_gets_its_own_fields_and_a_client_keeps_what_nobody_sets,
    each_try_has_the_fields_of_its_own_endpoint,
    a_body_that_goes_through_has_them_too,
    a_list_of_models_is_asked_for_with_them,
];

const RANK_3: &str = "X-data-parallel-rank: 3\r\n";

/// Answers with the head that came.
fn echo(wire: &mut Wire, _number: usize) {
    while let Some(request) = wire.request() {
        wire.send(&ok(request.head.as_bytes()));
    }
}

/// The request's lines that name a rank, as the endpoint saw them.
fn ranks(body: &[u8]) -> Vec<String> {
    let head = String::from_utf8(body.to_vec()).unwrap();
    assert!(head.starts_with("POST /v1/completions HTTP/1.1\r\nHost: a\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    assert_eq!(head.matches("\r\n\r\n").count(), 1, "{head}");
    head.lines().filter(|line| line.to_lowercase().contains("rank")).map(str::to_owned).collect()
}

fn ranked(body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nx-Data-Parallel-RANK: 7\r\nX-data-parallel-rank-note: a: b\r\n\
         Content-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn an_endpoint_gets_its_own_fields_and_a_client_keeps_what_nobody_sets(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    let mut client = rig.client();
    let own = ["x-Data-Parallel-RANK: 7", "X-data-parallel-rank-note: a: b"];
    for length in [0, 3, 5000, 300_000] {
        let (plain, with) = (post(&vec![b'x'; length]), ranked(&vec![b'x'; length]));
        rig.fake.request_fields.lock()[0] = "";
        assert_eq!(ranks(&client.ask(&plain).body), Vec::<String>::new());
        assert_eq!(ranks(&client.ask(&with).body), own);
        rig.fake.request_fields.lock()[0] = RANK_3;
        assert_eq!(ranks(&client.ask(&plain).body), ["X-data-parallel-rank: 3"]);
        assert_eq!(ranks(&client.ask(&with).body), [own[1], "X-data-parallel-rank: 3"]);
        rig.fake.request_fields.lock()[0] = "a-rank: 1\r\nX-data-parallel-rank: 3\r\n";
        assert_eq!(ranks(&client.ask(&with).body), [own[1], "a-rank: 1", "X-data-parallel-rank: 3"]);
    }
    assert_eq!(endpoint.connections(), 1);
}

fn each_try_has_the_fields_of_its_own_endpoint(io: Io) {
    // The first is too busy, the second ends a reused connection without a word and refuses another time.
    let (seen, heads) = std::sync::mpsc::sync_channel(100);
    let busy = Endpoint::start(move |wire, _| {
        while let Some(request) = wire.request() {
            seen.send(request).unwrap();
            wire.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let stale = Endpoint::start(|wire, _| {
        let request = wire.request().unwrap();
        wire.send(&ok(request.head.as_bytes()));
        wire.request();
    });
    let rig = Rig::start(io, &[busy.address, stale.address]);
    let mut client = rig.client();
    for fields in [[RANK_3, ""], ["", RANK_3], [RANK_3, "x-data-parallel-rank: 44\r\n"], ["", ""]] {
        rig.fake.request_fields.lock()[..2].copy_from_slice(&fields);
        let expected = |position: usize| match fields[position].trim_end() {
            "" => "x-Data-Parallel-RANK: 7".to_owned(),
            field => field.to_owned(),
        };
        for length in [10, 40_000] {
            let answer = client.ask(&ranked(&vec![b'y'; length]));
            assert!(ranks(&answer.body).contains(&expected(1)), "{answer:?}");
            assert_eq!(ranks(&answer.body).len(), 2);
            let first = heads.recv().unwrap();
            assert!(ranks(first.head.as_bytes()).contains(&expected(0)), "{first:?}");
            assert!(first.body == vec![b'y'; length]);
        }
    }
    assert!(rig.counts.get("retried busy") == 8 && rig.counts.get("retried stale_connection") > 0);
}

fn a_body_that_goes_through_has_them_too(io: Io) {
    let endpoint = Endpoint::start(echo);
    let rig = Rig::start(io, &[endpoint.address]);
    *rig.fake.inspect.lock() = None;
    rig.fake.request_fields.lock()[0] = RANK_3;
    let answer = rig.client().ask(&ranked(&vec![b'x'; 100_000]));
    assert_eq!(ranks(&answer.body), ["X-data-parallel-rank-note: a: b", "X-data-parallel-rank: 3"]);
    let mut client = rig.client();
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    std::thread::sleep(std::time::Duration::from_millis(20));
    client.send(b"5\r\nhello\r\n0\r\n\r\n");
    assert_eq!(ranks(&client.answer().body), ["X-data-parallel-rank: 3"]);
}

fn a_list_of_models_is_asked_for_with_them(io: Io) {
    let endpoint = Endpoint::start(|wire, _| {
        while let Some(request) = wire.request() {
            let list = serde_json::json!({"data": [{"id": request.field("X-data-parallel-rank")}]});
            wire.send(&ok(list.to_string().as_bytes()));
        }
    });
    let rig = Rig::start(io, &[endpoint.address, endpoint.address]);
    rig.fake.request_fields.lock()[1] = RANK_3;
    *rig.fake.rules_with_models.lock() = vec![0, 1];
    let answer = rig.client().ask(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Data-Parallel-Rank: 0\r\n\r\n");
    let list: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(list["data"], serde_json::json!([{"id": "0"}, {"id": "3"}]));
}
