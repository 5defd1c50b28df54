//! `GET /v1/models` where several rules share a VIP: one list out of theirs.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::answer::{Heard, HeardHead};
use super::backplane::{Backplane, Event, Request};
use super::buffer::Chunk;
use super::client::{After, Client, Stop};
use super::exchange::{End, timed_out};
use super::http::{AnswerHead, Framing, Head, Reply};
use super::io::Backend;
use super::upload::{Parcel, Upload, send_whole};
use super::walk::Walk;
use crate::clock;

/// Bytes of one rule's list: engines with hundreds of adapters stay far below.
const LIST_MAX: usize = 4 << 20;

/// How long an engine may take for its list where its rule does not say.
const LIST_LIMIT: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };

/// What one rule says.
enum List {
    /// Its models.
    Models(Value),
    /// Something else, to be passed on when nobody has more to say.
    Other(Reply),
}

impl<B: Backend, P: Backplane> Client<'_, B, P> {
    /// Answers a request for the list of models where more than one rule has a part in it.
    pub(super) async fn list_models(&self, request: &Arc<Request>) -> Result<Option<After>, End> {
        let calls = self.lane().backplane.models(request);
        if calls.is_empty() {
            return Ok(None);
        }
        let (mut lists, mut other) = (Vec::new(), None);
        for call in calls {
            let mut walk = Walk::part(self, call, clock::now());
            let fetched = walk.fetch_models(&request.head).await.inspect_err(|end| walk.tell(end));
            match fetched {
                Ok(List::Models(list)) => lists.push(list),
                Ok(List::Other(reply)) | Err(End::Reply(reply)) => other = other.or(Some(reply)),
                // The others still have theirs to say.
                Err(End::Stopped(Stop::TimedOut(limit))) if limit.is_for_endpoint() => {
                    other = other.or_else(|| Some(timed_out(limit)));
                }
                Err(end) => return Err(end),
            }
        }
        let reply = match (union(lists), other) {
            (Some(list), _) => Reply::json(list.to_string().into_bytes()),
            (None, Some(reply)) => reply,
            (None, None) => return Ok(None),
        };
        Ok(Some(self.reply(&reply).await))
    }
}

impl<B: Backend, P: Backplane> Walk<'_, '_, B, P> {
    /// Asks one endpoint of the rule for its models.
    async fn fetch_models(&mut self, head: &Head) -> Result<List, End> {
        let mut forward = self.client.forward(&self.terms, Framing::None);
        forward.read_here = true;
        let mut bytes = Vec::new();
        head.write_for_endpoint(&mut bytes, &forward);
        // A rule may set no limits, but the other rules' models wait for this one's.
        self.terms.limits.first_byte.get_or_insert(LIST_LIMIT);
        self.terms.limits.idle.get_or_insert(LIST_LIMIT);
        let (leg, target) = self.reach(&mut Vec::new(), None, false).await?;
        let mut parcel = Parcel::new(&bytes, Chunk::none(), None);
        parcel.direct(&target.request_fields);
        let send = pin!(send_whole(self.client, Rc::clone(&leg.stream), parcel));
        let mut upload = Upload::new(send, self.then());
        self.arm_pause();
        match self.hear(&leg, &target, &mut upload).await? {
            Heard::Head(HeardHead { head, bytes, waited }) => {
                let (position, status) = (target.position, head.status);
                let body = self.collect(&leg.stream, &head, bytes, position, LIST_MAX).await?.unwrap_or_default();
                let length = body.len() as u64;
                let Some(list) = read_list(&head, body) else { return Err(self.died(position, None).into()) };
                self.report(Event::Answered { position, status, waited });
                self.report(Event::Finished { position, bytes: length, usage: None });
                Ok(list)
            }
            Heard::Silence | Heard::BrokenOff => Err(self.died(target.position, None).into()),
            Heard::Nonsense(error) => Err(self.died(target.position, Some(error)).into()),
        }
    }
}

/// Whether a request is for the list of models.
pub(super) fn asks_for_models(head: &Head) -> bool {
    head.method() == "GET" && head.path().trim_end_matches('/') == "/v1/models"
}

/// What an answer says; `None` where it is neither a list nor fit to be passed on.
fn read_list(head: &AnswerHead, body: Vec<u8>) -> Option<List> {
    let value: Option<Value> = serde_json::from_slice(&body).ok();
    match (head.status, value) {
        (200, Some(value)) if value["data"].is_array() => Some(List::Models(value)),
        (status, Some(_)) if status != 200 => Some(List::Other(Reply::passed_on(status, body))),
        _ => None,
    }
}

/// The first list, with the models of the others that it lacks.
fn union(lists: Vec<Value>) -> Option<Value> {
    let mut lists = lists.into_iter();
    let mut all = lists.next()?;
    let data = all.get_mut("data")?.as_array_mut()?;
    for mut list in lists {
        let more = list.get_mut("data").and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default();
        for model in more {
            if !data.iter().any(|known| known["id"] == model["id"]) {
                data.push(model);
            }
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_are_joined_without_saying_a_model_twice() {
        let list = |ids: &[&str]| json!({"object": "list", "data": ids.iter().map(|id| json!({"id": id})).collect::<Vec<_>>()});
        assert_eq!(union(vec![list(&["a", "b"]), list(&["b", "c"]), list(&[])]), Some(list(&["a", "b", "c"])));
        assert_eq!(union(Vec::new()), None);
    }
}
