//! Heads of requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvlb::fuzzing::head(bytes));
