//! What can go wrong between kvlb and the kernel, and what to do about it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use aya::EbpfError;
use aya::maps::MapError;
use aya::programs::ProgramError;

/// Why the kernel does not do its share.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process may not do this.
    #[error("no privilege to {what}: run as root or with CAP_BPF and CAP_NET_ADMIN, or use `--datapath none`")]
    Privileges {
        /// What was refused.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Nothing can be pinned there.
    #[error("{} is not on a BPF file system: `mount -t bpf bpf /sys/fs/bpf`, or choose a pin directory on one", path.display())]
    NoBpffs {
        /// The pin directory.
        path: PathBuf,
        /// Why kvlb could not mount one, if it tried.
        source: Option<io::Error>,
    },
    /// Another process holds the pin directory.
    #[error("{} is held by another kvlb: stop that one, or choose another pin directory", path.display())]
    InUse {
        /// The pin directory.
        path: PathBuf,
    },
    /// The pin directory cannot be used.
    #[error("cannot {what} {}", path.display())]
    Pin {
        /// What was tried.
        what: &'static str,
        /// The directory or pin.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel does not take the program or its maps.
    #[error("this kernel does not take the program: SK_LOOKUP needs Linux 5.9, its log 5.8, and CONFIG_BPF_SYSCALL")]
    Program {
        /// What it says, with the verifier's log where there is one.
        source: Box<EbpfError>,
    },
    /// The kernel does not take the program that judges frames.
    #[error("this kernel does not take the program of --xdp-dev: it needs Linux 5.18")]
    Admission {
        /// What it says, with the verifier's log where there is one.
        source: Box<EbpfError>,
    },
    /// A device that was to have admission is not in this network namespace.
    #[error("there is no device {device} in this network namespace: `ip link` shows those that are")]
    NoDevice {
        /// Its name.
        device: String,
    },
    /// A device's frames do not begin as Ethernet's do.
    #[error(
        "device {device} has no Ethernet frames, which are all that the XDP program reads: name the device below it"
    )]
    NotEthernet {
        /// Its name.
        device: String,
    },
    /// Another program judges frames at the device.
    #[error("another XDP program holds device {device}: `bpftool net` shows it; kvlb does not replace it")]
    DeviceHeld {
        /// The device's name.
        device: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A device takes the program neither in its driver nor behind it.
    #[error("device {device} does not take the XDP program")]
    Device {
        /// Its name.
        device: String,
        /// What the kernel says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The network namespace of this thread cannot be opened.
    #[error("cannot open this thread's network namespace")]
    Namespace(#[source] io::Error),
    /// The routing tables cannot be asked.
    #[error("cannot open a netlink socket")]
    Netlink(#[source] io::Error),
    /// A map is not there or cannot be read or written.
    #[error("cannot {what} map {map}")]
    Map {
        /// What was tried.
        what: &'static str,
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        source: MapError,
    },
    /// The kernel does not take this socket as a listener.
    #[error("listener {index} is not a listening TCP socket that the kernel can steer to")]
    Listener {
        /// Its place in the list.
        index: u32,
        /// The kernel's answer.
        source: MapError,
    },
    /// A VIP's local route cannot be looked up, added or removed.
    #[error("cannot {what} the local route of {addr}")]
    Route {
        /// What was tried.
        what: &'static str,
        /// The VIP's address.
        addr: IpAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another program listens where VIPs are to be; they are not taken from it.
    #[error("{at} is not served: {who} listens there{}", more(*others))]
    Owned {
        /// The first of them.
        at: SocketAddr,
        /// Who it is.
        who: String,
        /// How many more VIPs are others'.
        others: usize,
    },
    /// No VIP can have this address.
    #[error("{addr} cannot be a VIP: it is not the address of one host")]
    Address {
        /// The address.
        addr: IpAddr,
    },
    /// Two VIPs have one address and port.
    #[error("{at} is in the list of VIPs twice")]
    Twice {
        /// Address and port.
        at: SocketAddr,
    },
    /// A map has no room left.
    #[error("no room for {wanted} more {what}: the kernel's map holds {max}")]
    Full {
        /// What there are too many of.
        what: &'static str,
        /// How many were to be added.
        wanted: usize,
        /// How many there can be.
        max: u32,
    },
}

/// How many more there are.
fn more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" (and so with {others} more)") }
}

/// The outcome of several steps that are all taken, whatever becomes of each: the first failure.
#[derive(Debug, Default)]
pub(super) struct Outcome(Option<Error>);

impl Outcome {
    /// One step more.
    pub(super) fn note(&mut self, step: Result<(), Error>) {
        self.0 = self.0.take().or_else(|| step.err());
    }

    pub(super) fn finish(self) -> Result<(), Error> {
        self.0.map_or(Ok(()), Err)
    }
}

/// Why loading or attaching failed: a privilege that is missing, else the kernel itself.
pub(super) fn from_program(error: EbpfError) -> Error {
    match refused(&error) {
        Some(source) => Error::Privileges { what: "load and attach the program", source },
        None => Error::Program { source: Box::new(error) },
    }
}

/// The refusal for lack of privilege that `error` was caused by, if it was. The verifier's own refusals have the same code
/// as some of those, but say why.
fn refused(error: &EbpfError) -> Option<io::Error> {
    let mut cause = Some(error as &dyn std::error::Error);
    while let Some(error) = cause {
        if let Some(ProgramError::LoadError { verifier_log, .. }) = error.downcast_ref()
            && !verifier_log.to_string().trim().is_empty()
        {
            return None;
        }
        let io = error.downcast_ref::<io::Error>();
        if let Some(code) =
            io.filter(|io| io.kind() == io::ErrorKind::PermissionDenied).and_then(io::Error::raw_os_error)
        {
            return Some(io::Error::from_raw_os_error(code));
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use aya_obj::VerifierLog;

    use super::*;

    fn failed_with(code: i32) -> EbpfError {
        let io_error = io::Error::from_raw_os_error(code);
        let error = MapError::CreateError { name: "KVLB_VIPS".into(), io_error };
        EbpfError::ProgramError(ProgramError::MapError(error))
    }

    #[test]
    fn of_several_failures_the_first_is_told() {
        let failure = |what| Err(Error::Full { what, wanted: 1, max: 0 });
        let mut outcome = Outcome::default();
        for step in [Ok(()), failure("first"), Ok(()), failure("second")] {
            outcome.note(step);
        }
        assert!(matches!(outcome.finish(), Err(Error::Full { what: "first", .. })));
        assert!(Outcome::default().finish().is_ok());
    }

    #[test]
    fn a_missing_privilege_is_found_however_deep_the_cause_lies() {
        let error = from_program(failed_with(nix::libc::EPERM));
        assert!(matches!(error, Error::Privileges { .. }), "{error:?}");
        assert!(error.to_string().contains("CAP_BPF"), "{error}");
        assert_eq!(error.source().unwrap().to_string(), "Operation not permitted (os error 1)");
    }

    #[test]
    fn what_the_verifier_refuses_is_no_missing_privilege_and_keeps_its_log() {
        let refused = |log: &str| {
            let (io_error, verifier_log) =
                (io::Error::from_raw_os_error(nix::libc::EACCES), VerifierLog::new(log.to_owned()));
            from_program(EbpfError::ProgramError(ProgramError::LoadError { io_error, verifier_log }))
        };
        let error = refused("attempt to corrupt spilled pointer on stack");
        assert!(matches!(error, Error::Program { .. }), "{error:?}");
        assert!(error.source().unwrap().source().unwrap().to_string().contains("spilled pointer"), "{error:?}");
        assert!(matches!(refused(""), Error::Privileges { .. }));
    }

    #[test]
    fn any_other_failure_is_the_kernels_and_keeps_its_words() {
        let error = from_program(failed_with(nix::libc::EINVAL));
        assert!(matches!(error, Error::Program { .. }), "{error:?}");
        assert!(error.to_string().contains("5.9"), "{error}");
    }
}
