//! The maps, with the types of their keys and values (BTF), so that `bpftool` prints field names.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SockMap};
use aya_ebpf::macros::btf_map;
use kvlb_common::{
    Bucket, DROP_REASONS, Dropped, ENDPOINTS_MAX, EVENTS_BYTES, Endpoint, FrameStats, LISTENERS_MAX, NETWORKS_MAX,
    Network4, Network6, SOURCES_MAX, Sample, Source, Stamp, VIPS_MAX, VipInfo, VipKey, VipStats,
};

/// The VIPs. Not preallocated: a preallocated element can be used anew while a program still reads it, an allocated one
/// is freed only after every reader has left.
#[btf_map]
pub static KVLB_VIPS: HashMap<VipKey, VipInfo, { VIPS_MAX as usize }, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();

/// The endpoints of all VIPs. Steering needs their number only, which `VipInfo` has.
#[btf_map]
pub static KVLB_EPS: Array<Endpoint, { ENDPOINTS_MAX as usize }> = Array::new();

/// Counters by `VipInfo::id`.
#[btf_map]
pub static KVLB_STATS: PerCpuArray<VipStats, { VIPS_MAX as usize }> = PerCpuArray::new();

/// The proxy's listening sockets, one per data thread.
#[btf_map]
pub static KVLB_LISTEN: SockMap<{ LISTENERS_MAX as usize }> = SockMap::new();

/// The IPv4 networks of all lists of sources; the value is the oldest rule that a list is of.
#[btf_map]
pub static KVLB_ACL4: LpmTrie<Network4, u32, { NETWORKS_MAX as usize }> = LpmTrie::new();

/// The same of IPv6.
#[btf_map]
pub static KVLB_ACL6: LpmTrie<Network6, u32, { NETWORKS_MAX as usize }> = LpmTrie::new();

/// Buckets of those that sent SYNs of late. The loader makes it small where no device has admission.
#[btf_map]
pub static KVLB_SYN: LruHashMap<Source, Bucket, { SOURCES_MAX as usize }> = LruHashMap::new();

/// Counters of frames that are for no VIP.
#[btf_map]
pub static KVLB_FRAMES: PerCpuArray<FrameStats, 1> = PerCpuArray::new();

/// Which object these maps are of. The programs do not look at it.
#[btf_map]
pub static KVLB_STAMP: Array<Stamp, 1> = Array::new();

/// Some of those that are dropped, for kvlb to read.
#[btf_map]
pub static KVLB_EVENTS: RingBuf<Dropped, { EVENTS_BYTES as usize }> = RingBuf::new();

/// What is yet to be told of drops, by reason.
#[btf_map]
pub static KVLB_SAMPLED: PerCpuArray<Sample, { DROP_REASONS as usize }> = PerCpuArray::new();

/// The VIP of exactly this port, else the one of all ports of its address.
#[inline(always)]
pub fn find(key: &VipKey) -> Option<&'static VipInfo> {
    // SAFETY: an element that is replaced is freed only when all programs that read it have ended.
    unsafe { KVLB_VIPS.get(key).or_else(|| KVLB_VIPS.get(key.any_port())) }
}

/// The counters of a VIP on this CPU.
#[inline(always)]
pub fn stats(vip: &VipInfo) -> Option<&'static mut VipStats> {
    let stats = KVLB_STATS.get_ptr_mut(vip.id)?;
    // SAFETY: the entry lives as long as the map, and only this CPU's programs write it.
    Some(unsafe { &mut *stats })
}
