//! The maps themselves, each by its type.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

use aya::Ebpf;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, IterableMap as _, Map, MapData, MapError, PerCpuArray, PerCpuValues, SockMap};
use aya::util::nr_cpus;
use kvlb_common::{
    Bucket, ENDPOINT_BYTES, Endpoint, FrameStats, LIST_BITS, Network4, Network6, Source, Stamp, VipInfo, VipKey,
    VipStats,
};

use super::Error;
use super::pins::{self, PinDir};
use super::table::Sink;

/// The maps that the user side writes or reads.
pub(super) struct Maps {
    vips: HashMap<MapData, VipKey, VipInfo>,
    /// As bytes: see [`Endpoint`].
    endpoints: Array<MapData, [u8; ENDPOINT_BYTES]>,
    stats: PerCpuArray<MapData, VipStats>,
    listeners: SockMap<MapData>,
    networks4: LpmTrie<MapData, Network4, u32>,
    networks6: LpmTrie<MapData, Network6, u32>,
    sources: HashMap<MapData, Source, Bucket>,
    frames: PerCpuArray<MapData, FrameStats>,
    stamp: Array<MapData, Stamp>,
}

/// The name of the map of sources, whose size depends on whether it is used.
pub(super) const SOURCES: &str = "KVLB_SYN";

impl Maps {
    /// Takes the maps out of the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, Error> {
        Ok(Self {
            vips: typed(ebpf, "KVLB_VIPS")?,
            endpoints: typed(ebpf, "KVLB_EPS")?,
            stats: typed(ebpf, "KVLB_STATS")?,
            listeners: typed(ebpf, "KVLB_LISTEN")?,
            networks4: typed(ebpf, "KVLB_ACL4")?,
            networks6: typed(ebpf, "KVLB_ACL6")?,
            sources: typed(ebpf, SOURCES)?,
            frames: typed(ebpf, "KVLB_FRAMES")?,
            stamp: typed(ebpf, "KVLB_STAMP")?,
        })
    }

    /// Says of which object they are.
    pub(super) fn stamp(&mut self, stamp: Stamp) -> Result<(), Error> {
        self.stamp.set(0, stamp, 0).map_err(failed("write", "KVLB_STAMP"))
    }

    /// Pins the maps that others may read.
    pub(super) fn pin(&self, pins: &PinDir) -> Result<(), Error> {
        self.pinned().into_iter().try_for_each(|(name, map)| pins.pin(name, map))
    }

    /// The same in place of another process's maps: at every moment each name leads to one of the two.
    pub(super) fn pin_instead(&self, pins: &PinDir) -> Result<(), Error> {
        self.pinned().into_iter().try_for_each(|(name, map)| pins.pin_instead(name, map))
    }

    /// Each map with its pin's name.
    fn pinned(&self) -> [(&'static str, &MapData); 8] {
        [
            (pins::VIPS, self.vips.map()),
            (pins::ENDPOINTS, self.endpoints.map()),
            (pins::STATS, self.stats.map()),
            (pins::NETWORKS4, self.networks4.map()),
            (pins::NETWORKS6, self.networks6.map()),
            (pins::SOURCES, self.sources.map()),
            (pins::FRAMES, self.frames.map()),
            // The last: where it is, the others are.
            (pins::STAMP, self.stamp.map()),
        ]
    }

    /// Puts `listener` at `index`, in place of any that is there.
    pub(super) fn set_listener(&mut self, index: u32, listener: BorrowedFd<'_>) -> Result<(), Error> {
        self.listeners.set(index, &listener, 0).map_err(|source| Error::Listener { index, source })
    }

    /// Takes the listener at `index` out, if it is still there: the kernel takes a closed one out by itself.
    pub(super) fn clear_listener(&mut self, index: u32) -> Result<(), Error> {
        absent_is_fine(self.listeners.clear_index(&index)).map_err(failed("clear an entry of", "KVLB_LISTEN"))
    }

    /// The counters at `id`, all CPUs together.
    pub(super) fn stats(&self, id: u32) -> Result<VipStats, Error> {
        let values = self.stats.get(&id, 0).map_err(failed("read", "KVLB_STATS"))?;
        Ok(values.iter().copied().fold(VipStats::default(), VipStats::plus))
    }

    /// The counters of frames for no VIP, all CPUs together.
    pub(super) fn frames(&self) -> Result<FrameStats, Error> {
        let values = self.frames.get(&0, 0).map_err(failed("read", "KVLB_FRAMES"))?;
        Ok(values.iter().copied().fold(FrameStats::default(), FrameStats::plus))
    }
}

