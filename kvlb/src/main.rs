//! The door: a client command, or the daemon.

use std::process::ExitCode;

use tikv_jemallocator::Jemalloc;

use kvlb::cli::{self, Parsed};
use kvlb::config::Env;

/// A decision takes a third less time than with the C library's, and memory in use stays as small.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    match cli::parse(std::env::args_os(), &Env::of_process()) {
        Parsed::Client(invocation) => cli::run(&invocation),
        Parsed::Done(code) => code,
        Parsed::Up(config) => kvlb::app::up(*config),
        Parsed::Doctor(config, as_json) => kvlb::app::doctor(&config, as_json),
        Parsed::Down(settings) => kvlb::app::down(&settings),
    }
}
