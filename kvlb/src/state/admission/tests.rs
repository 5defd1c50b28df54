use std::time::Duration;

use super::*;
use crate::fleet::fixtures::{endpoint, rule};
use crate::fleet::{Role, Rule};
use crate::state::{Config, State};
use crate::telemetry::Metrics;

fn state() -> State {
    State::new(Config::default(), Arc::new(Metrics::new().unwrap()))
}

/// Rule number `id` over endpoints with these last octets, with so many requests each.
fn gated(id: u32, octets: &[u8], each: u32, outstanding: Option<u32>) -> Arc<Rule> {
    let mut gated = rule();
    gated.id = RuleId(id);
    gated.key.ports = crate::fleet::PortRange::single(8000 + u16::try_from(id).unwrap());
    gated.endpoints = octets.iter().map(|octet| endpoint(*octet, Role::Any)).collect();
    gated.admission = Some(AdmissionRule {
        mode: AdmissionMode::Enforce,
        outstanding,
        normal: Some(each),
        prefill: None,
        decode: None,
        queue_depth: 100,
        queue_wait: Duration::from_secs(5),
    });
    Arc::new(gated)
}

fn service(state: &State, id: u32) -> Arc<Service> {
    Arc::clone(state.table().service(RuleId(id)).unwrap())
}

fn wait(state: &State, id: u32) -> Waiting {
    state.admission.wait(&service(state, id), Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 100).unwrap()
}

fn turn(waiting: &mut Waiting) -> Option<Turn> {
    match waiting.poll(&mut Context::from_waker(std::task::Waker::noop())) {
        Poll::Ready(turn) => Some(turn),
        Poll::Pending => None,
    }
}

fn permit(waiting: &mut Waiting) -> Option<Permit> {
    match turn(waiting)? {
        Turn::Place(permit) => Some(permit),
        other => panic!("called with {other:?}"),
    }
}

fn nobody_waits(state: &State) -> bool {
    let book = state.admission.book.lock();
    book.queues.is_empty()
}

#[test]
fn units_are_taken_up_to_the_bound_and_come_back() {
    let state = state();
    state.publish(&[gated(1, &[1, 2], 2, Some(3))]);
    let service = service(&state, 1);
    let take = |position| state.admission.take(&service, position, false);
    let (first, second) = (take(0), take(0));
    assert!(first.is_some() && second.is_some() && take(0).is_none(), "two at each endpoint");
    let third = take(1);
    assert!(third.is_some() && take(1).is_none(), "three in all");
    assert!(state.admission.take(&service, 1, true).is_some(), "a unit that is given back does not count");
    drop(first);
    assert_eq!((service.endpoints[0].place.held(), service.line.held()), (1, 2));
    assert!(take(0).is_some());
    drop((second, third));
    assert_eq!((service.endpoints[0].place.held(), service.line.held()), (0, 0));
}

#[test]
fn who_comes_first_is_called_first_and_one_for_each_unit() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None)]);
    let service = service(&state, 1);
    let taken = state.admission.take(&service, 0, false).unwrap();
    let mut waiting: Vec<_> = (0..3).map(|_| wait(&state, 1)).collect();
    assert_eq!(service.line.queued(), 3);
    assert!(waiting.iter_mut().all(|waiting| turn(waiting).is_none()));
    drop(taken);
    let first = permit(&mut waiting[0]).unwrap();
    assert!(turn(&mut waiting[1]).is_none() && turn(&mut waiting[2]).is_none(), "nobody is called in vain");
    assert!(state.admission.take(&service, 0, false).is_none(), "nobody takes it before who was called");
    drop(first);
    assert!(permit(&mut waiting[1]).is_some());
}

#[test]
fn who_leaves_is_passed_over_and_what_was_given_to_him_goes_on() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None)]);
    let service = service(&state, 1);
    let taken = state.admission.take(&service, 0, false).unwrap();
    let (first, second, mut third) = (wait(&state, 1), wait(&state, 1), wait(&state, 1));
    drop(first);
    assert_eq!(service.line.queued(), 2);
    drop(taken);
    // The second was called, and leaves without having heard.
    drop(second);
    let last = permit(&mut third);
    assert!(last.is_some() && nobody_waits(&state));
    drop(last);
    assert_eq!((service.line.held(), service.endpoints[0].place.held()), (0, 0));
}