impl Sink for Maps {
    fn set_endpoint(&mut self, slot: u32, endpoint: &Endpoint) -> Result<(), Error> {
        self.endpoints.set(slot, endpoint.to_bytes(), 0).map_err(failed("write", "KVLB_EPS"))
    }

    fn set_vip(&mut self, key: &VipKey, info: &VipInfo) -> Result<(), Error> {
        self.vips.insert(key, info, 0).map_err(failed("write", "KVLB_VIPS"))
    }

    fn remove_vip(&mut self, key: &VipKey) -> Result<(), Error> {
        absent_is_fine(self.vips.remove(key)).map_err(failed("remove an entry of", "KVLB_VIPS"))
    }

    fn set_network(&mut self, list: u32, (addr, bits): (IpAddr, u8), rule: u32) -> Result<(), Error> {
        match addr {
            IpAddr::V4(v4) => {
                self.networks4.insert(&key4(list, v4, bits), rule, 0).map_err(failed("write", "KVLB_ACL4"))
            }
            IpAddr::V6(v6) => {
                self.networks6.insert(&key6(list, v6, bits), rule, 0).map_err(failed("write", "KVLB_ACL6"))
            }
        }
    }

    fn remove_network(&mut self, list: u32, (addr, bits): (IpAddr, u8)) -> Result<(), Error> {
        let (removed, map) = match addr {
            IpAddr::V4(v4) => (self.networks4.remove(&key4(list, v4, bits)), "KVLB_ACL4"),
            IpAddr::V6(v6) => (self.networks6.remove(&key6(list, v6, bits)), "KVLB_ACL6"),
        };
        absent_is_fine(removed).map_err(failed("remove an entry of", map))
    }

    fn clear_stats(&mut self, id: u32) -> Result<(), Error> {
        let zero = || -> Result<PerCpuValues<VipStats>, MapError> {
            let cpus = nr_cpus().map_err(|(_, error)| error)?;
            Ok(PerCpuValues::try_from(vec![VipStats::default(); cpus])?)
        };
        let cleared = zero().and_then(|zero| self.stats.set(id, zero, 0));
        cleared.map_err(failed("clear", "KVLB_STATS"))
    }
}

fn key4(list: u32, addr: Ipv4Addr, bits: u8) -> Key<Network4> {
    Key::new(LIST_BITS + u32::from(bits), Network4 { list, addr: addr.octets() })
}

fn key6(list: u32, addr: Ipv6Addr, bits: u8) -> Key<Network6> {
    Key::new(LIST_BITS + u32::from(bits), Network6 { list, addr: addr.octets() })
}

/// The map `name` out of the object, by the type that its Rust name says.
pub(super) fn typed<T: TryFrom<Map, Error = MapError>>(ebpf: &mut Ebpf, name: &'static str) -> Result<T, Error> {
    let map = ebpf.take_map(name).ok_or_else(|| missing(name))?;
    T::try_from(map).map_err(failed("use", name))
}

fn missing(map: &'static str) -> Error {
    Error::Map { what: "find", map, source: MapError::KeyNotFound }
}

fn failed(what: &'static str, map: &'static str) -> impl FnOnce(MapError) -> Error {
    move |source| Error::Map { what, map, source }
}

/// What was to be removed is not there.
fn absent_is_fine(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound | MapError::ElementNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
