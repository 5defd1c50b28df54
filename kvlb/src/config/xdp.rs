//! The devices that have admission.

use super::env::{ConfigError, Setting};
use super::{Both, Datapath, UpFlags};

/// More devices than this are a slip of the finger.
const DEVICES_MAX: usize = 64;
/// Bytes of a device's name (`IFNAMSIZ`, linux/if.h, less the byte that ends it).
const NAME_MAX: usize = 15;

/// `--xdp-dev`, each device once.
pub(super) fn devices(flags: &UpFlags, both: &Both<'_>, datapath: Datapath) -> Result<Vec<String>, ConfigError> {
    let by_variable = both.env.setting("KVLB_XDP_DEV")?;
    let mut devices = Vec::new();
    if flags.xdp_dev.is_empty() {
        for part in by_variable.iter().flat_map(|setting| setting.value.split(',')) {
            add(&mut devices, &Setting { name: "KVLB_XDP_DEV", value: part })?;
        }
    }
    for value in &flags.xdp_dev {
        add(&mut devices, &Setting { name: "--xdp-dev", value })?;
    }
    if datapath == Datapath::None && !devices.is_empty() {
        return Err(ConfigError::Both("--xdp-dev", "--datapath none"));
    }
    Ok(devices)
}

fn add(devices: &mut Vec<String>, setting: &Setting<'_>) -> Result<(), ConfigError> {
    let name = setting.value.trim();
    if name.is_empty() {
        return Ok(());
    }
    // What Linux allows (`dev_valid_name`, net/core/dev.c).
    let bad = |byte: u8| byte == b'/' || byte == b':' || byte.is_ascii_whitespace() || byte.is_ascii_control();
    if name.len() > NAME_MAX || name == "." || name == ".." || name.bytes().any(bad) {
        return Err(setting.bad(format!("the name of a network device, at most {NAME_MAX} bytes, as eth0")));
    }
    if devices.len() == DEVICES_MAX {
        return Err(setting.bad(format!("at most {DEVICES_MAX} devices")));
    }
    if !devices.iter().any(|device| device == name) {
        devices.push(name.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Env;

    fn read(flags: &[&str], variable: &str, datapath: Datapath) -> Result<Vec<String>, String> {
        let flags = UpFlags { xdp_dev: flags.iter().map(|&name| name.to_owned()).collect(), ..UpFlags::default() };
        let env = Env::of([("KVLB_XDP_DEV", variable)]);
        devices(&flags, &Both { env: &env }, datapath).map_err(|error| error.to_string())
    }

    #[test]
    fn devices_are_taken_once_each_from_the_flag_or_else_from_the_variable() {
        assert_eq!(read(&[], "", Datapath::None), Ok(vec![]));
        assert_eq!(read(&[], "eth0, eth1,,eth0", Datapath::Auto), Ok(vec!["eth0".to_owned(), "eth1".to_owned()]));
        assert_eq!(read(&["eth2", "eth2"], "eth0", Datapath::Auto), Ok(vec!["eth2".to_owned()]));
    }

    #[test]
    fn what_is_no_name_of_a_device_is_refused_and_so_are_devices_without_the_kernels_share() {
        for name in ["a-name-of-16-byte", "a/b", "a b", "..", "eth0:1"] {
            assert!(read(&[name], "", Datapath::Auto).is_err_and(|text| text.starts_with("--xdp-dev is")), "{name}");
        }
        let many = (0..65).map(|at| format!("eth{at}")).collect::<Vec<_>>().join(",");
        assert!(read(&[], &many, Datapath::Auto).is_err_and(|text| text.contains("at most 64")));
        let error = read(&["eth0"], "", Datapath::None);
        assert_eq!(error, Err("--xdp-dev and --datapath none contradict each other".to_owned()));
    }
}
