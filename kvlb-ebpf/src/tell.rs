//! The programs tell kvlb of those that they drop.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use kvlb_common::{DropReason, Dropped, VipKey};

use crate::maps::{KVLB_EVENTS, KVLB_SAMPLED};

/// Counts a drop, and tells of it where enough time has passed since the last one for this reason. The source's address and
/// port, the VIP's key, and the oldest rule there.
#[inline(always)]
pub fn tell(reason: DropReason, source: &[u8; 16], source_port: u16, vip: &VipKey, rule: u32) {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *source;
    let first = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
    let last = u64::from_ne_bytes([i, j, k, l, m, n, o, p]);
    tell_of((reason as u32) << 16 | u32::from(source_port), first, last, vip, rule);
}

/// A function of its own in the kernel too, with a stack of its own: on its caller's, what is written here would come to lie
/// where pointers were, which the verifier allows with `CAP_PERFMON` only. Such a function takes five words.
#[inline(never)]
fn tell_of(reason_and_port: u32, first: u64, last: u64, vip: &VipKey, rule: u32) {
    let (reason, source_port) = (reason_and_port >> 16, reason_and_port as u16);
    let Some(sample) = KVLB_SAMPLED.get_ptr_mut(reason) else { return };
    // SAFETY: the entry lives as long as the map, and only this CPU's programs write it.
    let sample = unsafe { &mut *sample };
    // SAFETY: it only reads a clock.
    let now = unsafe { bpf_ktime_get_ns() };
    let Some(count) = sample.count(now) else { return };
    let Some(mut told) = KVLB_EVENTS.reserve(0) else { return };
    let source = both(first, last);
    told.write(Dropped { source, target: vip.addr, source_port, target_port: vip.port, reason, rule, count });
    told.submit(0);
    sample.told(now);
}

/// The bytes of two words of this machine's order.
#[inline(always)]
const fn both(first: u64, last: u64) -> [u8; 16] {
    // SAFETY: both are 16 bytes of plain data.
    unsafe { core::mem::transmute([first, last]) }
}
