//! How one engine's prefill hands on to another's decode: what each leg's body says, and what the first answer brings.
//!
//! A request of a prefill/decode rule goes out twice. The *prefill* leg has the engine compute the prompt and keep its
//! blocks; the *decode* leg has another engine fetch them and generate. What each leg's body says beyond the client's own is
//! the engine's business, and stands here: a list of changes of members, of which one is filled in when the leg is sent.

use std::fmt;
use std::sync::Arc;

use super::loose;

/// The member by which vLLM is told of a transfer.
const VLLM: &str = "kv_transfer_params";

/// Members by which engines are told where blocks come from: a client that sent them would aim an engine at an address of
/// its own, so none of a client's goes on.
///
/// Source: vLLM 0.32.0 (the first two), SGLang 0.5.23 (`bootstrap_*` and the rank), TensorRT-LLM 1.2 (the last).
pub const TRANSFER_MEMBERS: [&str; 8] = [
    VLLM,
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
];

/// Members whose members an engine takes for arguments beside its own: those above count in them too, and in each of these within
/// [`SAMPLING_MEMBER`].
///
/// Source: vLLM 0.32.0, which looks for the first in `sampling_params.extra_args` and makes that of `vllm_xargs`.
pub const ARGUMENT_MEMBERS: [&str; 2] = ["extra_args", "vllm_xargs"];
/// How to sample, where that is a member of its own.
pub const SAMPLING_MEMBER: &str = "sampling_params";

/// What becomes of a member of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It has this JSON text as its value, whether it was there or not.
    Set(&'static str, &'static str),
    /// The same only where it was there.
    Replace(&'static str, &'static str),
    /// It is not there.
    Remove(&'static str),
    /// Its value is what the leg is told: see [`Handoff::prefill`] and [`Handoff::decode`].
    Fill(&'static str),
}

/// What a prefill endpoint has told of itself, as far as a handoff needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bootstrap {
    /// Where decode engines ask for it (`http://HOST:PORT`).
    pub address: String,
    /// The ids of its engines, by data-parallel rank; at least one.
    pub engines: Vec<(i64, String)>,
}

impl Bootstrap {
    /// The engine of a rank.
    fn engine(&self, rank: Option<i64>) -> Option<&str> {
        let of_rank = |(own, _): &&(i64, String)| rank.is_none_or(|rank| rank == *own);
        self.engines.iter().find(of_rank).map(|(_, engine)| engine.as_str())
    }
}

/// One transfer, from the choice of its prefill endpoint on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// What nobody else calls a transfer of theirs.
    pub id: String,
    /// The prefill endpoint, where the handoff needs to know.
    pub bootstrap: Option<Arc<Bootstrap>>,
    /// Its data-parallel rank that computes the prompt, where one was asked for.
    pub rank: Option<i64>,
}

/// What a prefill leg's answer says that the decode leg needs, and nothing else reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Receipt {
    /// The object to pass on, byte for byte.
    pub object: Option<Box<str>>,
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// How many of them came from the prefill endpoint's cache; none where it does not say.
    pub cached_tokens: Option<u64>,
}

/// How an engine's prefill hands on to its decode. One leg after the other.
pub trait Handoff: fmt::Debug + Send + Sync {
    /// The word of the rule's field, and of metrics.
    fn label(&self) -> &'static str;

    /// Whether a prefill endpoint must have told its [`Bootstrap`] first.
    fn needs_bootstrap(&self) -> bool {
        false
    }

    /// What the prefill leg's body says.
    fn prefill_changes(&self) -> &'static [Change];

    /// What fills the prefill leg's member.
    fn prefill(&self, transfer: &Transfer) -> String;

    /// What a prefill leg's answer says.
    fn receipt(&self, answer: &[u8]) -> Receipt {
        read_receipt(answer)
    }

    /// What the decode leg's body says.
    fn decode_changes(&self) -> &'static [Change] {
        &[Change::Fill(VLLM)]
    }

    /// What fills the decode leg's member; none: there is nothing to fetch, and it computes the prompt itself.
    fn decode(&self, transfer: &Transfer, receipt: &Receipt) -> Option<String>;
}

