//! The L7 data path.

mod buffer;
mod epoll;
mod http;
mod io;
mod ring;
