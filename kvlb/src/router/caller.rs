//! Who asks: what of a request tells its conversation, its session and its text.

use std::net::IpAddr;

use xxhash_rust::xxh3::Xxh3;

use crate::fleet::SessionSource;
use crate::openai::{Input, Message, Prompt};
use crate::policy::bytes_wanted;

/// Conversation ids that begin so are no client's: LoxiLB makes them up, one for each request.
const MADE_UP: &str = "auto-";

/// What a key stands for: equal words of different kinds are different keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// `X-Conversation-Id`.
    Conversation,
    /// The body's `user`.
    User,
    /// What the rule's `session_header_name` says.
    Session,
    /// The client's address.
    Client,
}

/// By what a conversation or a session is known again: a hash, so that nothing a client wrote is kept. It is the same for
/// every kvlb, so that those who never met still send a new session to the same endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub u128);

impl Key {
    /// The key of these bytes.
    pub fn new(whose: Whose, bytes: &[u8]) -> Self {
        let mut hash = Xxh3::with_seed(whose as u64);
        hash.update(bytes);
        Self(hash.digest128())
    }

    /// The conversation that a request belongs to: by its `X-Conversation-Id`, else by its body's `user`, where that counts.
    pub fn conversation(header: Option<&[u8]>, user: Option<&str>) -> Option<Self> {
        let told = header.filter(|id| !id.is_empty() && !id.starts_with(MADE_UP.as_bytes()));
        let user = || user.filter(|user| !user.is_empty()).map(|user| Self::new(Whose::User, user.as_bytes()));
        told.map(|id| Self::new(Whose::Conversation, id)).or_else(user)
    }

    /// The key of a client's address.
    pub fn client(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::new(Whose::Client, &address.octets()),
            IpAddr::V6(address) => Self::new(Whose::Client, &address.octets()),
        }
    }

    /// The session that a request belongs to, by the value of what tells it: see [`told`].
    pub fn session(value: &[u8]) -> Self {
        Self::new(Whose::Session, value)
    }
}

/// Whoever sends a request, as far as that matters to the choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Its address.
    pub client: Option<IpAddr>,
    /// Its conversation, where it names one.
    pub conversation: Option<Key>,
    /// Its session, where the rule's selector keeps such.
    pub session: Option<Key>,
    /// Its whole prompt, where the rule remembers such.
    pub text: Option<Text>,
    /// What requests with the same model and the same beginning of their prompt share ([`prefix`]), where the rule's
    /// selector goes by that.
    pub prefix: Option<u64>,
}

/// A prompt as bytes, behind a mark of what else an engine's cache tells apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(Box<[u8]>);

/// Bytes of the mark.
const MARK: usize = 8;

impl Text {
    /// The text of a prompt for this model, adapters included, with this salt.
    pub fn of(prompt: &Prompt) -> Self {
        let mut hash = Xxh3::new();
        hash.update(prompt.served.as_deref().unwrap_or_default().as_bytes());
        hash.update(&[0]);
        hash.update(prompt.cache_salt.as_deref().unwrap_or_default().as_bytes());
        let mut bytes = hash.digest().to_be_bytes().to_vec();
        bytes.extend(prompt.bytes());
        Self(bytes.into())
    }

    /// Mark and text.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Bytes of [`Text::bytes`] that must be known for this percentage of the text to be.
    pub(super) fn least(&self, percent: u8) -> usize {
        MARK + bytes_wanted(self.0.len() - MARK, percent)
    }
}

impl Caller {
    /// A caller of whom nothing but the address is known.
    pub fn at(client: IpAddr) -> Self {
        Self { client: Some(client), ..Self::default() }
    }

    /// Whether nothing of it is remembered.
    pub const fn is_nobody(&self) -> bool {
        !self.is_known() && self.session.is_none()
    }

    /// Whether tier 1 may have a word.
    pub const fn is_known(&self) -> bool {
        self.conversation.is_some() || self.text.is_some()
    }
}