/// One token is generated, and thrown away: an engine cannot end without one. Those that count, and the stream, are the
/// decode leg's.
const ONE_TOKEN: [Change; 6] = [
    Change::Set("max_tokens", "1"),
    Change::Replace("max_completion_tokens", "1"),
    Change::Remove("min_tokens"),
    Change::Remove("stream_options"),
    Change::Set("stream", "false"),
    Change::Fill(VLLM),
];

/// vLLM's NIXL connector: the prefill answer says where the blocks are, and the decode engine pulls them.
///
/// Source: vLLM 0.32.0, two real engines (shared vector `pd-nixl-exchanges.json`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nixl;

impl Handoff for Nixl {
    fn label(&self) -> &'static str {
        "nixl"
    }

    fn prefill_changes(&self) -> &'static [Change] {
        &ONE_TOKEN
    }

    fn prefill(&self, _transfer: &Transfer) -> String {
        concat!(
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
            r#""remote_block_ids":null,"remote_host":null,"remote_port":null}"#
        )
        .to_owned()
    }

    fn decode(&self, _transfer: &Transfer, receipt: &Receipt) -> Option<String> {
        receipt.object.as_deref().map(str::to_owned)
    }
}

/// vLLM's Mooncake connector: both legs know the transfer by an id of ours, and the decode engine finds the prefill engine
/// through its bootstrap server.
///
/// Source: vLLM 0.32.0, its connector as read (engines.md §5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mooncake;

impl Handoff for Mooncake {
    fn label(&self) -> &'static str {
        "mooncake"
    }

    fn needs_bootstrap(&self) -> bool {
        true
    }

    fn prefill_changes(&self) -> &'static [Change] {
        &ONE_TOKEN
    }

    fn prefill(&self, transfer: &Transfer) -> String {
        format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{}}}"#, text(&transfer.id))
    }

    fn decode(&self, transfer: &Transfer, _receipt: &Receipt) -> Option<String> {
        let bootstrap = transfer.bootstrap.as_ref()?;
        let (address, engine) = (&bootstrap.address, bootstrap.engine(transfer.rank)?);
        Some(format!(
            r#"{{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":{},"remote_bootstrap_addr":{},"remote_engine_id":{}}}"#,
            text(&transfer.id),
            text(address),
            text(engine),
        ))
    }
}

