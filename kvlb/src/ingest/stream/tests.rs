use proptest::prelude::*;

use super::*;
use crate::clock;

/// A stream under test: what it applied since it was last emptied, and what it asked for.
struct Run {
    stream: Stream,
    now: Instant,
    applied: Vec<(u8, u64)>,
    clears: Vec<Why>,
    asked: Vec<u64>,
}

fn message(life: u8, seq: u64) -> Message {
    // A later life has later times.
    let time = f64::from(life) * 1e6 + f64::from(u32::try_from(seq).unwrap());
    Message { seq: EventSeq(seq), time: time.to_bits(), batch: Bytes::from(vec![life; 10]) }
}

impl Run {
    fn new(replays: bool) -> Self {
        let now = clock::now();
        let stream = Stream::new(replays, true, now);
        Self { stream, now, applied: Vec::new(), clears: Vec::new(), asked: Vec::new() }
    }

    fn tell(&mut self, tell: impl FnOnce(&mut Stream, Instant, &mut Vec<Action>)) -> &mut Self {
        let mut actions = Vec::new();
        tell(&mut self.stream, self.now, &mut actions);
        for action in actions {
            match action {
                Action::Apply(message) => {
                    self.applied.push((message.batch[0], message.seq.0));
                }
                Action::Clear(why) => {
                    self.applied.clear();
                    self.clears.push(why);
                }
                Action::Replay(from) => self.asked.push(from.0),
            }
        }
        self
    }

    fn connect(&mut self, refused: bool) -> &mut Self {
        self.tell(|stream, now, out| stream.connected(refused, now, out))
    }

    fn live(&mut self, life: u8, seqs: impl IntoIterator<Item = u64>) -> &mut Self {
        for seq in seqs {
            self.tell(|stream, now, out| stream.live(message(life, seq), now, out));
        }
        self
    }

    fn replay(&mut self, life: u8, seqs: impl IntoIterator<Item = u64>) -> &mut Self {
        let asked = self.asked.len();
        for seq in seqs {
            self.tell(|stream, _, out| stream.replayed(message(life, seq), out));
            if self.asked.len() > asked {
                // Another replay is wanted, and the rest of this one is not read.
                return self;
            }
        }
        self.tell(Stream::replay_ended)
    }

    fn fail(&mut self, answered: bool) -> &mut Self {
        self.tell(|stream, now, out| stream.replay_failed(answered, now, out))
    }

    fn later(&mut self, by: Duration) -> &mut Self {
        self.now += by;
        self.tell(Stream::tick)
    }

    fn seqs(&self) -> Vec<u64> {
        self.applied.iter().map(|&(_, seq)| seq).collect()
    }
}

#[test]
fn a_replay_comes_first_and_live_batches_follow_once_each() {
    let mut run = Run::new(true);
    run.connect(false).live(0, [3, 4, 5]);
    assert_eq!((run.asked.as_slice(), run.seqs()), (&[0][..], vec![]), "held while the replay runs");
    run.replay(0, 0..=4).live(0, [6]);
    assert_eq!(run.seqs(), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(run.stream.tally(), Tally { replays: 1, duplicates: 2, ..Tally::default() });
}

#[test]
fn a_warm_idle_engine_is_known_without_any_live_batch() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 500..=510);
    assert_eq!(run.seqs(), (500..=510).collect::<Vec<_>>());
    assert_eq!(run.stream.tally().missed, 0, "what came before was never promised");
}

#[test]
fn a_silent_connection_is_asked_once_more() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).later(SECOND_LOOK);
    assert_eq!(run.asked, [0, 2]);
    run.replay(0, 2..=4).later(SECOND_LOOK);
    assert_eq!((run.asked.len(), run.seqs()), (2, vec![0, 1, 2, 3, 4]), "what came before the publisher knew of us");
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [3]).later(SECOND_LOOK);
    assert_eq!(run.asked.len(), 1, "it is not silent");
    let mut run = Run::new(true);
    run.connect(false).live(0, [2]).replay(0, 0..=2).later(SECOND_LOOK);
    assert_eq!(run.asked.len(), 1, "and was not");
}

