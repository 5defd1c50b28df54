//! Messages of vLLM's event stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvlb::fuzzing::events(bytes));
