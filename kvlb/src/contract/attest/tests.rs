use super::*;

const SIZE: u32 = 16;

fn seed(text: &str) -> NoneSeed {
    NoneSeed::Text(text.to_owned())
}

fn attestor() -> Attestor {
    Attestor::new(HashAlgo::Sha256Cbor, seed("0"), BlockSize::new(SIZE).unwrap())
}

/// An engine's way of naming, and what it announces.
struct Engine {
    algo: HashAlgo,
    seed: NoneSeed,
    block_size: u32,
    era: KeyEra,
    bytes: bool,
}

impl Engine {
    fn like_the_rule() -> Self {
        let algo = HashAlgo::Sha256Cbor;
        Self { algo, seed: seed("0"), block_size: SIZE, era: KeyEra::Tagged, bytes: false }
    }

    fn wire(&self, digest: Digest) -> WireHash {
        WireHash { name: digest.name(), digest: self.bytes.then_some(digest) }
    }

    fn stores(&self, first_token: u32, blocks: u32, salt: Option<&str>, parent: Option<Digest>) -> Stored {
        let tokens: Vec<_> = (0..blocks * self.block_size).map(|token| TokenId(first_token + token)).collect();
        let mut extra_keys = vec![Vec::new(); blocks as usize];
        extra_keys[0] = salt.map(|salt| ExtraKey::CacheSalt(salt.to_owned())).into_iter().collect();
        let mut stored = Stored {
            parent: parent.map(|parent| self.wire(parent)),
            tokens,
            block_size: self.block_size,
            extra_keys: Some(extra_keys),
            ..Stored::default()
        };
        let root = self.algo.none_hash(&self.seed).unwrap();
        let size = BlockSize::new(self.block_size).unwrap();
        let digests = chain(self.algo, parent.unwrap_or(root), &stored, size, self.era).unwrap();
        stored.hashes = digests.into_iter().map(|digest| self.wire(digest)).collect();
        stored
    }

    fn last(&self, stored: &Stored) -> Digest {
        let root = self.algo.none_hash(&self.seed).unwrap();
        let size = BlockSize::new(self.block_size).unwrap();
        *chain(self.algo, root, stored, size, self.era).unwrap().last().unwrap()
    }
}

fn label(algo: &str) -> EngineLabel {
    EngineLabel { hash_algo: Some(algo.to_owned()), block_size: Some(SIZE), num_gpu_blocks: None }
}

#[track_caller]
fn assert_mismatch(attestor: &Attestor, leg: Leg, part: &str) {
    assert_eq!(attestor.contract().leg(), Some(leg), "{:?}", attestor.contract());
    let detail = attestor.contract().detail().unwrap();
    assert!(detail.contains(part), "{detail}");
}

#[test]
fn one_event_without_a_parent_verifies_a_contract() {
    let mut attestor = attestor();
    assert_eq!(attestor.contract(), &Contract::Unverified);
    assert!(attestor.check(&Engine::like_the_rule().stores(1, 3, None, None)));
    assert_eq!(attestor.contract(), &Contract::Verified);
    assert!(!attestor.check(&Engine::like_the_rule().stores(9, 3, None, None)), "no change");
}

#[test]
fn another_block_size_is_named_with_both_sides_and_the_remedy() {
    let mut attestor = attestor();
    attestor.check(&Engine { block_size: 32, ..Engine::like_the_rule() }.stores(1, 1, None, None));
    assert_mismatch(
        &attestor,
        Leg::BlockSize,
        "engine block size 32, rule kvBlockSize 16: create the rule with kvBlockSize 32 or start the engine with \
         --block-size 16",
    );
}

#[test]
fn a_wrong_block_size_does_not_hide_a_wrong_algorithm() {
    let mut attestor = attestor();
    let engine = Engine { block_size: 32, algo: HashAlgo::Sha256, seed: NoneSeed::Unset, ..Engine::like_the_rule() };
    attestor.check(&engine.stores(1, 1, None, None));
    assert_mismatch(&attestor, Leg::BlockSize, "; also algorithm: engine algorithm sha256, ");
}