#[test]
fn a_second_look_leaves_a_replay_for_a_gap() {
    let mut run = Run::new(true);
    for _ in 0..REPLAYS_AT_ONCE - 1 {
        run.stream.disconnected();
        run.connect(false).replay(0, 0..=2);
    }
    run.later(SECOND_LOOK);
    assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize - 1);
    run.later(REPLAY_INTERVAL);
    assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize);
}

#[test]
fn a_gap_is_replayed_and_nothing_is_lost() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [3, 6, 7]);
    assert_eq!((run.asked.as_slice(), run.seqs().len()), (&[0, 3][..], 4));
    run.replay(0, 3..=7).live(0, [8]);
    assert_eq!(run.seqs(), (0..=8).collect::<Vec<_>>());
    assert_eq!((run.stream.tally().gaps, run.stream.tally().missed), (1, 0));
}

#[test]
fn a_buffer_that_begins_later_follows_the_window() {
    for (first, cleared) in [(EVENT_GAP_WINDOW + 3, false), (EVENT_GAP_WINDOW + 4, true)] {
        let mut run = Run::new(true);
        run.connect(false).replay(0, 0..=2).live(0, [200]).replay(0, first..=200);
        assert_eq!(run.clears == [Why::Gap], cleared, "missed {}", first - 3);
        assert_eq!(run.seqs().last(), Some(&200));
        assert_eq!(run.stream.tally().missed, first - 3);
    }
}

#[test]
fn without_replay_a_gap_wider_than_the_window_clears_the_inventory() {
    for (missed, cleared) in [(1, false), (EVENT_GAP_WINDOW, false), (EVENT_GAP_WINDOW + 1, true)] {
        let mut run = Run::new(false);
        run.connect(false).live(0, [10, 11, 12 + missed]);
        assert_eq!(run.clears == [Why::Gap], cleared, "{missed}");
        assert!(run.asked.is_empty());
        assert_eq!(run.stream.tally(), Tally { gaps: 1, missed, ..Tally::default() });
    }
}

#[test]
fn a_lower_number_is_a_new_life_and_its_batch_counts_at_once() {
    for replays in [false, true] {
        let mut run = Run::new(replays);
        run.connect(false).replay(0, []).live(0, [0, 1, 2]).live(1, [0]);
        assert_eq!((run.clears.as_slice(), run.applied.as_slice()), (&[Why::NewLife][..], &[(1, 0)][..]));
    }
}

#[test]
fn a_new_life_that_is_seen_late_is_replayed_from_its_beginning() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=9).live(1, [4]);
    assert_eq!((run.clears.len(), run.asked.last()), (1, Some(&0)));
    run.replay(1, 0..=4);
    assert_eq!(run.applied, (0..=4).map(|seq| (1, seq)).collect::<Vec<_>>());
}

#[test]
fn a_restart_behind_a_reconnect_is_seen_by_the_time_of_the_last_batch() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=5);
    run.stream.disconnected();
    run.connect(false).live(1, [9]);
    assert_eq!(run.asked, [0, 5]);
    run.tell(|stream, _, out| stream.replayed(message(1, 5), out));
    assert_eq!((run.clears.as_slice(), run.asked.as_slice()), (&[Why::NewLife][..], &[0, 5, 0][..]));
    run.replay(1, 0..=9);
    assert_eq!(run.applied, (0..=9).map(|seq| (1, seq)).collect::<Vec<_>>());
}

#[test]
fn a_restart_behind_a_reconnect_is_seen_by_its_lower_end() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=5);
    run.stream.disconnected();
    run.connect(false).replay(1, []);
    assert_eq!((run.clears.as_slice(), run.asked.as_slice()), (&[Why::NewLife][..], &[0, 5, 0][..]));
    run.replay(1, 0..=1);
    assert_eq!(run.applied, [(1, 0), (1, 1)]);
}

#[test]
fn the_same_life_goes_on_after_a_reconnect() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=5);
    run.stream.disconnected();
    run.connect(true).live(0, [8]).replay(0, 5..=8);
    assert_eq!((run.clears.len(), run.seqs()), (0, (0..=8).collect()), "the replay knows better than a refusal");
}

