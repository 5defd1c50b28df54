//! What a prefill engine's bootstrap server says.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::read::Asker;
use crate::contract::handoff::Bootstrap;
use crate::fleet::{EndpointKey, Missing};

/// Bytes of an answer that are read: a line for each data-parallel rank.
const ANSWER_MAX: usize = 64 << 10;

#[derive(Deserialize)]
struct Rank {
    engine_id: String,
}

/// Asks a Mooncake bootstrap server which engines stand behind it.
///
/// Source: vLLM 0.32.0, `GET /query` of its Mooncake connector.
///
/// # Errors
/// Why it has not said.
pub async fn bootstrap(asker: &Asker, place: &EndpointKey) -> Result<Bootstrap, Missing> {
    let answer = asker.get(place, "/query", ANSWER_MAX).await?;
    read(&answer, place).ok_or_else(|| Missing::Unreadable("no engine ids by rank".to_owned()))
}

fn read(answer: &[u8], place: &EndpointKey) -> Option<Bootstrap> {
    let ranks: BTreeMap<String, Rank> = serde_json::from_slice(answer).ok()?;
    let mut engines: Vec<(i64, String)> =
        ranks.into_iter().map(|(rank, told)| Some((rank.parse().ok()?, told.engine_id))).collect::<Option<_>>()?;
    engines.sort_unstable();
    (!engines.is_empty()).then(|| Bootstrap { address: format!("http://{place}"), engines })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_in_their_order() {
        let place = EndpointKey { host: "2001:db8::1".to_owned(), port: 8998 };
        let told = read(br#"{"10":{"engine_id":"k"},"2":{"engine_id":"c","worker_addr":{}}}"#, &place).unwrap();
        assert_eq!(told.address, "http://[2001:db8::1]:8998");
        assert_eq!(told.engines, [(2, "c".to_owned()), (10, "k".to_owned())]);
        for answer in [b"{}".as_slice(), b"[]", br#"{"a":{"engine_id":"x"}}"#, br#"{"0":{}}"#, b""] {
            assert_eq!(read(answer, &place), None);
        }
    }
}