#[test]
fn every_other_algorithm_is_named_whatever_its_seed() {
    for algo in HashAlgo::ALL.into_iter().filter(|algo| *algo != HashAlgo::Sha256Cbor) {
        for text in ["0", "42", "1234"] {
            let mut attestor = attestor();
            attestor.check(&Engine { algo, seed: seed(text), ..Engine::like_the_rule() }.stores(1, 2, None, None));
            assert_mismatch(&attestor, Leg::Algorithm, &format!("engine algorithm {algo}, rule kvHashAlgo"));
            assert_mismatch(&attestor, Leg::Algorithm, "--prefix-caching-hash-algo sha256_cbor");
        }
    }
}

#[test]
fn a_common_seed_is_named() {
    let mut attestor = attestor();
    attestor.check(&Engine { seed: seed("42"), ..Engine::like_the_rule() }.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Seed, "engine PYTHONHASHSEED \"42\", LLB_KV_NONE_HASH_SEED \"0\"");
    let mut attestor = self::attestor();
    attestor.check(&Engine { seed: NoneSeed::Unset, ..Engine::like_the_rule() }.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Seed, "unset LLB_KV_NONE_HASH_SEED here");
}

#[test]
fn an_uncommon_seed_is_found_once_the_label_confirms_the_algorithm() {
    let engine = Engine { seed: seed("777"), ..Engine::like_the_rule() };
    let mut attestor = attestor();
    attestor.check(&engine.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Unknown, "no known algorithm and seed");
    assert!(attestor.set_label(label("sha256_cbor")), "the verdict changes with the label");
    assert_mismatch(&attestor, Leg::Seed, "another PYTHONHASHSEED");
    let mut attestor = self::attestor();
    attestor.set_label(label("xxhash"));
    attestor.check(&engine.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Algorithm, "engine algorithm xxhash, ");
}

#[test]
fn a_parent_sent_as_bytes_proves_the_algorithm_and_not_the_seed() {
    let engine = Engine { seed: seed("777"), bytes: true, ..Engine::like_the_rule() };
    let root = engine.stores(1, 2, None, None);
    let child = engine.stores(90, 2, None, Some(engine.last(&root)));
    let mut attestor = attestor();
    assert!(!attestor.check(&child));
    assert_eq!(attestor.contract(), &Contract::Unverified);
    attestor.check(&root);
    assert_mismatch(&attestor, Leg::Seed, "another PYTHONHASHSEED");
}

#[test]
fn a_child_is_checked_when_its_parent_was_computed() {
    let engine = Engine::like_the_rule();
    let root = engine.stores(1, 2, None, None);
    let mut child = engine.stores(90, 2, None, Some(engine.last(&root)));
    let mut attestor = attestor();
    assert!(!attestor.check(&child), "a 64-bit parent is not enough");
    attestor.check(&root);
    child.hashes[1].name.0 ^= 1;
    assert!(attestor.check(&child));
    assert_mismatch(&attestor, Leg::Unknown, "");
}

#[test]
fn the_era_of_extra_keys_is_learned_and_no_mismatch() {
    let mut attestor = attestor();
    let engine = Engine { era: KeyEra::Untagged, ..Engine::like_the_rule() };
    attestor.check(&engine.stores(1, 2, Some("tenant"), None));
    assert_eq!((attestor.contract(), attestor.era()), (&Contract::Verified, KeyEra::Untagged));
    attestor.check(&Engine::like_the_rule().stores(1, 2, Some("tenant"), None));
    assert_eq!((attestor.contract(), attestor.era()), (&Contract::Verified, KeyEra::Tagged));
}

#[test]
fn salted_names_that_differ_while_others_agree_break_the_extra_keys() {
    let engine = Engine::like_the_rule();
    let mut attestor = attestor();
    attestor.check(&engine.stores(1, 2, None, None));
    let mut salted = engine.stores(1, 2, Some("tenant"), None);
    salted.hashes[0].name.0 ^= 1;
    assert!(attestor.check(&salted));
    assert_mismatch(&attestor, Leg::ExtraKeys, "cache_salt");
    assert!(!attestor.check(&engine.stores(5, 2, None, None)), "plain names say nothing of it");
    assert!(attestor.check(&engine.stores(5, 2, Some("tenant"), None)));
    assert_eq!(attestor.contract(), &Contract::Verified);
}