#[test]
fn without_an_answer_a_refused_connection_is_a_new_life() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=5);
    run.stream.disconnected();
    run.connect(true).live(1, [2, 3]).fail(false);
    assert_eq!((run.clears.as_slice(), run.applied.as_slice()), (&[Why::NewLife][..], &[(1, 2), (1, 3)][..]));
    assert!(run.stream.is_unavailable());
}

#[test]
fn without_replay_the_process_tells_lives_apart() {
    for (word, cleared) in [(Some(true), true), (Some(false), false), (None, false)] {
        let mut run = Run::new(false);
        run.connect(false).live(0, [0, 1]);
        run.stream.disconnected();
        run.connect(false).live(1, [2]);
        assert_eq!(run.seqs(), [0, 1], "held until the engine says who it is, or for a while");
        match word {
            Some(other) => run.tell(|stream, now, out| stream.identified(other, now, out)),
            None => run.later(IDENTITY_WAIT),
        };
        assert_eq!(run.clears == [Why::NewLife], cleared, "{word:?}");
        assert_eq!(run.seqs().last(), Some(&2));
    }
}

#[test]
fn an_engine_that_cannot_be_asked_is_not_waited_for() {
    let mut run = Run::new(false);
    run.stream.identities = false;
    run.connect(false).live(0, [0]);
    run.stream.disconnected();
    run.connect(false).live(0, [1]);
    assert_eq!(run.seqs(), [0, 1]);
}

#[test]
fn a_word_that_comes_late_still_ends_a_life_that_was_only_assumed() {
    for (other, left) in [(true, vec![4]), (false, vec![0, 1, 2, 3, 4])] {
        let mut run = Run::new(false);
        run.connect(false).live(0, [0, 1]);
        run.tell(|stream, now, out| stream.identified(other, now, out));
        assert_eq!(run.seqs(), [0, 1], "on a connection that went on, the numbers tell lives apart");
        run.stream.disconnected();
        run.connect(false).later(IDENTITY_WAIT).live(1, [2, 3]);
        run.tell(|stream, now, out| stream.identified(other, now, out)).live(1, [4]);
        assert_eq!((run.seqs(), run.stream.tally().restarts), (left, u64::from(other)));
    }
}

#[test]
fn replays_are_rationed_and_a_needed_one_is_delayed_not_lost() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, [0]);
    let mut next = 1;
    for _ in 1..REPLAYS_AT_ONCE {
        run.live(0, [next + 1]).replay(0, next - 1..=next + 1);
        next += 2;
    }
    run.live(0, [next + 1, next + 2]);
    assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize, "the next has to wait");
    run.later(REPLAY_INTERVAL / 2);
    assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize);
    let deadline = run.stream.deadline().unwrap();
    run.later(deadline - run.now);
    assert_eq!(run.asked.len(), REPLAYS_AT_ONCE as usize + 1);
    run.replay(0, next - 1..=next + 2);
    assert_eq!(run.seqs(), (0..=next + 2).collect::<Vec<_>>());
}

#[test]
fn a_replay_socket_that_does_not_answer_is_left_alone_for_a_while() {
    let mut run = Run::new(true);
    run.connect(false).fail(false).live(0, [0, 2, 4]);
    assert_eq!((run.asked.len(), run.seqs()), (1, vec![0, 2, 4]));
    run.later(UNAVAILABLE_FOR).live(0, [6]);
    assert_eq!(run.asked.last(), Some(&4), "asked again");
    run.replay(0, [4, 5, 6]);
    assert!(!run.stream.is_unavailable());
    assert_eq!(run.seqs(), [0, 2, 4, 5, 6]);
}

#[test]
fn a_replay_that_breaks_off_is_not_waited_for_twice() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [6, 7]);
    run.tell(|stream, _, out| stream.replayed(message(0, 2), out)).fail(true);
    assert_eq!((run.asked.as_slice(), run.seqs()), (&[0, 2][..], vec![0, 1, 2, 6, 7]));
    assert!(run.stream.is_unavailable());
    assert_eq!(run.stream.tally().missed, 3);
    // The next connection is another chance, and so is the time.
    run.later(UNAVAILABLE_FOR).live(0, [9]);
    assert_eq!(run.asked.last(), Some(&7));
    run.replay(0, 7..=9);
    assert!(!run.stream.is_unavailable());
    run.tell(|stream, now, out| stream.live(message(0, 12), now, out)).fail(true);
    run.stream.disconnected();
    run.connect(false);
    assert!(run.stream.is_replaying());
}