#[test]
fn rules_that_share_an_endpoint_take_turns() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None), gated(2, &[1], 1, None), gated(7, &[1], 1, None)]);
    let mut taken = state.admission.take(&service(&state, 1), 0, false);
    let mut waiting: Vec<_> = [1, 1, 1, 1, 2, 2, 7].into_iter().map(|id| (id, wait(&state, id))).collect();
    let mut order = Vec::new();
    while !waiting.is_empty() {
        drop(taken.take());
        let called = waiting.iter_mut().position(|(_, waiting)| {
            taken = permit(waiting);
            taken.is_some()
        });
        order.push(waiting.remove(called.expect("somebody is called")).0);
    }
    assert_eq!(order, [1, 2, 7, 1, 2, 1, 1]);
}

#[test]
fn a_rule_s_own_bound_frees_its_next_wherever_there_is_room() {
    let state = state();
    state.publish(&[gated(1, &[1, 2], 5, Some(1)), gated(2, &[1], 1, None)]);
    let one = service(&state, 1);
    let taken = state.admission.take(&one, 0, false).unwrap();
    let mut next = wait(&state, 1);
    assert!(turn(&mut next).is_none());
    drop(taken);
    assert!(permit(&mut next).is_some());
}

#[test]
fn one_that_has_tried_the_free_endpoint_lets_the_next_pass() {
    let state = state();
    state.publish(&[gated(1, &[1, 2], 1, None)]);
    let service = service(&state, 1);
    let taken = [0, 1].map(|position| state.admission.take(&service, position, false));
    let mut picky =
        state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[0], keeps: false }, None, 100).unwrap();
    let mut other = wait(&state, 1);
    let [first, second] = taken;
    drop(first);
    assert!(turn(&mut picky).is_none() && permit(&mut other).is_some());
    drop(second);
    assert!(permit(&mut picky).is_some());
}

#[test]
fn the_queue_is_bounded_and_who_was_called_comes_back_to_his_place() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None)]);
    let service = service(&state, 1);
    let taken = state.admission.take(&service, 0, false).unwrap();
    let first = state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 2).unwrap();
    let mut second =
        state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 2).unwrap();
    assert_eq!(
        state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 2).unwrap_err(),
        NoWait::Full
    );
    let ticket = first.ticket();
    drop(first);
    let third = state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 2).unwrap();
    let mut again =
        state.admission.wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, Some(ticket), 2).unwrap();
    drop(taken);
    assert!(permit(&mut again).is_some() && turn(&mut second).is_some());
    drop(third);
}

#[test]
fn a_changed_rule_lets_as_many_go_as_it_has_room_for() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None)]);
    let _taken = state.admission.take(&service(&state, 1), 0, false).unwrap();
    let mut waiting: Vec<_> = (0..4).map(|_| wait(&state, 1)).collect();
    state.publish(&[gated(1, &[1], 3, None)]);
    let called: Vec<_> = waiting.iter_mut().map(|waiting| permit(waiting).is_some()).collect();
    assert_eq!(called, [true, true, true, true], "two at once, and each that was given back");
    let mut waiting: Vec<_> = (0..3).map(|_| wait(&state, 1)).collect();
    let held: Vec<_> = waiting.iter_mut().filter_map(permit).collect();
    assert_eq!(held.len(), 2);
    let mut off = (*gated(1, &[1], 3, None)).clone();
    off.admission = None;
    state.publish(&[Arc::new(off)]);
    assert!(matches!(turn(&mut waiting[2]), Some(Turn::Anew)));
}

#[test]
fn a_rule_that_goes_and_a_process_that_ends_leave_nobody_waiting() {
    let state = state();
    state.publish(&[gated(1, &[1], 1, None), gated(2, &[1], 1, None)]);
    let (one, two) = (service(&state, 1), service(&state, 2));
    let _taken = state.admission.take(&one, 0, false).unwrap();
    let (mut of_one, mut of_two) = (wait(&state, 1), wait(&state, 2));
    state.publish(&[gated(2, &[1], 1, None)]);
    assert!(matches!(turn(&mut of_one), Some(Turn::Drained)) && turn(&mut of_two).is_none());
    state.admission.drain();
    assert!(matches!(turn(&mut of_two), Some(Turn::Drained)));
    assert_eq!(
        state.admission.wait(&two, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 9).unwrap_err(),
        NoWait::Draining
    );
    assert_eq!((one.line.queued(), two.line.queued()), (0, 0));
}

