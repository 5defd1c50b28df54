//! The door: a client command, or the daemon.

use std::process::ExitCode;

use kvlb::cli::{self, Parsed};
use kvlb::config::Env;

fn main() -> ExitCode {
    match cli::parse(std::env::args_os(), &Env::of_process()) {
        Parsed::Client(invocation) => cli::run(&invocation),
        Parsed::Done(code) => code,
        Parsed::Up(config) => kvlb::app::up(*config),
    }
}