#[test]
fn numbers_over_their_whole_range_overflow_nothing() {
    for replays in [false, true] {
        let mut run = Run::new(replays);
        run.connect(false).fail(false);
        for _ in 0..3 {
            for seq in [0, u64::MAX, u64::MAX - 1, 1 << 63, u64::MAX] {
                let message = Message { seq: EventSeq(seq), time: 0, batch: Bytes::from_static(b"x") };
                run.tell(|stream, now, out| stream.live(message, now, out));
            }
        }
        assert_eq!(run.stream.tally().missed, u64::MAX);
    }
}

#[test]
fn what_waits_is_bounded_and_its_loss_is_a_gap() {
    let mut run = Run::new(true);
    run.connect(false).live(0, 0..HELD_MAX as u64 + 10);
    assert_eq!(run.stream.held.len(), HELD_MAX);
    run.replay(0, []);
    assert_eq!((run.asked.len(), run.seqs().len()), (2, 0), "number 0 is missing");
    run.replay(0, []);
    assert_eq!(run.seqs()[0], 10, "and is not waited for twice");
    let mut run = Run::new(true);
    run.connect(false);
    let large = |seq| Message { batch: Bytes::from(vec![0; HELD_BYTES_MAX / 4]), ..message(0, seq) };
    for seq in 0..10 {
        run.tell(|stream, now, out| stream.live(large(seq), now, out));
    }
    assert_eq!(run.stream.held.len(), 4);
}

#[derive(Clone, Debug)]
enum Happening {
    Publish { lost: bool },
    Restart { reconnect: bool },
    Reconnect,
    Serve,
    Wait,
}

proptest! {
    /// An engine that keeps all batches: once all is quiet, exactly its present life is applied, in order.
    #[test]
    fn with_replay_every_batch_of_the_present_life_is_applied_once_and_in_order(
        happenings in prop::collection::vec(prop_oneof![
            10 => any::<bool>().prop_map(|lost| Happening::Publish { lost }),
            1 => any::<bool>().prop_map(|reconnect| Happening::Restart { reconnect }),
            1 => Just(Happening::Reconnect),
            6 => Just(Happening::Serve),
            2 => Just(Happening::Wait),
        ], 0..120)
    ) {
        let mut run = Run::new(true);
        let (mut life, mut next, mut served) = (0, 0, 0);
        run.connect(false);
        let serve = |run: &mut Run, life, next, served: &mut usize| {
            if *served < run.asked.len() {
                let from = run.asked[run.asked.len() - 1];
                *served = run.asked.len();
                run.replay(life, from..next);
            }
        };
        for happening in happenings {
            match happening {
                Happening::Publish { lost } => {
                    if !lost {
                        run.live(life, [next]);
                    }
                    next += 1;
                }
                Happening::Restart { reconnect } => {
                    (life, next) = (life + 1, 0);
                    if reconnect {
                        run.stream.disconnected();
                        served = run.asked.len();
                        run.connect(true);
                    } else {
                        // Numbers on one connection tell lives apart only when they go down.
                        run.live(life, [0]);
                        next = 1;
                    }
                }
                Happening::Reconnect => {
                    run.stream.disconnected();
                    served = run.asked.len();
                    run.connect(false);
                }
                Happening::Serve => serve(&mut run, life, next, &mut served),
                Happening::Wait => {
                    run.later(REPLAY_INTERVAL);
                }
            }
        }
        // Two more batches, so that every loss shows, and all replays that follow.
        run.live(life, [next, next + 1]);
        next += 2;
        for _ in 0..6 {
            run.later(REPLAY_INTERVAL);
            serve(&mut run, life, next, &mut served);
        }
        prop_assert_eq!(run.applied, (0..next).map(|seq| (life, seq)).collect::<Vec<_>>());
    }
}

