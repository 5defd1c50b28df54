//! Ethernet frames, as the kernel program reads them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvlb::fuzzing::frame(bytes));
