//! Every recorded event stream, applied from its first frame to its last, leaves exactly the blocks that its engine held.
//!
//! What the engine held is worked out twice without kvlb's inventory: from the requests and answers that the recording
//! has (every full block whose tokens were computed is cached until something is evicted or reset), and by counting the
//! copies in the recorder's own decoding of each frame.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod golden;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvlb::clock;
use kvlb::contract::events::{self, Event};
use kvlb::contract::{
    BlockHash, BlockSize, EventSeq, Extra, HashAlgo, Hasher, KeyEra, Lora, NoneSeed, Rehash, TokenId,
};
use kvlb::fleet::Keying;
use kvlb::state::index::{Index, IndexConfig};
use kvlb::state::kv::{EndpointKv, Naming};
use serde_json::Value;

/// A recording and what its first line says.
struct Recording {
    lines: Vec<Value>,
    algo: HashAlgo,
    seed: NoneSeed,
    block_size: BlockSize,
}

impl Recording {
    fn read(name: &str) -> Self {
        let lines = golden::lines(&format!("vllm-0.32.0/events/{name}.jsonl.gz"));
        let args = lines[0]["args"].as_str().unwrap_or("--block-size 16 --prefix-caching-hash-algo sha256_cbor");
        let argument = |flag: &str| {
            let mut words = args.split(' ').skip_while(|word| *word != flag);
            words.nth(1).map(str::to_owned)
        };
        let seed = match lines[0]["PYTHONHASHSEED"].as_str() {
            Some("unset") => NoneSeed::Unset,
            seed => NoneSeed::Text(seed.unwrap_or("0").to_owned()),
        };
        let algo = argument("--prefix-caching-hash-algo").map_or(HashAlgo::Sha256, |algo| algo.parse().unwrap());
        let block_size = BlockSize::new(argument("--block-size").unwrap().parse().unwrap()).unwrap();
        Self { lines, algo, seed, block_size }
    }

    fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.lines.iter().filter(move |line| line["t"] == kind)
    }

    /// Payload and the recorder's decoding of each frame of a publisher, in order.
    fn frames(&self, publisher: u64) -> Vec<(Vec<u8>, &Value)> {
        let number = |line: &Value| match line["from"].as_str() {
            Some(from) => u64::from(from == "decode"),
            None => line["pub"].as_u64().unwrap(),
        };
        let of_publisher = self.of_kind("frame").filter(|line| number(line) == publisher);
        of_publisher.map(|line| (golden::hex(line["frames"][2].as_str().unwrap()), &line["decoded"])).collect()
    }

    /// The tokens that requests up to a reset, or after it, had computed, and what else is in their names; by rank.
    fn computed(&self, rank: u64, after_reset: bool) -> Vec<(Vec<TokenId>, Extra)> {
        let reset = self.of_kind("request").find(|line| line["path"] == "/reset_prefix_cache");
        let reset = reset.map_or(u64::MAX, |line| line["step"].as_u64().unwrap());
        let mut all = Vec::new();
        for answer in self.of_kind("response").filter(|line| line["prompt_token_ids"].is_array()) {
            let step = answer["step"].as_u64().unwrap();
            // A request that no frame tells of found everything cached, or had no full block.
            let told = self.of_kind("frame").find(|frame| frame["step"] == step);
            if (step > reset) != after_reset || told.is_none_or(|frame| frame["pub"] != rank) {
                continue;
            }
            let request = self.of_kind("request").find(|line| line["step"] == step).unwrap();
            let prompts = answer["prompt_token_ids"].as_array().unwrap();
            for (prompt, output) in prompts.iter().zip(answer["output_token_ids"].as_array().unwrap()) {
                let mut tokens: Vec<_> = [prompt, output].into_iter().flat_map(tokens).collect();
                // The last one was sampled, and computed by nobody.
                tokens.pop();
                all.push((tokens, extra(&request["body"])));
            }
        }
        all
    }

    /// The names of full blocks of what requests had computed.
    fn truth(&self, rank: u64, after_reset: bool) -> BTreeSet<BlockHash> {
        let hasher = Hasher::new(self.algo, &self.seed, self.block_size);
        let names =
            |(tokens, extra): (Vec<TokenId>, Extra)| hasher.block_hashes(&tokens, &extra, KeyEra::Tagged).unwrap();
        self.computed(rank, after_reset).into_iter().flat_map(names).collect()
    }
}

