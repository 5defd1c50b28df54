//! kvlb's kernel programs: parse, look up, count; nothing clever.
//!
//! Whatever needs no map and no context lives in `kvlb-common` and is tested on the host. `cargo xtask build-ebpf`
//! compiles this crate to `kvlb/bpf/kvlb.bpf.o`; on the host it is an empty program.

#![cfg_attr(target_arch = "bpf", no_std, no_main)]
// The machine can compare and exchange, but the target's description does not say so: `core::sync::atomic` lacks it.
#![cfg_attr(target_arch = "bpf", allow(internal_features), feature(core_intrinsics))]

#[cfg(target_arch = "bpf")]
mod admit;
#[cfg(target_arch = "bpf")]
mod allow;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod steer;
#[cfg(target_arch = "bpf")]
mod tell;

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("these programs run in the kernel: build them with `cargo xtask build-ebpf`");
}

/// The kernel lends most helpers to programs under the GPL only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// The verifier lets no program through that could come here.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
