//! Admission: the XDP program at the devices through which clients come.
//!
//! Each device is held by a link that is a descriptor of this process, so that it is free again when the process ends,
//! however that one ends.

use aya::programs::links::FdLink;
use aya::programs::{ProgramError, Xdp, XdpError, XdpMode};
use aya::{Ebpf, EbpfError};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;

use super::Error;
use super::error::from_program;

/// The admission program's name in the object, and in `bpftool prog show`.
const PROGRAM: &str = "kvlb_admit";

/// Where at a device frames are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionMode {
    /// By its driver, before a frame costs any memory of Linux's own.
    Native,
    /// By Linux, right after the driver: for devices whose driver cannot.
    Generic,
}

impl AdmissionMode {
    /// The word for it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }
}

/// A device with admission.
#[derive(Debug)]
pub(super) struct Admitting {
    pub(super) device: String,
    pub(super) mode: AdmissionMode,
    /// The device's number: another device of the same name has another.
    index: u32,
    /// Frames are judged as long as this is open.
    _link: FdLink,
}

/// Types of devices whose frames begin as Ethernet's do: its own, and loopback (`linux/if_arp.h`).
const ETHERNETS: [u16; 2] = [1, 772];

/// Refuses devices that are not there, and those whose frames the program could not read.
pub(super) fn check(devices: &[String]) -> Result<(), Error> {
    devices.iter().try_for_each(|device| match if_nametoindex(device.as_str()) {
        Err(_) => Err(Error::NoDevice { device: device.clone() }),
        Ok(_) if !has_ethernet(device) => Err(Error::NotEthernet { device: device.clone() }),
        Ok(_) => Ok(()),
    })
}

/// Whether a device's frames begin as Ethernet's do: then it has a hardware address of that type. Also where Linux does not say.
fn has_ethernet(device: &str) -> bool {
    let Ok(addresses) = getifaddrs() else { return true };
    let mut types =
        addresses.filter(|at| at.interface_name == device).filter_map(|at| Some(at.address?.as_link_addr()?.hatype()));
    types.any(|of| ETHERNETS.contains(&of))
}

/// Hands the program to the kernel, which verifies it; no frame is judged yet.
pub(super) fn load(ebpf: &mut Ebpf) -> Result<(), Error> {
    program(ebpf).and_then(|program| program.load().map_err(EbpfError::from)).map_err(|error| {
        match from_program(error) {
            Error::Program { source } => Error::Admission { source },
            other => other,
        }
    })
}

/// Judges frames at `devices` from now on; at none of them when one cannot be had.
pub(super) fn attach(ebpf: &mut Ebpf, devices: &[String]) -> Result<Vec<Admitting>, Error> {
    let program = program(ebpf).map_err(from_program)?;
    devices.iter().map(|device| attach_one(program, device)).collect()
}

/// Lets go of devices that are gone and takes those that are back, or could not be had before; gives those that cannot be
/// had, and why.
pub(super) fn renew(ebpf: &mut Ebpf, devices: &[String], admitting: &mut Vec<Admitting>) -> Vec<(String, Error)> {
    admitting.retain(|at| {
        let there = if_nametoindex(at.device.as_str()).is_ok_and(|index| index == at.index);
        if !there {
            tracing::error!(device = at.device, "the device is gone: its SYNs are not judged");
        }
        there
    });
    let missing: Vec<_> =
        devices.iter().filter(|device| !admitting.iter().any(|at| at.device == **device)).cloned().collect();
    let mut lost = Vec::new();
    for device in missing {
        let taken = check(std::slice::from_ref(&device))
            .and_then(|()| program(ebpf).map_err(from_program))
            .and_then(|program| attach_one(program, &device));
        match taken {
            Ok(at) => admitting.push(at),
            Err(error) => lost.push((device, error)),
        }
    }
    lost
}

/// The kernel's id of the program.
pub(super) fn id(ebpf: &Ebpf) -> Option<u32> {
    let program: &Xdp = ebpf.program(PROGRAM)?.try_into().ok()?;
    program.info().ok().map(|info| info.id())
}

