//! How a rule with prefill and decode endpoints splits its requests.

use std::time::Duration;

use super::{Role, Rule};
use crate::contract::handoff::{Handoff, Mooncake, Nixl};

/// Mooncake's bootstrap port, unless an operator moves it.
///
/// Source: vLLM 0.32.0 (`VLLM_MOONCAKE_BOOTSTRAP_PORT`).
const BOOTSTRAP_PORT: u16 = 8998;

/// How prefill hands on to decode, and how long each part may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRule {
    /// `pdHandoff`.
    pub handoff: HandoffKind,
    /// `timeoutPdPrefill`: a prefill leg; `None`: `LLB_PD_PREFILL_TIMEOUT_SEC`.
    pub prefill: Option<Duration>,
    /// `timeoutPdDecode`: to the first byte of a decode leg's answer; `None`: `timeoutFirstByte`. Not the prefill leg's limit: an
    /// answer that is not streamed begins when all of it is generated.
    pub decode: Option<Duration>,
    /// `timeoutPdHandoff`: from the prefill leg's answer until the decode leg is under way. Default 10 s: of the prefill
    /// engine's lease, 30 s with vLLM's defaults, the decode engine needs the rest.
    pub between: Duration,
    /// `pdBypassTokens`: a decode endpoint that would have to compute at most so many tokens of the prompt itself serves the
    /// request alone; `None`: never.
    pub bypass: Option<u32>,
    /// `pdBootstrapPort`: where prefill endpoints tell their engine's id, for handoffs that need it.
    pub bootstrap_port: u16,
}

impl Default for SplitRule {
    fn default() -> Self {
        Self {
            handoff: HandoffKind::default(),
            prefill: None,
            decode: None,
            between: Duration::from_secs(10),
            bypass: None,
            bootstrap_port: BOOTSTRAP_PORT,
        }
    }
}

/// `pdHandoff`: by what means blocks get from prefill to decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandoffKind {
    /// vLLM's NIXL connector.
    #[default]
    Nixl,
    /// vLLM's Mooncake connector.
    Mooncake,
}

impl HandoffKind {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Nixl, Self::Mooncake];

    /// What the engines want to be told.
    pub fn handoff(self) -> &'static dyn Handoff {
        match self {
            Self::Nixl => &Nixl,
            Self::Mooncake => &Mooncake,
        }
    }
}

impl Rule {
    /// Whether requests go to a prefill endpoint and then to a decode endpoint: wherever the rule has both.
    pub fn is_split(&self) -> bool {
        let has = |role| self.endpoints.iter().any(|endpoint| endpoint.role == role);
        has(Role::Prefill) && has(Role::Decode)
    }
}