fn tokens(list: &Value) -> Vec<TokenId> {
    list.as_array().unwrap().iter().map(|token| TokenId(u32::try_from(token.as_u64().unwrap()).unwrap())).collect()
}

fn extra(body: &Value) -> Extra {
    let salt = body["cache_salt"].as_str().map(str::to_owned);
    let adapter = body["model"].as_str().filter(|model| model.starts_with("lora-"));
    // The path is what `/v1/models` of this engine says: http/get-models-with-lora.response.
    let lora = adapter.map(|name| Lora { name: name.to_owned(), path: Some(format!("models/{name}")), number: None });
    Extra { cache_salt: salt, lora }
}

/// Copies by name and group, as the recorder's decoding has them.
#[derive(Default)]
struct Copies {
    counts: BTreeMap<(BlockHash, u64), u32>,
    full: BTreeSet<u64>,
    /// Removals of what was not there.
    unknown: usize,
}

impl Copies {
    fn apply(&mut self, batch: &Value) {
        for event in batch[1].as_array().unwrap() {
            let group = event["group_idx"].as_u64().unwrap_or(0);
            let names = event["block_hashes"].as_array().into_iter().flatten().map(name);
            match event["type"].as_str().unwrap() {
                "BlockStored" => {
                    if event["kv_cache_spec_kind"] == "full_attention" {
                        self.full.insert(group);
                    }
                    names.for_each(|name| *self.counts.entry((name, group)).or_default() += 1);
                }
                "BlockRemoved" => {
                    for name in names {
                        match self.counts.get_mut(&(name, group)) {
                            Some(copies) if *copies > 0 => *copies -= 1,
                            _ => self.unknown += 1,
                        }
                    }
                }
                "AllBlocksCleared" => self.counts.clear(),
                other => panic!("a new kind of event: {other}"),
            }
        }
    }

    fn held(&self) -> BTreeSet<BlockHash> {
        let held = self.counts.iter().filter(|((_, group), copies)| self.full.contains(group) && **copies > 0);
        held.map(|((name, _), _)| *name).collect()
    }

    fn on_gpu(&self) -> u32 {
        self.counts.values().sum()
    }
}

fn name(hash: &Value) -> BlockHash {
    let bytes = golden::hex_value(hash);
    BlockHash(bytes.map_or_else(|| hash.as_u64().unwrap(), |bytes| u64::from_be_bytes(*bytes.last_chunk().unwrap())))
}

fn endpoint(recording: &Recording, keying: Keying) -> EndpointKv {
    let index = Arc::new(Index::new(IndexConfig::default()));
    let Recording { algo, seed, block_size, .. } = recording;
    let naming = Naming { algo: *algo, seed: seed.clone(), block_size: *block_size, keying, rehash: Rehash::new(7) };
    EndpointKv::new(index, &naming)
}

/// The engine's names of all blocks held.
fn held(endpoint: &EndpointKv) -> BTreeSet<BlockHash> {
    endpoint.inventory().into_iter().map(|(name, _)| name).collect()
}