#[test]
fn where_nobody_may_be_asked_nobody_waits_and_a_recovered_endpoint_is_used_at_once() {
    use crate::fleet::Probe;
    let state = state();
    state.publish(&[gated(1, &[1, 2], 1, None)]);
    let service = service(&state, 1);
    let down = |position: usize, probe| {
        service.endpoints[position].meters.set_probe(probe);
        state.conditions_changed();
    };
    down(1, Probe::Down);
    let taken = state.admission.take(&service, 0, false).unwrap();
    let mut waiting = wait(&state, 1);
    down(1, Probe::Up);
    assert!(permit(&mut waiting).is_some_and(|permit| permit.is_for(&service.endpoints[1].place)));
    down(1, Probe::Down);
    let mut waiting = wait(&state, 1);
    down(0, Probe::Down);
    assert!(matches!(turn(&mut waiting), Some(Turn::Anew)));
    drop(taken);
}

#[test]
fn places_are_one_for_each_address_and_forgotten_with_their_last_rule() {
    let state = state();
    state.publish(&[gated(1, &[1, 2], 1, None), gated(2, &[2], 1, None)]);
    let (one, two) = (service(&state, 1), service(&state, 2));
    assert!(Arc::ptr_eq(&one.endpoints[1].place, &two.endpoints[0].place));
    drop((one, two));
    state.publish(&[gated(3, &[9], 1, None)]);
    state.publish(&[gated(3, &[9, 10], 1, None)]);
    assert_eq!(state.admission.places.lock().len(), 2);
}

#[test]
fn from_many_threads_no_bound_is_passed_and_everybody_has_a_turn() {
    let state = Arc::new(state());
    state.publish(&[gated(1, &[1, 2], 2, None), gated(2, &[2], 3, Some(2))]);
    let work = |id: u32| {
        let state = Arc::clone(&state);
        std::thread::spawn(move || {
            let service = service(&state, id);
            let bound = if id == 1 { 2 } else { 3 };
            for round in 0..300_usize {
                let position = round % service.endpoints.len();
                let permit = state.admission.take(&service, position, false).unwrap_or_else(|| {
                    let mut waiting = state
                        .admission
                        .wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 1000)
                        .unwrap();
                    if round % 7 == 3 {
                        drop(waiting);
                        waiting = state
                            .admission
                            .wait(&service, Wish { part: Part::Prompt, tried: &[], keeps: false }, None, 1000)
                            .unwrap();
                    }
                    let started = crate::clock::now();
                    loop {
                        if let Some(permit) = permit(&mut waiting) {
                            return permit;
                        }
                        assert!(started.elapsed() < Duration::from_secs(20), "nobody calls");
                        std::thread::yield_now();
                    }
                });
                assert!(permit.place.held() <= bound.max(3) && service.line.held() <= 4);
                drop(permit);
            }
        })
    };
    let workers: Vec<_> = [1, 2, 1, 2, 1, 2].into_iter().map(work).collect();
    for worker in workers {
        worker.join().unwrap();
    }
    assert!(nobody_waits(&state));
    let held = |id| service(&state, id).endpoints.iter().map(|endpoint| endpoint.place.held()).sum::<u32>();
    assert_eq!((held(1), held(2)), (0, 0));
}

#[test]
fn a_request_between_its_legs_keeps_its_unit_and_goes_before_those_that_have_none() {
    let state = state();
    let mut split = Rule::clone(&gated(1, &[], 2, Some(1)));
    split.endpoints = vec![endpoint(1, Role::Prefill), endpoint(2, Role::Decode)];
    state.publish(&[Arc::new(split)]);
    let service = service(&state, 1);
    let prefill = state.admission.take(&service, 0, false).unwrap();
    let mut other = wait(&state, 1);
    let stay = state.admission.stay(&service).unwrap();
    drop(prefill);
    assert_eq!((service.endpoints[0].place.held(), service.line.held()), (0, 1));
    assert!(turn(&mut other).is_none(), "the rule has one outstanding");
    let wish = Wish { part: Part::Decode, tried: &[], keeps: true };
    let mut decode = state.admission.wait(&service, wish, None, 100).unwrap();
    let decode = permit(&mut decode).unwrap();
    drop(stay);
    assert!(turn(&mut other).is_none());
    drop(decode);
    assert!(permit(&mut other).is_some());
    assert!(nobody_waits(&state));
}
