//! XDP: a frame that would open a connection to a VIP is judged where it arrives, before Linux spends anything on it.
//!
//! Only SYNs are judged. Whatever else is for a VIP costs the reading of its headers, one look-up and a counter.

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::helpers::{bpf_ktime_get_ns, bpf_xdp_load_bytes};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use aya_log_ebpf::warn;
use core::intrinsics::{AtomicOrdering, atomic_cxchg};
use core::mem::MaybeUninit;
use kvlb_common::packet::{self, Bytes, Opening, Parsed, Segment};
use kvlb_common::{Bucket, DropReason, FrameStats, Source, VipInfo, VipKey};

use crate::allow::allows;
use crate::maps::{KVLB_FRAMES, KVLB_SYN, find, stats};
use crate::tell::tell;

/// A CPU that loses the race for a source's bucket this often in a row drops the SYN: then that source sends more than
/// any limit allows.
const ATTEMPTS: u32 = 4;

/// The address of a frame that is not read.
const NOBODY: [u8; 16] = [0; 16];

/// `EEXIST` (asm-generic/errno-base.h).
const EXISTS: i32 = -17;

/// Runs for each frame that arrives at a device with admission, also those in several buffers ("frags": else devices with
/// large frames would not take the program).
#[xdp(frags)]
pub fn kvlb_admit(ctx: XdpContext) -> u32 {
    match packet::parse(&Frame(&ctx)) {
        Parsed::Tcp(segment) => judge(&ctx, &segment),
        Parsed::Foreign => counted(|frames| frames.foreign += 1, XDP_PASS),
        Parsed::Fragment => counted(|frames| frames.fragments += 1, XDP_PASS),
        Parsed::Malformed => counted(|frames| frames.malformed += 1, XDP_PASS),
        // Linux would read on until it finds a SYN.
        Parsed::Chain => {
            tell(DropReason::Chain, &NOBODY, 0, &VipKey { addr: NOBODY, port: 0, proto: 0, pad: 0 }, 0);
            counted(|frames| frames.chains += 1, XDP_DROP)
        }
    }
}

/// The frame. Where headers usually stand it is read in place. Elsewhere the kernel's helper reads it (Linux 5.18), which is
/// slower: a pointer into a frame may move by what stands in the frame only with `CAP_PERFMON`, and sees no further than the
/// first of its buffers.
struct Frame<'a>(&'a XdpContext);

impl Bytes for Frame<'_> {
    #[inline(always)]
    fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let in_place = match at {
            // What follows Ethernet, IP's head without a tag before it, and TCP's behind IPv4 and IPv6.
            12 => self.in_place::<12, N>(),
            14 => self.in_place::<14, N>(),
            34 => self.in_place::<34, N>(),
            54 => self.in_place::<54, N>(),
            _ => None,
        };
        in_place.or_else(|| self.copied(at))
    }
}

impl Frame<'_> {
    #[inline(always)]
    fn in_place<const AT: usize, const N: usize>(&self) -> Option<[u8; N]> {
        let start = self.0.data();
        if start + AT + N > self.0.data_end() {
            return None;
        }
        // SAFETY: these bytes lie before the end of the frame's first buffer, and any bytes are an array of bytes.
        Some(unsafe { *((start + AT) as *const [u8; N]) })
    }

    #[inline(always)]
    fn copied<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let mut bytes = MaybeUninit::<[u8; N]>::uninit();
        // SAFETY: the context is the kernel's own, and the helper writes `N` bytes or says that it did not.
        let done = unsafe { bpf_xdp_load_bytes(self.0.ctx, at as u32, bytes.as_mut_ptr().cast(), N as u32) };
        // SAFETY: it wrote them.
        if done == 0 { Some(unsafe { bytes.assume_init() }) } else { None }
    }
}

#[inline(always)]
fn counted(count: impl FnOnce(&mut FrameStats), verdict: u32) -> u32 {
    if let Some(frames) = KVLB_FRAMES.get_ptr_mut(0) {
        // SAFETY: the entry lives as long as the map, and only this CPU's programs write it.
        count(unsafe { &mut *frames });
    }
    verdict
}

#[inline(always)]
fn judge(ctx: &XdpContext, segment: &Segment) -> u32 {
    let key = VipKey::tcp(segment.target, segment.target_port);
    let Some(vip) = find(&key) else { return counted(|frames| frames.foreign += 1, XDP_PASS) };
    let Some(stats) = stats(vip) else { return XDP_PASS };
    let reason = match segment.opening() {
        Opening::No => {
            stats.other += 1;
            return XDP_PASS;
        }
        Opening::Cut => {
            stats.cut += 1;
            DropReason::Cut
        }
        Opening::Syn if !allows(vip, &segment.source) => {
            stats.syn_denied += 1;
            DropReason::Acl
        }
        Opening::Syn if !in_pace(vip, &segment.source) => {
            stats.syn_over_rate += 1;
            // The first, second, fourth, eighth ...: a flood of SYNs is not a flood of lines.
            if stats.syn_over_rate.is_power_of_two() {
                warn!(
                    ctx,
                    "{:i} sends more SYNs to VIP {:i} port {} than rule {} allows",
                    segment.source,
                    key.addr,
                    key.port,
                    vip.syn_rule
                );
            }
            DropReason::Rate
        }
        Opening::Syn => {
            stats.syn_passed += 1;
            return XDP_PASS;
        }
    };
    tell(reason, &segment.source, segment.source_port, &key, vip.rule);
    XDP_DROP
}

/// Whether the source's bucket has a token for this SYN, which is taken.
#[inline(always)]
fn in_pace(vip: &VipInfo, addr: &[u8; 16]) -> bool {
    let Some(pace) = vip.pace() else { return true };
    let source = Source { rule: vip.syn_rule, addr: *addr };
    // SAFETY: it only reads a clock.
    let now = unsafe { bpf_ktime_get_ns() };
    for _ in 0..ATTEMPTS {
        let Some(bucket) = KVLB_SYN.get_ptr_mut(source) else {
            let Some(full_at) = pace.admit(0, now) else { return false };
            match KVLB_SYN.insert(source, Bucket { full_at }, BPF_NOEXIST.into()) {
                Err(EXISTS) => continue,
                // Without memory for a bucket nobody is limited: what cannot be judged passes.
                Ok(()) | Err(_) => return true,
            }
        };
        // SAFETY: an element's memory stays an element's, and the word is read at once.
        let full_at = unsafe { (&raw const (*bucket).full_at).read_volatile() };
        let Some(then) = pace.admit(full_at, now) else { return false };
        // SAFETY: as above; other CPUs write the word by this instruction only.
        let (_, taken) = unsafe {
            atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                &raw mut (*bucket).full_at,
                full_at,
                then,
            )
        };
        if taken {
            return true;
        }
    }
    false
}