fn program(ebpf: &mut Ebpf) -> Result<&mut Xdp, EbpfError> {
    let program = ebpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded)?;
    Ok(program.try_into()?)
}

fn attach_one(program: &mut Xdp, device: &str) -> Result<Admitting, Error> {
    let index = if_nametoindex(device).map_err(|_gone| Error::NoDevice { device: device.to_owned() })?;
    let (mode, link) = match program.attach(device, XdpMode::Driver) {
        Ok(link) => (AdmissionMode::Native, link),
        Err(error) if answer(&error).is_some_and(may_be_generic) => {
            let link = program.attach(device, XdpMode::Skb).map_err(|error| failed(device, error))?;
            tracing::info!(
                device,
                error = &error as &dyn std::error::Error,
                "the driver does not take the XDP program"
            );
            (AdmissionMode::Generic, link)
        }
        Err(error) => return Err(failed(device, error)),
    };
    tracing::info!(device, mode = mode.label(), "SYNs are judged");
    let link = program.take_link(link).map_err(|error| failed(device, error))?;
    let link =
        FdLink::try_from(link).map_err(|error| Error::Device { device: device.to_owned(), source: Box::new(error) })?;
    Ok(Admitting { device: device.to_owned(), mode, index, _link: link })
}

/// The kernel's answer, where it gave one.
fn answer(error: &ProgramError) -> Option<Errno> {
    let mut cause = Some(error as &dyn std::error::Error);
    while let Some(error) = cause {
        if let Some(code) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            return Some(Errno::from_raw(code));
        }
        if let Some(XdpError::NetlinkError(error)) = error.downcast_ref() {
            return error.raw_os_error().map(Errno::from_raw);
        }
        cause = error.source();
    }
    None
}

/// Whether a driver's answer says that it cannot, rather than that nobody may.
fn may_be_generic(answer: Errno) -> bool {
    !matches!(answer, Errno::EBUSY | Errno::EEXIST | Errno::EPERM | Errno::EACCES | Errno::ENODEV)
}

fn failed(device: &str, error: ProgramError) -> Error {
    let device = device.to_owned();
    match (&error, answer(&error)) {
        (ProgramError::UnknownInterface { .. }, _) | (_, Some(Errno::ENODEV)) => Error::NoDevice { device },
        // The kernel's answers for a device that has a program in the same mode, or in the other (net/core/dev.c).
        (_, Some(errno @ (Errno::EBUSY | Errno::EEXIST))) => Error::DeviceHeld { device, source: errno.into() },
        (_, Some(errno @ (Errno::EPERM | Errno::EACCES))) => {
            Error::Privileges { what: "attach the XDP program", source: errno.into() }
        }
        _ => Error::Device { device, source: Box::new(error) },
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::sys::SyscallError;

    use super::*;

    fn answered(code: Errno) -> ProgramError {
        SyscallError { call: "bpf_link_create", io_error: io::Error::from_raw_os_error(code as i32) }.into()
    }

    #[test]
    fn a_driver_that_cannot_leaves_it_to_linux_and_one_that_is_held_does_not() {
        for (code, generic) in [
            (Errno::EOPNOTSUPP, true),
            (Errno::ERANGE, true),
            (Errno::EINVAL, true),
            (Errno::EBUSY, false),
            (Errno::EEXIST, false),
            (Errno::EPERM, false),
        ] {
            assert_eq!(answer(&answered(code)).is_some_and(may_be_generic), generic, "{code}");
        }
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        let text = |code| failed("eth0", answered(code)).to_string();
        assert!(text(Errno::EBUSY).contains("eth0") && text(Errno::EEXIST).contains("bpftool net"));
        assert!(text(Errno::EPERM).contains("CAP_NET_ADMIN"));
        assert!(matches!(failed("eth0", answered(Errno::ENODEV)), Error::NoDevice { .. }));
        assert!(matches!(failed("eth0", answered(Errno::ENOMEM)), Error::Device { .. }));
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let error = check(&["lo".to_owned(), "kvlb-no-such".to_owned()]).unwrap_err();
        assert!(matches!(&error, Error::NoDevice { device } if device == "kvlb-no-such"), "{error:?}");
        assert!(check(&["lo".to_owned()]).is_ok());
    }
}