fn text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// An answer's object goes on whatever stands beside it: engines in Python write NaN, and usage has many forms. Where there is none,
/// nothing is passed on: the decode endpoint computes the prompt itself.
fn read_receipt(answer: &[u8]) -> Receipt {
    let [object, usage] = loose::members(answer, [VLLM, "usage"]);
    let object = object.filter(|object| object.starts_with(b"{")).and_then(|object| std::str::from_utf8(object).ok());
    let [told] = loose::members(object.unwrap_or_default().as_bytes(), ["remote_prefill_cached_tokens"]);
    let [prompt_tokens, details] =
        loose::members(usage.unwrap_or_default(), ["prompt_tokens", "prompt_tokens_details"]);
    let [of_usage] = loose::members(details.unwrap_or_default(), ["cached_tokens"]);
    let count = |value: Option<&[u8]>| value.and_then(loose::count);
    Receipt {
        object: object.map(Into::into),
        prompt_tokens: count(prompt_tokens),
        cached_tokens: count(of_usage).or_else(|| count(told)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn value(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_nixl_returns_is_passed_on_byte_for_byte() {
        let object =
            r#"{"do_remote_prefill":true, "remote_block_ids":[[1,2]],"x":1e400,"remote_prefill_cached_tokens":32}"#;
        let answer =
            format!(r#"{{"id":"a","usage":{{"prompt_tokens":70}},"kv_transfer_params":{object},"metrics":null}}"#);
        let receipt = Nixl.receipt(answer.as_bytes());
        assert_eq!((receipt.prompt_tokens, receipt.cached_tokens), (Some(70), Some(32)));
        assert_eq!(Nixl.decode(&Transfer::default(), &receipt).as_deref(), Some(object));
    }

    #[test]
    fn usage_tells_of_the_cache_before_the_object_does() {
        let answer = r#"{"usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":16}},"kv_transfer_params":{"remote_prefill_cached_tokens":32}}"#;
        assert_eq!(Nixl.receipt(answer.as_bytes()).cached_tokens, Some(16));
        let silent =
            Nixl.receipt(br#"{"usage":{"prompt_tokens":70,"prompt_tokens_details":null},"kv_transfer_params":{}}"#);
        assert_eq!((silent.cached_tokens, silent.object.as_deref()), (None, Some("{}")));
    }

    #[test]
    fn what_stands_beside_the_object_does_not_keep_it() {
        let object = r#"{"remote_block_ids":[[1,2]],"x":[{"a}":"\\\"]"}]}"#;
        for (beside, prompt_tokens, cached_tokens) in [
            (r#""usage":{"prompt_tokens":70.0}"#, Some(70), None),
            (r#""usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":16.0}}"#, Some(70), Some(16)),
            (r#""usage":{"prompt_tokens":70,"prompt_tokens_details":{"cached_tokens":-1}}"#, Some(70), None),
            (r#""usage":{"prompt_tokens":70,"prompt_tokens_details":[]}"#, Some(70), None),
            (r#""usage":{"prompt_tokens":"70","prompt_tokens_details":7}"#, None, None),
            (r#""usage":[]"#, None, None),
            (r#""usage":{"x":NaN,"prompt_tokens":70}"#, Some(70), None),
            (r#""metrics":{"x":NaN,"y":[-Infinity]},"z":Infinity"#, None, None),
        ] {
            for answer in [
                format!("{{{beside},\"kv_transfer_params\":{object}}}"),
                format!("\u{feff} {{\"id\" : \"a\" , \"kv_tr\\u0061nsfer_params\" : {object} , {beside}}}\n"),
            ] {
                let receipt = Nixl.receipt(answer.as_bytes());
                assert_eq!(Nixl.decode(&Transfer::default(), &receipt).as_deref(), Some(object), "{answer}");
                assert_eq!((receipt.prompt_tokens, receipt.cached_tokens), (prompt_tokens, cached_tokens), "{answer}");
            }
        }
        let cut = format!("{{\"kv_transfer_params\":{object},\"usage\":{{\"prompt_tok");
        assert_eq!(Nixl.receipt(cut.as_bytes()).object.as_deref(), Some(object));
    }

    #[test]
    fn an_answer_without_an_object_hands_nothing_on() {
        for answer in [
            "",
            "[1]",
            "{}",
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":[1]}"#,
            r#"{"kv_transfer_params":{"#,
            r#"{"kv_transfer_params":{"a":[}]}}"#,
            r#"{"kv_transfer_params":{},"kv_transfer_params":null}"#,
            r#"{"choices":[{"kv_transfer_params":{}}]}"#,
        ] {
            let receipt = Nixl.receipt(answer.as_bytes());
            assert_eq!(Nixl.decode(&Transfer::default(), &receipt), None, "{answer}");
        }
    }

    #[test]
    fn mooncake_s_legs_know_each_other_by_the_transfer() {
        let mut transfer = Transfer { id: "t-\"1".to_owned(), ..Transfer::default() };
        assert_eq!(
            value(&Mooncake.prefill(&transfer)),
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": "t-\"1"})
        );
        assert_eq!(Mooncake.decode(&transfer, &Receipt::default()), None, "nobody knows where the blocks are");
        let engines = vec![(0, "e".to_owned()), (1, "f".to_owned())];
        transfer.bootstrap = Some(Arc::new(Bootstrap { address: "http://192.0.2.1:8998".to_owned(), engines }));
        assert_eq!(
            value(&Mooncake.decode(&transfer, &Receipt::default()).unwrap()),
            json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": "t-\"1",
                   "remote_bootstrap_addr": "http://192.0.2.1:8998", "remote_engine_id": "e"})
        );
        transfer.rank = Some(1);
        assert_eq!(value(&Mooncake.decode(&transfer, &Receipt::default()).unwrap())["remote_engine_id"], "f");
        transfer.rank = Some(2);
        assert_eq!(Mooncake.decode(&transfer, &Receipt::default()), None);
    }
}