/// Applies one publisher's frames; compares with the count of copies after each. Says what was held when the cache was
/// cleared, if it was, and at the end.
fn replay(recording: &Recording, publisher: u64, keying: Keying) -> (Option<BTreeSet<BlockHash>>, BTreeSet<BlockHash>) {
    let (endpoint, mut copies) = (endpoint(recording, keying), Copies::default());
    let feed = endpoint.feed(usize::try_from(publisher).unwrap());
    let mut when_cleared = None;
    for (seq, (payload, decoded)) in (0..).zip(recording.frames(publisher)) {
        let batch = events::decode(&payload).unwrap();
        assert_eq!((batch.undecodable, batch.unknown, batch.skipped), (0, 0, 0));
        if batch.events.contains(&Event::Cleared) {
            when_cleared = Some(held(&endpoint));
        }
        endpoint.apply(&feed, EventSeq(seq), &batch, clock::now());
        copies.apply(decoded);
        assert_eq!(held(&endpoint), copies.held(), "after {seq} of {publisher}");
        assert!(copies.unknown == 0, "after {seq} of {publisher}");
    }
    (when_cleared, held(&endpoint))
}

/// Streams in which nothing was evicted: the requests alone say what was held, before the reset and at the end.
#[test]
fn what_requests_computed_is_held_until_a_reset_and_nothing_else_is() {
    let recordings = [
        ("basic_b16_sha256cbor_seed0_int", vec![(Some(238), 2)]),
        ("dp2_b16_sha256cbor_seed0_topic", vec![(Some(6), 2), (Some(6), 2)]),
        ("lora_b16_sha256cbor_seed0", vec![(None, 8)]),
        ("small_b16_sha256cbor_seed0_bytes", vec![(Some(15), 2)]),
        ("small_b32_defaults_unset", vec![(Some(6), 1)]),
    ];
    for (name, ranks) in recordings {
        let recording = Recording::read(name);
        for (rank, (when_cleared, at_end)) in (0..).zip(ranks) {
            let (first, last) = replay(&recording, rank, Keying::Parity);
            let was_cleared = when_cleared.is_some();
            if was_cleared {
                assert_eq!(first.as_ref(), Some(&recording.truth(rank, false)), "{name} {rank}");
            }
            assert_eq!(last, recording.truth(rank, was_cleared), "{name} {rank}");
            assert_eq!((first.map(|names| names.len()), last.len()), (when_cleared, at_end), "{name} {rank}");
        }
    }
}

/// With random bytes for `NONE_HASH` nobody can work out the names; how many there are, is known all the same.
#[test]
fn where_names_cannot_be_worked_out_their_number_can() {
    let recording = Recording::read("small_b16_xxhashcbor_unset_bytes");
    let (first, last) = replay(&recording, 0, Keying::Parity);
    // Names of another seed are others, and equal where these are equal.
    assert_eq!(first.unwrap().len(), recording.truth(0, false).len());
    assert_eq!(last.len(), recording.truth(0, true).len());
}

#[test]
fn a_transferred_prompt_is_held_by_both_sides() {
    let recording = Recording::read("pd_nixl_events");
    let [prefill, decode] = [0, 1].map(|side| replay(&recording, side, Keying::Parity).1);
    assert_eq!((prefill.len(), &prefill), (4, &decode));
}

/// Streams with evictions, preemptions, duplicates and a window's group: the copies say what was held.
#[test]
fn evicted_blocks_are_held_for_as_long_as_a_copy_is_left() {
    for (name, gpu_blocks, removals) in
        [("evict_b16_sha256cbor_seed0_int", 14, 87), ("hybrid_gemma3_b32_sha256cbor_seed0", 60, 22)]
    {
        let recording = Recording::read(name);
        let (when_cleared, at_end) = replay(&recording, 0, Keying::Parity);
        assert!(!when_cleared.unwrap().is_empty(), "{name}");
        assert_eq!(at_end, recording.truth(0, true), "{name}: after the reset nothing was evicted");
        // The count is of physical blocks, one of which is never used.
        let (mut copies, mut removed) = (Copies::default(), 0);
        for (_, batch) in recording.frames(0) {
            copies.apply(batch);
            assert!(copies.on_gpu() < gpu_blocks, "{name}");
            removed += batch[1].as_array().unwrap().iter().filter(|event| event["type"] == "BlockRemoved").count();
        }
        assert_eq!(removed, removals, "{name}");
    }
}

