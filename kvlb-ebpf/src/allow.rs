//! `allowedSources`: who may connect to a VIP. Admission and steering ask the same lists.

use aya_ebpf::btf_maps::lpm_trie::Key;
use kvlb_common::{LIST_BITS, Network4, Network6, VIP_ALLOWED, VipInfo, v4_octets};

use crate::maps::{KVLB_ACL4, KVLB_ACL6};

/// Whether `source` may connect to the VIP.
#[inline(always)]
pub fn allows(vip: &VipInfo, source: &[u8; 16]) -> bool {
    if vip.flags & VIP_ALLOWED == 0 {
        return true;
    }
    let list = vip.allowed;
    match v4_octets(source) {
        Some(addr) => KVLB_ACL4.get(&Key::new(LIST_BITS + 32, Network4 { list, addr })).is_some(),
        None => KVLB_ACL6.get(&Key::new(LIST_BITS + 128, Network6 { list, addr: *source })).is_some(),
    }
}