#[test]
fn an_engine_that_does_not_announce_extra_keys_may_have_salted_requests() {
    let engine = Engine::like_the_rule();
    let silent = |salt| Stored { extra_keys: None, ..engine.stores(1, 2, salt, None) };
    let mut attestor = attestor();
    attestor.check(&silent(None));
    for _ in 1..UNEXPLAINED_MAX {
        assert!(!attestor.check(&silent(Some("tenant"))));
    }
    assert!(attestor.check(&silent(Some("tenant"))), "not for ever");
    assert_eq!(attestor.contract().label(), "mismatch");
}

#[test]
fn a_restart_with_other_flags_is_seen() {
    let mut attestor = attestor();
    attestor.check(&Engine::like_the_rule().stores(1, 2, None, None));
    attestor.new_life();
    assert_eq!(attestor.contract(), &Contract::Unverified);
    let changed = Engine { seed: seed("42"), ..Engine::like_the_rule() };
    attestor.check(&changed.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Seed, "42");
    attestor.check(&Engine::like_the_rule().stores(1, 2, None, None));
    assert_eq!(attestor.contract(), &Contract::Verified, "and so is its repair");
}

#[test]
fn after_the_first_events_one_in_64_is_checked() {
    let engine = Engine::like_the_rule();
    let mut attestor = attestor();
    let good = engine.stores(1, 1, None, None);
    let bad = Engine { seed: seed("42"), ..Engine::like_the_rule() }.stores(1, 1, None, None);
    attestor.check(&good);
    for _ in 0..CHECKED_FIRST {
        attestor.check(&good);
    }
    let unchecked = (0..1000).take_while(|_| !attestor.check(&bad)).count();
    assert!(0 < unchecked && unchecked < CHECKED_THEN_ONE_IN as usize, "{unchecked}");
}

#[test]
fn an_unset_xxhash_seed_is_unprovable() {
    let size = BlockSize::new(SIZE).unwrap();
    let mut attestor = Attestor::new(HashAlgo::XxhashCbor, NoneSeed::Unset, size);
    let engine = Engine { algo: HashAlgo::XxhashCbor, seed: seed("random bytes"), ..Engine::like_the_rule() };
    attestor.check(&engine.stores(1, 2, None, None));
    assert_mismatch(&attestor, Leg::Unknown, "unprovable");
}

#[test]
fn a_coarser_group_announces_every_second_name() {
    let fine = Engine::like_the_rule().stores(1, 4, None, None);
    let coarse = Stored {
        hashes: vec![fine.hashes[1], fine.hashes[3]],
        block_size: 2 * SIZE,
        extra_keys: Some(vec![Vec::new(); 2]),
        ..fine
    };
    let mut attestor = attestor();
    attestor.check(&coarse);
    assert_eq!(attestor.contract(), &Contract::Verified);
}

#[test]
fn what_cannot_be_recomputed_is_no_evidence() {
    let mut wrong = Engine { seed: seed("777"), ..Engine::like_the_rule() }.stores(1, 2, None, None);
    let mut attestor = attestor();
    for unfit in [
        Stored { medium: Medium::Cpu, ..wrong.clone() },
        Stored { attention: Attention::Partial, ..wrong.clone() },
        Stored { tokens: Vec::new(), ..wrong.clone() },
        Stored { hashes: wrong.hashes[1..].to_vec(), ..wrong.clone() },
        Stored { lora_name: Some("a".into()), ..wrong.clone() },
    ] {
        assert!(!attestor.check(&unfit), "{unfit:?}");
    }
    wrong.extra_keys = Some(vec![vec![ExtraKey::Mm { id: "image".into(), offset: Some(3) }], Vec::new()]);
    assert!(!attestor.check(&wrong));
    assert_eq!(attestor.contract(), &Contract::Unverified);
}

#[test]
fn digests_are_kept_in_bounds() {
    let mut digests = Digests::default();
    for number in 0..DIGESTS_KEPT as u64 + 10 {
        let mut bytes = [0; 16];
        bytes[8..].copy_from_slice(&number.to_be_bytes());
        digests.insert(Digest::Xxh3(bytes));
    }
    assert_eq!((digests.by_name.len(), digests.order.len()), (DIGESTS_KEPT, DIGESTS_KEPT));
    assert!(digests.get(BlockHash(0)).is_none() && digests.get(BlockHash(10)).is_some());
}
