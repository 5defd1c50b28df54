//! The rule over servers that say exactly what they are told, for what no simulated engine says.

use kvlb_tests::harness::upstream::{Act, Upstream};
use serde_json::{Value, json};

use super::Split;

/// One scripted server for each role, in the order of the endpoints.
pub(crate) struct Scripted {
    pub(crate) split: Split,
    pub(crate) upstreams: Vec<Upstream>,
}

impl Scripted {
    pub(crate) async fn new(scripts: Vec<(u8, Vec<Act>)>, more: Value) -> Self {
        Self::with(&[], scripts, more).await
    }

    /// `args` are more of `kvlb up`.
    pub(crate) async fn with(args: &[&str], scripts: Vec<(u8, Vec<Act>)>, more: Value) -> Self {
        let (upstreams, endpoints) = start(scripts).await;
        Self { split: Split::with(args, endpoints, &arguments(&more)).await, upstreams }
    }

    /// Others, behind a rule of their own of the same kvlb.
    pub(crate) async fn next(self, scripts: Vec<(u8, Vec<Act>)>, more: Value) -> Self {
        let (upstreams, endpoints) = start(scripts).await;
        Self { split: self.split.another(endpoints, &arguments(&more)).await, upstreams }
    }

    /// Head and body of each request with a body that one of them got.
    pub(crate) fn posts(&self, number: usize) -> Vec<(String, Vec<u8>)> {
        let all = self.upstreams[number].received();
        all.iter().filter(|bytes| bytes.starts_with(b"POST")).map(|bytes| apart(bytes)).collect()
    }

    /// The same, of what they got since the last time; `seen` counts it.
    pub(crate) fn since(&self, seen: &mut Vec<usize>) -> Vec<Vec<(String, Vec<u8>)>> {
        seen.resize(self.upstreams.len(), 0);
        let new = |(number, seen): (usize, &mut usize)| {
            let posts = self.posts(number);
            posts[std::mem::replace(seen, posts.len())..].to_vec()
        };
        seen.iter_mut().enumerate().map(new).collect()
    }
}

/// Health is not asked for: the acts are for requests.
fn arguments(more: &Value) -> Value {
    let mut arguments = json!({"kvExactMode": 0, "monitor": false, "cb_enable": false});
    more.as_object().unwrap().iter().for_each(|(name, value)| arguments[name] = value.clone());
    arguments
}

async fn start(scripts: Vec<(u8, Vec<Act>)>) -> (Vec<Upstream>, Vec<Value>) {
    let (mut upstreams, mut endpoints) = (Vec::new(), Vec::new());
    for (role, acts) in scripts {
        let upstream = Upstream::start(acts).await.unwrap();
        let (ip, port) = (upstream.address().ip(), upstream.address().port());
        endpoints.push(json!({"endpointIP": ip, "targetPort": port, "weight": 1, "ep_role": role}));
        upstreams.push(upstream);
    }
    (upstreams, endpoints)
}

fn apart(request: &[u8]) -> (String, Vec<u8>) {
    let head = request.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
    (String::from_utf8_lossy(&request[..head]).to_ascii_lowercase(), request[head..].to_vec())
}

/// Reads a request and answers it so, with the connection closed behind it.
pub(crate) fn says(status: &str, headers: &str, body: &[u8]) -> Vec<Act> {
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n", body.len());
    vec![Act::Read, Act::Send([head.as_bytes(), body].concat())]
}

pub(crate) fn ok(body: &str) -> Vec<Act> {
    says("200 OK", "Content-Type: application/json\r\n", body.as_bytes())
}

/// Answers in pieces that are chunks of their own, each a packet.
pub(crate) fn chunks(content_type: &str, pieces: &[&[u8]]) -> Vec<Act> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n");
    let mut acts = vec![Act::Read, Act::Send(head.into_bytes())];
    for piece in pieces.iter().copied().chain([b"".as_slice()]) {
        acts.push(Act::Send([format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat()));
        acts.push(Act::Wait(std::time::Duration::from_millis(5)));
    }
    acts
}
