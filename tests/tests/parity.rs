//! kvlb names blocks and reads events exactly as recorded engines do.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod golden;

use kvlb::contract::events::{self, Attention, Batch, Event, Medium, Removed, Stored, WireHash};
use kvlb::contract::{
    BlockExtra, BlockHash, BlockSize, Digest, Extra, ExtraKey, HashAlgo, Hasher, KeyEra, Lora, NoneSeed, TokenId,
};
use serde_json::{Map, Value};

fn seed(case: &Value) -> NoneSeed {
    case["pythonhashseed"].as_str().map_or(NoneSeed::Unset, |seed| NoneSeed::Text(seed.to_owned()))
}

fn algo(case: &Value) -> HashAlgo {
    case["algo"].as_str().unwrap().parse().unwrap()
}

fn block_size(case: &Value) -> usize {
    usize::try_from(case["block_size"].as_u64().unwrap()).unwrap()
}

fn tokens(case: &Value) -> Vec<u64> {
    case["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
}

fn blocks(case: &Value) -> &Vec<Value> {
    case["blocks"].as_array().unwrap()
}

/// vLLM 0.31 began to tag extra keys.
fn era(version: &str) -> KeyEra {
    let minor: u32 = version.split('.').nth(1).unwrap().parse().unwrap();
    if minor < 31 { KeyEra::Untagged } else { KeyEra::Tagged }
}

/// Names a case block by block and compares every digest; says how many blocks there were.
fn compare(case: &Value, era: KeyEra) -> Result<usize, String> {
    let algo = algo(case);
    let mut parent = algo.none_hash(&seed(case)).ok_or("no NONE_HASH")?;
    same("none_hash", parent.as_bytes(), &case["none_hash"])?;
    let tokens = tokens(case);
    let named: Vec<_> = tokens.chunks_exact(block_size(case)).collect();
    if named.len() != blocks(case).len() && case.get("lookahead").is_none() {
        return Err(format!("{} blocks, not {}", named.len(), blocks(case).len()));
    }
    for (tokens, expected) in named.into_iter().zip(blocks(case)) {
        same("parent", parent.as_bytes(), &expected["parent"])?;
        let (keys, lookahead) = block_extra(&expected["extra_keys"], case, era);
        let extra = BlockExtra { keys: &keys, lookahead: &lookahead };
        parent = algo.step(&parent, tokens, extra, era).map_err(|error| error.to_string())?;
        same("digest", parent.as_bytes(), &expected["digest"])?;
        if parent.name().0.to_string() != expected["u64"].as_str().unwrap() {
            return Err(format!("name {}, not {}", parent.name().0, expected["u64"]));
        }
    }
    Ok(blocks(case).len())
}

fn same(what: &str, ours: &[u8], expected: &Value) -> Result<(), String> {
    let expected = golden::hex(expected.as_str().unwrap());
    if ours == expected { Ok(()) } else { Err(format!("{what} {ours:02x?}, not {expected:02x?}")) }
}

/// A block's extra keys from the form in which the engine hashed them.
fn block_extra(value: &Value, case: &Value, era: KeyEra) -> (Vec<ExtraKey>, Vec<TokenId>) {
    let Some(items) = value.as_array() else { return Default::default() };
    if case.get("lookahead").is_none() {
        return (items.iter().map(|item| extra_key(item, case, era)).collect(), Vec::new());
    }
    let (keys, _) = block_extra(&items[0], &Value::Null, era);
    (keys, items[1..].iter().map(token).collect())
}

fn token(value: &Value) -> TokenId {
    TokenId(u32::try_from(value.as_u64().unwrap()).unwrap())
}

fn extra_key(item: &Value, case: &Value, era: KeyEra) -> ExtraKey {
    if let Some(digest) = golden::hex_value(item) {
        return ExtraKey::PromptEmbeds(digest);
    }
    if let Some(id) = item.as_i64() {
        return ExtraKey::LoraId(id);
    }
    let owned = |value: &Value| value.as_str().unwrap().to_owned();
    let Some(parts) = item.as_array() else {
        let is_adapter = case["lora"][0] == *item;
        return if is_adapter {
            ExtraKey::Lora { name: owned(item), path: None }
        } else {
            ExtraKey::CacheSalt(owned(item))
        };
    };
    match (era, parts[0].as_str().unwrap()) {
        (KeyEra::Untagged, id) => ExtraKey::Mm { id: id.to_owned(), offset: parts[1].as_i64() },
        (KeyEra::Tagged, "lora") => ExtraKey::Lora { name: owned(&parts[1]), path: Some(owned(&parts[2])) },
        (KeyEra::Tagged, "mm") => ExtraKey::Mm { id: owned(&parts[1]), offset: parts[2].as_i64() },
        (KeyEra::Tagged, "cache_salt") => ExtraKey::CacheSalt(owned(&parts[1])),
        (KeyEra::Tagged, "prompt_embeds") => ExtraKey::PromptEmbeds(golden::hex_value(&parts[1]).unwrap()),
        (KeyEra::Tagged, tag) => panic!("a new kind of extra key: {tag}"),
    }
}

fn cases(path: &str) -> Vec<Value> {
    golden::json(path)["cases"].as_array().unwrap().clone()
}

fn about(version: &str, case: &Value) -> String {
    format!("{version} {} {} {}", case["name"], case["algo"], case["pythonhashseed"])
}

#[test]
fn every_block_of_the_core_vectors_has_its_digest_under_all_four_algorithms() {
    let mut compared = 0;
    for case in cases("vllm-0.32.0/core.json.gz") {
        compared += compare(&case, KeyEra::Tagged).unwrap_or_else(|error| panic!("{}: {error}", about("core", &case)));
    }
    assert_eq!(compared, 670, "blocks in the file");
}

#[test]
fn the_hasher_of_a_rule_names_prompts_as_the_core_vectors_and_shows_the_same_bytes() {
    let mut prompts = 0;
    for case in cases("vllm-0.32.0/core.json.gz") {
        let algo = algo(&case);
        // Some vectors hold integers that are no token ids; the test above covers them.
        let ids: Result<Vec<_>, _> = tokens(&case).into_iter().map(|token| u32::try_from(token).map(TokenId)).collect();
        let Ok(ids) = ids else { continue };
        let size = BlockSize::new(u32::try_from(block_size(&case)).unwrap()).unwrap();
        let hasher = Hasher::new(algo, &seed(&case), size);
        let names = hasher.block_hashes(&ids, &Extra::default(), KeyEra::Tagged).unwrap();
        let expected: Vec<_> =
            blocks(&case).iter().map(|block| BlockHash(block["u64"].as_str().unwrap().parse().unwrap())).collect();
        assert_eq!(names, expected, "{}", about("core", &case));
        let shown = hasher.explain(&ids, &Extra::default(), KeyEra::Tagged).unwrap();
        let inputs: Vec<_> = blocks(&case).iter().map(|block| golden::hex(block["input"].as_str().unwrap())).collect();
        assert_eq!(shown.into_iter().map(|block| block.input).collect::<Vec<_>>(), inputs);
        prompts += 1;
    }
    assert!(prompts > 150, "{prompts}");
}

#[test]
fn one_wrong_token_parent_seed_or_expected_byte_is_caught_in_every_case() {
    let mut broken = 0;
    for case in cases("vllm-0.32.0/core.json.gz").into_iter().filter(|case| !blocks(case).is_empty()) {
        let mut mutants = vec![case.clone(); 4];
        let token = case["tokens"][0].as_u64().unwrap();
        mutants[0]["tokens"][0] = (token ^ 1).into();
        mutants[1]["pythonhashseed"] = "another seed".into();
        let digest = case["blocks"][0]["digest"].as_str().unwrap();
        let flipped = if digest.ends_with('0') { "1" } else { "0" };
        mutants[2]["blocks"][0]["digest"] = format!("{}{flipped}", &digest[..digest.len() - 1]).into();
        let other = if algo(&case) == HashAlgo::Sha256Cbor { "sha256" } else { "sha256_cbor" };
        mutants[3]["algo"] = other.into();
        for mutant in mutants {
            assert!(compare(&mutant, KeyEra::Tagged).is_err(), "{}", about("core", &mutant));
            broken += 1;
        }
    }
    assert!(broken > 1000, "{broken}");
}

#[test]
fn none_hash_is_every_versions_own_and_never_guessed_where_it_is_random() {
    let versions = golden::versions_with("none_hash.json.gz");
    assert_eq!(versions, ["vllm-0.10.2", "vllm-0.18.0", "vllm-0.32.0", "vllm-0.33.0"]);
    for version in versions {
        for case in cases(&format!("{version}/none_hash.json.gz")) {
            let ours = algo(&case).none_hash(&seed(&case));
            if case["deterministic"] == true {
                same("none_hash", ours.unwrap().as_bytes(), &case["none_hash"]).unwrap();
            } else {
                assert_eq!(seed(&case), NoneSeed::Unset, "{version}: random only when unset");
                let xxhash = algo(&case).label().starts_with("xxhash");
                assert!(xxhash || ["vllm-0.10.2", "vllm-0.18.0"].contains(&version.as_str()), "{version} {case}");
                assert_eq!(ours.is_none(), xxhash, "fixed for sha256 from 0.29 on");
            }
        }
    }
}

#[test]
fn extra_keys_of_every_kind_and_era_enter_the_hash_as_the_engine_writes_them() {
    let versions = golden::versions_with("extra.json.gz");
    assert_eq!(versions, ["vllm-0.10.2", "vllm-0.18.0", "vllm-0.32.0", "vllm-0.33.0"]);
    for version in versions {
        let era = era(version.trim_start_matches("vllm-"));
        let mut compared = 0;
        for case in cases(&format!("{version}/extra.json.gz")) {
            let name = case["name"].as_str().unwrap();
            // A pickle refers back to a Python object that it met before; which objects are one is not in the data.
            let by_identity = name.contains("mm") || name == "all";
            if matches!(algo(&case), HashAlgo::Sha256 | HashAlgo::Xxhash) && by_identity {
                continue;
            }
            compare(&case, era).unwrap_or_else(|error| panic!("{}: {error}", about(&version, &case)));
            compared += 1;
        }
        assert!(compared > 20, "{version}: {compared}");
    }
}

#[test]
fn a_prompt_with_a_salt_or_an_adapter_is_named_in_both_eras() {
    let mut prompts = 0;
    for version in golden::versions_with("extra.json.gz") {
        let era = era(version.trim_start_matches("vllm-"));
        for case in cases(&format!("{version}/extra.json.gz")) {
            let name = case["name"].as_str().unwrap();
            let algo = algo(&case);
            let lora = matches!(name, "lora" | "lora+salt");
            if !lora && !name.starts_with("salt") && name != "none" {
                continue;
            }
            let ids: Vec<_> = case["tokens"].as_array().unwrap().iter().map(token).collect();
            let numbered = version == "vllm-0.10.2";
            let adapter = |of: &Value| Lora {
                name: of[0].as_str().unwrap().to_owned(),
                path: of[1].as_str().map(str::to_owned),
                number: numbered.then(|| of[2].as_i64().unwrap()),
            };
            let extra = Extra {
                cache_salt: case["salt"].as_str().map(str::to_owned),
                lora: case.get("lora").filter(|of| of.is_array()).map(adapter),
            };
            let size = BlockSize::new(u32::try_from(block_size(&case)).unwrap()).unwrap();
            let names = Hasher::new(algo, &seed(&case), size).block_hashes(&ids, &extra, era).unwrap();
            let expected: Vec<u64> =
                blocks(&case).iter().map(|block| block["u64"].as_str().unwrap().parse().unwrap()).collect();
            assert_eq!(names.iter().map(|name| name.0).collect::<Vec<_>>(), expected, "{}", about(&version, &case));
            let wrong_era = if era == KeyEra::Tagged { KeyEra::Untagged } else { KeyEra::Tagged };
            let others = Hasher::new(algo, &seed(&case), size).block_hashes(&ids, &extra, wrong_era);
            assert_eq!(others == Ok(names), matches!(name, "none" | "salt-empty-string"), "{}", about(&version, &case));
            prompts += 1;
        }
    }
    assert_eq!(prompts, 77, "seven cases, of two algorithms in 0.10.2 and of three in each version after");
}

/// What a batch must decode to, from the generic decoding beside it. `fields` gives the order of the array form.
fn expected_batch(decoded: &Value, fields: &Value) -> Batch {
    let events = decoded[1].as_array().unwrap().iter().map(|event| expected_event(&named(event, fields))).collect();
    Batch {
        ts: decoded[0].as_f64().unwrap(),
        dp_rank: decoded[2].as_i64(),
        events,
        undecodable: 0,
        unknown: 0,
        skipped: 0,
    }
}

/// An event's fields by name, in either form.
fn named(event: &Value, fields: &Value) -> Map<String, Value> {
    let Some(items) = event.as_array() else { return event.as_object().unwrap().clone() };
    let names = fields[items[0].as_str().unwrap()].as_array().unwrap();
    let pairs = names.iter().zip(&items[1..]).map(|(name, value)| (name.as_str().unwrap().to_owned(), value.clone()));
    std::iter::once(("type".to_owned(), items[0].clone())).chain(pairs).collect()
}

fn expected_event(event: &Map<String, Value>) -> Event {
    let field = |name: &str| event.get(name).filter(|value| !value.is_null());
    let hashes = || field("block_hashes").unwrap().as_array().unwrap().iter().map(wire_hash).collect();
    let medium = match field("medium").and_then(Value::as_str) {
        None | Some("GPU") => Medium::Gpu,
        Some("CPU") => Medium::Cpu,
        Some("STORAGE") => Medium::Storage,
        Some(other) => panic!("{other}"),
    };
    let group = field("group_idx").map(|group| u32::try_from(group.as_u64().unwrap()).unwrap());
    match event["type"].as_str().unwrap() {
        "BlockStored" => Event::Stored(Stored {
            hashes: hashes(),
            parent: field("parent_block_hash").map(wire_hash),
            tokens: field("token_ids").unwrap().as_array().unwrap().iter().map(token).collect(),
            block_size: u32::try_from(field("block_size").unwrap().as_u64().unwrap()).unwrap(),
            medium,
            lora_id: field("lora_id").and_then(Value::as_i64),
            lora_name: field("lora_name").and_then(Value::as_str).map(str::to_owned),
            extra_keys: field("extra_keys").map(|blocks| expected_keys(blocks, field("lora_name"))),
            group,
            attention: match field("kv_cache_spec_kind").and_then(Value::as_str) {
                None => Attention::Unstated,
                Some("full_attention") => Attention::Full,
                Some("sliding_window") => Attention::Partial,
                Some(other) => panic!("{other}"),
            },
            lookahead: field("lookahead_token_ids").map(|blocks| {
                let blocks = blocks.as_array().unwrap().iter();
                blocks.map(|tokens| tokens.as_array().unwrap().iter().map(token).collect()).collect()
            }),
        }),
        "BlockRemoved" => Event::Removed(Removed { hashes: hashes(), medium, group }),
        "AllBlocksCleared" => Event::Cleared,
        other => panic!("{other}"),
    }
}

fn expected_keys(blocks: &Value, lora: Option<&Value>) -> Vec<Vec<ExtraKey>> {
    let case = serde_json::json!({ "lora": [lora] });
    let keys = |block: &Value| block_extra(block, &case, KeyEra::Untagged).0;
    blocks.as_array().unwrap().iter().map(keys).collect()
}

fn wire_hash(value: &Value) -> WireHash {
    let Some(bytes) = golden::hex_value(value) else { return BlockHash(value.as_u64().unwrap()).into() };
    let digest = match bytes.len() {
        16 => Digest::Xxh3(bytes.try_into().unwrap()),
        _ => Digest::Sha256(bytes.try_into().unwrap()),
    };
    WireHash { name: digest.name(), digest: Some(digest) }
}

#[test]
fn every_wire_vector_of_every_version_decodes_to_what_the_engine_meant() {
    let versions = golden::versions_with("wire.json.gz");
    assert_eq!(versions.len(), 7);
    for version in versions {
        let file = golden::json(&format!("{version}/wire.json.gz"));
        let cases = file["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 20);
        for case in cases {
            let batch = events::decode(&golden::hex(case["payload"].as_str().unwrap())).unwrap();
            assert_eq!(batch, expected_batch(&case["decoded"], &file["fields"]), "{version} {}", case["name"]);
        }
    }
}

#[test]
fn every_recorded_frame_decodes_to_what_the_engine_meant() {
    let mut frames = 0;
    for entry in std::fs::read_dir(golden::root().join("vllm-0.32.0/events")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        for line in golden::lines(&format!("vllm-0.32.0/events/{name}")).iter().filter(|line| line["t"] == "frame") {
            let batch = events::decode(&golden::hex(line["frames"][2].as_str().unwrap())).unwrap();
            let mut expected = expected_batch(&line["decoded"], &Value::Null);
            assert!((batch.ts - expected.ts).abs() < 1e-6, "JSON readers may round the last bit of a time");
            expected.ts = batch.ts;
            assert_eq!(batch, expected, "{name} {}", line["seq"]);
            frames += 1;
        }
    }
    assert!(frames > 100, "{frames}");
}