#[test]
fn a_story_that_is_told_again_begins_at_the_beginning_and_loses_nothing_live() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [3, 4]);
    run.tell(Stream::relearn).live(0, [5, 6]);
    assert_eq!((run.asked.as_slice(), run.clears.as_slice()), (&[0, 0][..], &[Why::Renamed][..]));
    run.replay(0, 0..=5);
    assert_eq!(run.seqs(), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!((run.stream.tally().gaps, run.stream.tally().restarts), (0, 0));
}

#[test]
fn another_life_is_told_from_the_one_whose_story_broke_off() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [3]).tell(Stream::relearn);
    run.stream.disconnected();
    run.connect(false);
    assert_eq!(run.asked.last(), Some(&3), "first it is to be known who is there");
    run.replay(1, 0..=3);
    assert_eq!(run.clears.last(), Some(&Why::NewLife));
    run.replay(1, 0..=3);
    assert_eq!((run.seqs(), run.stream.tally().restarts), (vec![0, 1, 2, 3], 1));
}

#[test]
fn the_same_life_tells_its_story_once_more_where_it_broke_off() {
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=2).live(0, [3]).tell(Stream::relearn);
    run.stream.disconnected();
    run.connect(false).replay(0, 3..=4);
    assert_eq!((run.asked.last(), run.clears.last()), (Some(&0), Some(&Why::Renamed)));
    run.replay(0, 0..=4).live(0, [5]);
    assert_eq!((run.seqs(), run.stream.tally().restarts), (vec![0, 1, 2, 3, 4, 5], 0));
}

#[test]
fn without_replay_nothing_is_told_again() {
    let mut run = Run::new(false);
    run.connect(false).live(0, [0, 1]).tell(Stream::relearn).live(0, [2]);
    assert_eq!((run.asked.len(), run.clears.len(), run.seqs()), (0, 0, vec![0, 1, 2]));
    let mut run = Run::new(true);
    run.connect(false).replay(0, 0..=1).tell(Stream::relearn).fail(false).live(0, [2, 4]);
    assert_eq!(run.seqs(), [2, 4], "a gap counts from where it had come");
    assert_eq!(run.stream.tally().gaps, 1);
}

#[test]
fn an_engine_that_says_late_that_it_replays_nothing_loses_nothing() {
    let mut run = Run::new(true);
    run.connect(false).live(1, 3..6);
    assert!(run.applied.is_empty(), "they wait for the replay");
    run.tell(|stream, now, out| stream.replay_moved(false, now, out));
    assert_eq!(run.seqs(), [3, 4, 5]);
    run.live(1, 6..8);
    // It is told again each time that the engine is asked.
    run.tell(|stream, now, out| stream.replay_moved(false, now, out));
    assert_eq!((run.seqs(), run.asked.as_slice(), run.clears.as_slice()), ((3..8).collect(), &[0][..], &[][..]));
    assert_eq!(run.stream.tally(), Tally { replays: 1, ..Tally::default() });
}

#[test]
fn a_replay_socket_that_is_found_late_is_asked_for_the_whole_story() {
    let mut run = Run::new(true);
    run.connect(false).fail(false).live(1, 3..6);
    assert!(run.stream.is_unavailable());
    run.tell(|stream, now, out| stream.replay_moved(true, now, out)).live(1, 6..7).replay(1, 0..7);
    assert_eq!((run.seqs(), run.clears.as_slice()), ((0..7).collect(), &[Why::Renamed][..]));
    assert!(!run.stream.is_unavailable());
    // Once had, the story need not be told again because the socket moves.
    run.tell(|stream, now, out| stream.replay_moved(true, now, out));
    assert_eq!((run.asked.as_slice(), run.clears.len()), (&[0, 0][..], 1));
}

#[test]
fn a_replay_that_runs_where_no_replay_socket_is_any_more_goes_on_where_there_is_one() {
    let mut run = Run::new(true);
    run.connect(false);
    for seq in 0..3 {
        run.tell(|stream, _, out| stream.replayed(message(1, seq), out));
    }
    run.tell(|stream, now, out| stream.replay_moved(true, now, out)).replay(1, 2..5);
    assert_eq!((run.seqs(), run.asked.as_slice(), run.clears.as_slice()), ((0..5).collect(), &[0, 2][..], &[][..]));
}
