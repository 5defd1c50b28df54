//! The maps, with the types of their keys and values (BTF), so that `bpftool` prints field names.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::btf_maps::{Array, HashMap, PerCpuArray, SockMap};
use aya_ebpf::macros::btf_map;
use kvlb_common::{ENDPOINTS_MAX, Endpoint, LISTENERS_MAX, VIPS_MAX, VipInfo, VipKey, VipStats};

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
