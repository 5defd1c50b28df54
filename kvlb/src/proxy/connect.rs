//! A connection to an endpoint: one that waits, or a new one.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::backplane::{Addresses, Backplane, ConnectFailure};
use super::io::{Backend, Stream};
use super::lane::{Lane, is_out_of_resources};
use super::timer::timeout;
use crate::clock;

/// Addresses of one endpoint that are tried one after the other: names rarely have more that differ.
const ADDRESSES_MAX: usize = 3;

/// A connection to an endpoint, for one request.
#[derive(Debug)]
pub(super) struct Leg<S> {
    pub(super) stream: Rc<S>,
    address: SocketAddr,
    /// It has carried another request before.
    pub(super) reused: bool,
}

impl<S> Leg<S> {
    /// The endpoint's address that it goes to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl<B: Backend, P: Backplane> Lane<B, P> {
    /// A connection that waits for another request, still open and silent.
    pub(super) fn waiting_leg(&self, addresses: &Addresses, now: Instant) -> Option<Leg<B::Stream>> {
        let mut idle = self.idle.borrow_mut();
        for address in addresses.iter().copied() {
            while let Some(stream) = idle.take(address, now) {
                if stream.silent() {
                    self.meter.reused();
                    return Some(Leg { stream: Rc::new(stream), address, reused: true });
                }
            }
        }
        None
    }

    /// A new connection, within `limit` for all of the addresses.
    pub(super) async fn fresh_leg(
        &self,
        addresses: &Addresses,
        limit: Duration,
    ) -> Result<Leg<B::Stream>, ConnectFailure> {
        let mut failure = ConnectFailure::Unreachable;
        let until = clock::now() + limit;
        for address in addresses.iter().copied().take(ADDRESSES_MAX) {
            match self.connect(address, until.saturating_duration_since(clock::now())).await {
                Ok(stream) => {
                    self.meter.connected(None);
                    return Ok(Leg { stream: Rc::new(stream), address, reused: false });
                }
                Err(failed) => failure = failed,
            }
            self.meter.connected(Some(failure));
        }
        Err(failure)
    }

    async fn connect(&self, address: SocketAddr, limit: Duration) -> Result<B::Stream, ConnectFailure> {
        let attempt = || timeout(limit, B::connect(address));
        let mut result = attempt().await;
        if matches!(&result, Ok(Err(error)) if is_out_of_resources(error)) {
            // Connections that only wait give up their descriptors.
            self.idle.borrow_mut().clear();
            result = attempt().await;
        }
        match result {
            Ok(Ok(stream)) => Ok(stream),
            Err(_elapsed) => Err(ConnectFailure::TimedOut),
            Ok(Err(error)) if is_out_of_resources(&error) => Err(ConnectFailure::Ours),
            Ok(Err(error)) => {
                tracing::debug!(%address, %error, "connect failed");
                Err(match error.kind() {
                    ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => ConnectFailure::Refused,
                    ErrorKind::TimedOut => ConnectFailure::TimedOut,
                    _ => ConnectFailure::Unreachable,
                })
            }
        }
    }

    /// Takes a connection back for another request, unless an operation on it has not ended.
    pub(super) fn keep_leg(&self, leg: Leg<B::Stream>, now: Instant) {
        if let (false, Some(stream)) = (self.is_draining(), Rc::into_inner(leg.stream)) {
            self.idle.borrow_mut().put(leg.address, stream, now);
        }
    }
}