/// What tells a request's session, of its header fields (`field` gives the first of a name) and the target's query.
pub fn told<'a>(
    source: &SessionSource,
    field: impl Fn(&str) -> Option<&'a [u8]>,
    query: Option<&'a str>,
) -> Option<&'a [u8]> {
    let value = match source {
        SessionSource::Header(name) => field(name),
        SessionSource::Cookie(name) => member(field("cookie")?, b';', name),
        SessionSource::Query(name) => member(query?.as_bytes(), b'&', name),
        SessionSource::BasicAuth => {
            let value = field("authorization")?;
            let (scheme, credentials) = value.split_at_checked(BASIC.len())?;
            scheme.eq_ignore_ascii_case(BASIC).then_some(credentials.trim_ascii())
        }
    };
    value.filter(|value| !value.is_empty())
}

const BASIC: &[u8] = b"basic ";

/// The value of the first `name=value` in a list.
fn member<'a>(list: &'a [u8], between: u8, name: &str) -> Option<&'a [u8]> {
    let of_member = |member: &'a [u8]| member.trim_ascii_start().strip_prefix(name.as_bytes())?.strip_prefix(b"=");
    list.split(|byte| *byte == between).find_map(of_member).map(<[u8]>::trim_ascii)
}

/// Bytes of a prompt that selectors hash: what LoxiLB's hash over prefixes goes by, so that a rule that comes from there finds
/// its clients spread alike.
const PREFIX_BYTES: usize = 512;

/// A number that requests with the same model and the same beginning share; `None` for those without a prompt.
pub fn prefix(prompt: &Prompt) -> Option<u64> {
    let mut hash = Xxh3::new();
    hash.update(prompt.served.as_deref().unwrap_or_default().as_bytes());
    let mut left = PREFIX_BYTES;
    let mut add = |bytes: &[u8]| {
        let taken = bytes.len().min(left);
        left -= taken;
        hash.update(&bytes[..taken]);
        left > 0
    };
    match prompt.inputs.first()? {
        Input::Text(text) => _ = add(text.as_bytes()),
        Input::Tokens(ids) => _ = ids.iter().all(|id| add(&id.0.to_le_bytes())),
        Input::Chat(chat) => {
            let texts = |message: &Message| {
                add(message.role.as_bytes()) && message.content.iter().all(|part| add(part.text.as_bytes()))
            };
            _ = chat.messages.iter().all(texts);
        }
    }
    Some(hash.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_tells_the_conversation_before_the_user_does_and_what_is_made_up_tells_nothing() {
        let of = |header: Option<&str>, user: Option<&str>| Key::conversation(header.map(str::as_bytes), user);
        let (header, user) = (Key::new(Whose::Conversation, b"x"), Key::new(Whose::User, b"x"));
        assert_ne!(header, user);
        assert_eq!(of(Some("x"), Some("x")), Some(header));
        assert_eq!((of(None, Some("x")), of(Some(""), Some("x"))), (Some(user), Some(user)));
        assert_eq!(of(Some("auto-77-1"), Some("x")), Some(user));
        assert_eq!((of(Some("auto-77-1"), None), of(None, Some("")), of(None, None)), (None, None, None));
    }

    #[test]
    fn a_client_is_the_same_by_either_kind_of_address() {
        let of = |text: &str| Key::client(text.parse().unwrap());
        assert_eq!(of("192.0.2.1"), of("::ffff:192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn each_form_of_a_session_is_found_where_it_stands() {
        let fields: [(&str, &[u8]); 3] =
            [("x-tenant", b"red"), ("cookie", b"a=1; sid=blue ;sid=no"), ("authorization", b"BASIC dXNlcjpwdw==")];
        let field = |name: &str| fields.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| *value);
        let of = |source: SessionSource, query| told(&source, field, query).map(|v| String::from_utf8_lossy(v));
        let name = |name: &str| name.to_owned();
        assert_eq!(of(SessionSource::Header(name("X-Tenant")), None).as_deref(), Some("red"));
        assert_eq!(of(SessionSource::Header(name("X-Other")), None), None);
        assert_eq!(of(SessionSource::Cookie(name("sid")), None).as_deref(), Some("blue"));
        assert_eq!(of(SessionSource::Cookie(name("id")), None), None);
        assert_eq!(of(SessionSource::Query(name("s")), Some("ss=1&s=green&s=2")).as_deref(), Some("green"));
        assert_eq!(
            (of(SessionSource::Query(name("s")), Some("s=")), of(SessionSource::Query(name("s")), None)),
            (None, None)
        );
        assert_eq!(of(SessionSource::BasicAuth, None).as_deref(), Some("dXNlcjpwdw=="));
    }
}
