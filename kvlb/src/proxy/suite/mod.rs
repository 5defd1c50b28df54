//! The proxy as a whole, over real sockets on loopback: the same tests for both back ends.
//!
//! Endpoints are scripted byte by byte on threads of their own, and so are clients, so that nothing in these tests knows
//! HTTP better than it should.

mod abort;
mod access;
mod basics;
mod bodies;
mod descriptors;
mod endings;
mod failure;
mod fields;
mod framing;
mod legs;
mod lifecycle;
pub(super) mod rig;
mod streams;
mod trace;
mod usage;

/// Mounts tests that take an [`Io`](super::Io) once for each back end.
macro_rules! on_both_back_ends {
    ($($test:ident),* $(,)?) => {
        mod uring {
            $(#[test] fn $test() { if $crate::proxy::suite::rig::uring_is_here() { super::$test($crate::proxy::Io::Uring) } })*
        }
        mod epoll {
            $(#[test] fn $test() { super::$test($crate::proxy::Io::Epoll) })*
        }
    };
}
use on_both_back_ends;
