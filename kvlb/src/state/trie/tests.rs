use proptest::prelude::*;

use super::*;

const A: EndpointId = EndpointId(1);
const B: EndpointId = EndpointId(2);

fn steps(trie: &Trie, text: &str) -> Vec<(usize, Vec<EndpointId>)> {
    trie.find(text.as_bytes(), 1).into_iter().map(|step| (step.matched, step.holders)).collect()
}

#[test]
fn a_text_is_found_as_far_as_it_is_known_with_who_was_sent_it() {
    let trie = Trie::default();
    trie.learn(b"You help. How are you?", A);
    trie.learn(b"You help. What is the time?", B);
    assert_eq!(steps(&trie, "You help. What is it?"), [(18, vec![B]), (10, vec![B, A])]);
    assert_eq!(steps(&trie, "You help. How"), [(13, vec![A]), (10, vec![B, A])]);
    assert_eq!(steps(&trie, "You"), [(3, vec![B, A])]);
    assert_eq!(steps(&trie, "I help."), []);
    assert_eq!(trie.find(b"You help. How", 11).len(), 1, "the shorter one is too short");
    trie.learn(b"You help.", A);
    assert_eq!(steps(&trie, "You help."), [(9, vec![A, B])]);
    trie.tree.read().check_invariants();
}

#[test]
fn what_did_not_get_there_is_taken_back() {
    let trie = Trie::default();
    trie.learn(b"abcdef", A);
    trie.learn(b"abcxyz", B);
    trie.unlearn(b"abcxyz", B);
    assert_eq!((steps(&trie, "abcxyz"), trie.usage().nodes), (vec![(3, vec![A])], 2));
    trie.unlearn(b"abcdef", A);
    assert_eq!(trie.usage(), TrieUse::default());
}

#[test]
fn endpoints_that_are_removed_leave_nothing() {
    let trie = Trie::default();
    for number in 0..1000 {
        let endpoint = if number % 2 == 0 { A } else { B };
        trie.learn(format!("the same beginning, and {number}").as_bytes(), endpoint);
    }
    trie.retain(&[A]);
    trie.tree.read().check_invariants();
    assert!(steps(&trie, "the same beginning, and 31").iter().all(|(_, holders)| *holders == [A]));
    trie.retain(&[]);
    assert_eq!(trie.usage(), TrieUse::default());
    trie.learn(b"again", B);
    trie.clear();
    assert_eq!(trie.usage(), TrieUse::default());
}

#[test]
fn what_was_used_longest_ago_goes_for_want_of_room() {
    let trie = Trie::with_room_for(8, usize::MAX);
    for letter in b'a'..=b'z' {
        trie.learn(b"kept", A);
        trie.learn(&[letter.to_ascii_uppercase(); 9], B);
    }
    let usage = trie.usage();
    assert_eq!((usage.nodes, usage.evicted), (8, 19));
    assert_eq!(steps(&trie, "kept"), [(4, vec![A])]);
    assert_eq!((steps(&trie, "S"), steps(&trie, "T")), (vec![], vec![(1, vec![B])]));
    trie.tree.read().check_invariants();
}

#[test]
fn a_million_random_prompts_stay_within_the_bounds_and_cost_the_same_each() {
    let trie = Trie::with_room_for(4096, 1 << 20);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut number = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..1_000_000 {
        // Ten beginnings, and an end of its own.
        let text = format!("prompt {} {:x}{:x}", number() % 10, number(), number());
        trie.learn(text.as_bytes(), EndpointId(u32::try_from(round % 7).unwrap()));
    }
    let usage = trie.usage();
    let inside = trie.tree.read();
    assert!(usage.nodes <= 4096 && usage.bytes <= 1 << 20 && usage.evicted > 900_000, "{usage:?}");
    assert!(inside.nodes.capacity() <= 2 * 4096 + 16, "{}", inside.nodes.capacity());
    inside.check_invariants();
}

#[test]
fn shared_bytes_are_found_at_every_length() {
    let long: Vec<u8> = (0..100).collect();
    for length in 0..100 {
        let mut other = long[..length].to_vec();
        other.extend([255; 40]);
        assert_eq!((shared(&long, &other), shared(&long, &long[..length])), (length, length));
    }
}

proptest! {
    #[test]
    fn it_finds_what_a_plain_list_finds(
        texts in prop::collection::vec(("[ab]{1,12}", 0u32..3), 1..40), asked in "[ab]{1,12}", nodes_max in 4usize..200,
    ) {
        let trie = Trie::with_room_for(nodes_max, usize::MAX);
        for (text, endpoint) in &texts {
            trie.learn(text.as_bytes(), EndpointId(*endpoint));
        }
        trie.tree.read().check_invariants();
        let found = trie.find(asked.as_bytes(), 1).first().map_or(0, |step| step.matched);
        let plain = texts.iter().map(|(text, _)| shared(text.as_bytes(), asked.as_bytes())).max().unwrap_or(0);
        prop_assert!(found <= plain);
        // The longest texts have 12 nodes each at most.
        if nodes_max > 24 * texts.len() {
            prop_assert_eq!(found, plain);
            let last = texts.iter().rev().find(|(text, _)| shared(text.as_bytes(), asked.as_bytes()) == plain);
            let holder = trie.find(asked.as_bytes(), 1).first().map(|step| step.holders[0]);
            prop_assert!(plain == 0 || holder == last.map(|(_, endpoint)| EndpointId(*endpoint)));
        }
    }
}
