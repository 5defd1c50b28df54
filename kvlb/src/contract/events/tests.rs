use proptest::prelude::*;
use rmpv::Value;

use super::*;

fn payload(events: Vec<Value>) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, &Value::Array(vec![1.5.into(), Value::Array(events), 0.into()])).unwrap();
    out
}

fn map(pairs: &[(&str, Value)]) -> Value {
    Value::Map(pairs.iter().map(|(key, value)| ((*key).into(), value.clone())).collect())
}

fn array(items: &[Value]) -> Value {
    Value::Array(items.to_vec())
}

fn removed(hash: Value) -> Value {
    array(&["BlockRemoved".into(), array(&[hash])])
}

#[test]
fn both_forms_are_read_in_one_batch() {
    let map_form =
        map(&[("type", "BlockRemoved".into()), ("block_hashes", array(&[7.into()])), ("medium", Value::Nil)]);
    let batch = decode(&payload(vec![removed(7.into()), map_form])).unwrap();
    assert_eq!(batch.events.len(), 2);
    assert_eq!(batch.events[0], batch.events[1]);
    assert_eq!((batch.ts, batch.dp_rank), (1.5, Some(0)));
    assert_eq!(time(&payload(Vec::new())).to_bits(), 1.5_f64.to_bits());
    assert_eq!(time(b"\xc0").to_bits(), 0);
}

#[test]
fn the_same_block_is_one_block_in_every_form_of_its_hash() {
    let digest: Vec<u8> = (0..32).map(|byte| 255 - byte).collect();
    let name = u64::from_be_bytes(*digest.last_chunk().unwrap());
    let forms = [
        Value::from(name),
        Value::from(name.cast_signed()),
        Value::Binary(digest[24..].to_vec()),
        Value::Binary(digest[16..].to_vec()),
        Value::Binary(digest.clone()),
    ];
    for form in forms {
        let batch = decode(&payload(vec![removed(form.clone())])).unwrap();
        let [Event::Removed(removed)] = &batch.events[..] else { panic!("{form:?}: {batch:?}") };
        assert_eq!(removed.hashes[0].name, BlockHash(name), "{form:?}");
    }
}

#[test]
fn a_hash_that_is_no_hash_costs_its_event_only() {
    let bad = [Value::F64(1.0), Value::Binary(vec![1; 7]), Value::Nil, "abc".into(), array(&[])];
    for value in bad {
        let batch = decode(&payload(vec![removed(value.clone()), removed(7.into())])).unwrap();
        assert_eq!((batch.undecodable, batch.events.len()), (1, 1), "{value:?}");
    }
}

#[test]
fn unknown_kinds_and_fields_are_stepped_over() {
    let batch = decode(&payload(vec![
        map(&[("type", "BlockMoved".into()), ("block_hashes", "what".into())]),
        array(&["BlockMoved".into(), Value::Nil, 3.into()]),
        map(&[("new", array(&[map(&[])])), ("type", "AllBlocksCleared".into()), ("block_hashes", Value::Nil)]),
        array(&["AllBlocksCleared".into(), 1.into(), 2.into()]),
    ]));
    let batch = batch.unwrap();
    assert_eq!((batch.unknown, batch.undecodable), (2, 0));
    assert_eq!(batch.events, [Event::Cleared, Event::Cleared]);
}

#[test]
fn pairs_of_tokens_are_skipped_and_counted() {
    let pairs = array(&[array(&[1.into(), 2.into()]), array(&[2.into(), 3.into()])]);
    let stored = array(&["BlockStored".into(), array(&[1.into()]), Value::Nil, pairs, 2.into()]);
    let batch = decode(&payload(vec![stored, removed(1.into())])).unwrap();
    assert_eq!((batch.skipped, batch.events.len()), (1, 1));
}

#[test]
fn an_adapter_is_told_from_a_salt_by_its_name() {
    let keys = array(&[array(&["a".into(), "tenant".into()]), array(&["a".into()])]);
    let stored = |adapter: Value| {
        let event = map(&[
            ("type", "BlockStored".into()),
            ("block_hashes", array(&[1.into(), 2.into()])),
            ("extra_keys", keys.clone()),
            ("lora_name", adapter),
        ]);
        let batch = decode(&payload(vec![event])).unwrap();
        let [Event::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
        stored.extra_keys.clone().unwrap()
    };
    let lora = ExtraKey::Lora { name: "a".into(), path: None };
    assert_eq!(stored("a".into()), [vec![lora.clone(), ExtraKey::CacheSalt("tenant".into())], vec![lora]]);
    assert_eq!(stored(Value::Nil)[1], [ExtraKey::CacheSalt("a".into())]);
}

#[test]
fn an_odd_extra_key_makes_a_block_unnameable_and_no_event_unreadable() {
    let keys = array(&[array(&[map(&[]), array(&[1.into()]), Value::F64(0.5)])]);
    let event = map(&[("type", "BlockStored".into()), ("block_hashes", array(&[1.into()])), ("extra_keys", keys)]);
    let batch = decode(&payload(vec![event])).unwrap();
    let [Event::Stored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    assert_eq!(stored.extra_keys, Some(vec![vec![ExtraKey::Unknown; 3]]));
}

#[test]
fn messages_that_are_no_batches_are_refused() {
    for message in [&b""[..], b"\xc0", b"\x90", b"\x91\xcb", b"\x92\xc0\x90", b"\x92\x01\xc0", b"{\"ts\":1}"] {
        assert_eq!(decode(message), Err(DecodeError::NotABatch), "{message:02x?}");
    }
}

#[test]
fn a_message_cut_anywhere_never_panics_and_keeps_what_came_before() {
    let whole = payload(vec![removed(1.into()), removed(2.into())]);
    for cut in 0..whole.len() {
        if let Ok(batch) = decode(&whole[..cut]) {
            assert!(batch.events.len() <= 2);
        }
    }
    let batch = decode(&whole[..whole.len() - 3]).unwrap();
    assert_eq!((batch.events.len(), batch.undecodable), (1, 1));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(message in prop::collection::vec(any::<u8>(), 0..300)) {
        decode(&message).ok();
    }

    #[test]
    fn bytes_flipped_in_a_real_batch_never_panic(at in 0..60usize, byte: u8) {
        let mut message = payload(vec![
            map(&[
                ("type", "BlockStored".into()),
                ("block_hashes", array(&[1.into(), Value::Binary(vec![3; 32])])),
                ("token_ids", array(&[5.into(), 70_000.into()])),
                ("block_size", 1.into()),
            ]),
            removed(9.into()),
        ]);
        let at = at % message.len();
        message[at] = byte;
        decode(&message).ok();
    }
}