/// A request that ran alone has all its blocks when it ends: nothing is evicted for it before the next one.
#[test]
fn a_request_that_just_ran_is_held_whole() {
    for name in ["evict_b16_sha256cbor_seed0_int", "hybrid_gemma3_b32_sha256cbor_seed0"] {
        let recording = Recording::read(name);
        let hasher = Hasher::new(recording.algo, &recording.seed, recording.block_size);
        let endpoint = endpoint(&recording, Keying::Parity);
        let feed = endpoint.feed(0);
        let mut checked = 0;
        for answer in recording.of_kind("response").filter(|line| line["prompt_token_ids"].is_array()) {
            let step = &answer["step"];
            for frame in recording.of_kind("frame").filter(|line| line["step"] == *step) {
                let batch = events::decode(&golden::hex(frame["frames"][2].as_str().unwrap())).unwrap();
                if answer["part"] == 0 {
                    endpoint.apply(&feed, EventSeq(0), &batch, clock::now());
                }
            }
            if recording.of_kind("request").filter(|line| line["step"] == *step).count() == 1 {
                let all = [&answer["prompt_token_ids"][0], &answer["output_token_ids"][0]].into_iter().flat_map(tokens);
                let mut computed: Vec<_> = all.collect();
                computed.pop();
                let names = hasher.block_hashes(&computed, &Extra::default(), KeyEra::Tagged).unwrap();
                let held = held(&endpoint);
                assert!(names.iter().all(|name| held.contains(name)), "{name} {step}");
                let mut overlaps = Vec::new();
                endpoint.index().overlaps(&names, &mut overlaps);
                assert_eq!(overlaps[0].depth as usize, names.len(), "{name} {step}");
                checked += 1;
            }
        }
        assert!(checked >= 12, "{name}: {checked}");
    }
}

/// The recording of the announcement that was asked for with `kv_cache_report_mode`: two blocks that were hit.
#[test]
fn hits_that_are_announced_again_change_nothing_that_is_held() {
    let recording = Recording::read("basic_b16_sha256cbor_seed0_int");
    let is_full = |line: &&Value| line["body"]["vllm_xargs"]["kv_cache_report_mode"] == "full";
    let asked = recording.of_kind("request").find(is_full).unwrap();
    let frame = recording.of_kind("frame").find(|frame| frame["step"] == asked["step"]).unwrap();
    let event = &frame["decoded"][1][0];
    assert!(event["parent_block_hash"].is_null());
    let announced: BTreeSet<_> = event["block_hashes"].as_array().unwrap().iter().map(name).collect();
    let mut before = Copies::default();
    for earlier in recording.of_kind("frame").take_while(|other| other["seq"] != frame["seq"]) {
        before.apply(&earlier["decoded"]);
    }
    assert_eq!(announced.len(), 2);
    assert!(announced.is_subset(&before.held()), "they were hits, and no new copies");
}

/// In our own names the same blocks are held, whatever the engine calls them. A window's blocks have no names of ours.
#[test]
fn in_our_own_names_the_same_blocks_are_held() {
    let names = [
        ("basic_b16_sha256cbor_seed0_int", 1),
        ("dp2_b16_sha256cbor_seed0_topic", 2),
        ("evict_b16_sha256cbor_seed0_int", 1),
        ("hybrid_gemma3_b32_sha256cbor_seed0", 1),
        ("lora_b16_sha256cbor_seed0", 1),
        ("small_b16_sha256cbor_seed0_bytes", 1),
        ("small_b16_xxhashcbor_unset_bytes", 1),
        ("small_b32_defaults_unset", 1),
        ("pd_nixl_events", 2),
    ];
    for (name, publishers) in names {
        let recording = Recording::read(name);
        for publisher in 0..publishers {
            let ours = replay(&recording, publisher, Keying::Rehash);
            assert_eq!(ours, replay(&recording, publisher, Keying::Parity), "{name} {publisher}");
        }
    }
}
