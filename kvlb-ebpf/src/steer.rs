//! `SK_LOOKUP`: a new connection to a VIP goes to a listener of the proxy, whatever address that one is bound to.

use aya_ebpf::bindings::bpf_sk_lookup;
use aya_ebpf::bindings::sk_action::{SK_DROP, SK_PASS};
use aya_ebpf::macros::sk_lookup;
use aya_ebpf::programs::SkLookupContext;
use aya_log_ebpf::warn;
use kvlb_common::{DropReason, Flow, TCP, Verdict, VipInfo, VipKey, VipStats};

use crate::allow::allows;
use crate::maps::{KVLB_LISTEN, find, stats};
use crate::tell::tell;

/// `AF_INET`, as `bpf_sk_lookup.family` has it.
const IPV4: u32 = 2;

/// `BPF_SK_LOOKUP_F_NO_REUSEPORT` (linux/bpf.h): the listener is the one chosen here, also if it shares its port with
/// others by `SO_REUSEPORT`.
const NO_REUSEPORT: u64 = 2;
/// `BPF_SK_LOOKUP_F_REPLACE`: what an earlier program chose does not stand. That one is of a kvlb that is about to leave.
const REPLACE: u64 = 1;

/// Runs for each packet that opens a connection to an address of this network namespace, before the kernel looks for a
/// listener. What is not for a VIP passes untouched.
#[sk_lookup]
pub fn kvlb_lookup(ctx: SkLookupContext) -> u32 {
    try_lookup(&ctx).unwrap_or(SK_PASS)
}

#[inline(always)]
fn try_lookup(ctx: &SkLookupContext) -> Option<u32> {
    let (flow, key) = read(ctx)?;
    let vip = find(&key)?;
    let stats = stats(vip)?;
    let source = octets(flow.remote_addr);
    let (reason, verdict) = if allows(vip, &source) {
        match vip.verdict() {
            Verdict::Pass => return None,
            Verdict::Refuse => {
                stats.refused += 1;
                (DropReason::NoEndpoint, SK_DROP)
            }
            Verdict::Steer if steer(ctx, &flow, &key, vip, stats) => return Some(SK_PASS),
            // Linux refuses it, unless a listener of somebody else has the address.
            Verdict::Steer => (DropReason::NoListener, SK_PASS),
        }
    } else {
        stats.denied += 1;
        (DropReason::Denied, SK_DROP)
    };
    // The kernel has the client's port in network order.
    tell(reason, &source, u16::from_be(flow.remote_port), &key, vip.rule);
    Some(verdict)
}

/// The connection and the key of its exact port; nothing when it is not TCP.
///
/// All fields are read before the first branch, and volatile: else the compiler merges the reads of both families into
/// one at "context + variable offset", which the verifier refuses.
#[inline(always)]
fn read(ctx: &SkLookupContext) -> Option<(Flow, VipKey)> {
    let lookup: *const bpf_sk_lookup = ctx.lookup;
    macro_rules! field {
        // SAFETY: the kernel hands in a valid context, and each field is read at its own offset and width.
        ($($path:tt)+) => { unsafe { core::ptr::read_volatile(&raw const (*lookup).$($path)+) } };
    }
    let (family, protocol) = (field!(family), field!(protocol));
    let (local4, remote4) = (field!(local_ip4), field!(remote_ip4));
    let local6 = [field!(local_ip6[0]), field!(local_ip6[1]), field!(local_ip6[2]), field!(local_ip6[3])];
    let remote6 = [field!(remote_ip6[0]), field!(remote_ip6[1]), field!(remote_ip6[2]), field!(remote_ip6[3])];
    let (local_port, remote_port) = (field!(local_port) as u16, field!(remote_port));
    if protocol != u32::from(TCP) {
        return None;
    }
    let (local_addr, remote_addr) = if family == IPV4 { (mapped(local4), mapped(remote4)) } else { (local6, remote6) };
    let key = VipKey::tcp(octets(local_addr), local_port);
    Some((Flow { remote_addr, local_addr, remote_port, local_port }, key))
}

/// An IPv4 address as `::ffff:a.b.c.d`, in words of network order.
#[inline(always)]
const fn mapped(v4: u32) -> [u32; 4] {
    [0, 0, 0xffff_u32.to_be(), v4]
}

/// The bytes of four words of network order.
#[inline(always)]
const fn octets(words: [u32; 4]) -> [u8; 16] {
    // SAFETY: both are 16 bytes of plain data.
    unsafe { core::mem::transmute(words) }
}

/// Hands the connection to a listener; false when there is none.
#[inline(always)]
fn steer(ctx: &SkLookupContext, flow: &Flow, key: &VipKey, vip: &VipInfo, stats: &mut VipStats) -> bool {
    // The first and the last stand in for one that is gone: its thread has ended, or the number of listeners was lowered
    // since `vip` was read.
    let chosen = [flow.worker(vip.workers), 0, vip.workers.wrapping_sub(1)];
    let try_one = |worker: u32| {
        KVLB_LISTEN.redirect_sk_lookup(ctx, vip.listener.wrapping_add(worker), NO_REUSEPORT | REPLACE).is_ok()
    };
    let taken = vip.workers > 0 && (try_one(chosen[0]) || try_one(chosen[1]) || try_one(chosen[2]));
    if taken {
        stats.steered += 1;
    } else {
        stats.no_listener += 1;
        // The first, second, fourth, eighth ...: a flood of connections is not a flood of lines.
        if stats.no_listener.is_power_of_two() {
            warn!(ctx, "no listener for VIP {:i} port {} (rule {})", key.addr, key.port, vip.rule);
        }
    }
    taken
}
