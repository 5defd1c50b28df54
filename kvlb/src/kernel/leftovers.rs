//! What a kvlb that is gone has left in the kernel: pins, and the routes of its VIPs.
//!
//! Programs and their links go with their process, however that ends, and so does what they did at devices.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use super::Error;
use super::error::Outcome;
use super::pins::PinDir;
use super::routes::Routes;

/// What [`clear`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Pins that were removed, by their names.
    pub pins: Vec<String>,
    /// Addresses whose routes were removed.
    pub routes: Vec<IpAddr>,
    /// Addresses with routes that are marked as kvlb's, of which no pin here tells: another kvlb's, or left by one whose pins
    /// are gone.
    pub others: Vec<IpAddr>,
}

/// The processes that hold a pin directory.
pub fn holders(pin_dir: &Path) -> Vec<u32> {
    let Ok(pin_dir) = pin_dir.canonicalize() else { return Vec::new() };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| holds(*id, &pin_dir)).collect()
}

/// Whether a process has the directory open, with a lock on it. A process that is gone, or another user's, has not.
fn holds(id: u32, pin_dir: &Path) -> bool {
    let open = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
    let mut there = open.filter(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == pin_dir));
    there.any(|fd| {
        let about = format!("/proc/{id}/fdinfo/{}", fd.file_name().to_string_lossy());
        fs::read_to_string(about).is_ok_and(|text| text.contains("FLOCK"))
    })
}

/// Removes pins and routes of a kvlb that is gone; with `all_routes` all routes of this network namespace that are marked as
/// kvlb's, whoever has left them.
///
/// # Errors
/// [`Error::InUse`] while a kvlb holds the directory; the first thing that could not be removed, when the others are.
pub fn clear(pin_dir: &Path, all_routes: bool) -> Result<Cleared, Error> {
    let mut cleared = Cleared::default();
    let mut outcome = Outcome::default();
    let mut pins = if pin_dir.exists() { Some(PinDir::open(pin_dir)?) } else { None };
    let told = pins.as_ref().map(|pins| pins.stale().1).unwrap_or_default();
    let mut routes = Routes::open(told.clone())?;
    let marked: BTreeSet<IpAddr> = routes.marked()?.into_iter().collect();
    if all_routes {
        routes.inherit(marked.iter().copied().collect());
    }
    outcome.note(routes.retain(&BTreeSet::new()));
    let left: BTreeSet<IpAddr> = routes.marked()?.into_iter().collect();
    cleared.routes = marked.difference(&left).copied().collect();
    cleared.others = left.into_iter().collect();
    if let Some(pins) = &mut pins {
        cleared.pins = pins.there();
        outcome.note(pins.remove());
    }
    outcome.finish().map(|()| cleared)
}
