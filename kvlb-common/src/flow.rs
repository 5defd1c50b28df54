//! The four-tuple of a new connection, and which listener it falls to.

/// A new connection to a local address, in words that a program can read from its context without a branch.
///
/// Words are in whatever order the context has them: they are mixed, never compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The client's address.
    pub remote_addr: [u32; 4],
    /// The address it connects to.
    pub local_addr: [u32; 4],
    /// The client's port.
    pub remote_port: u16,
    /// The port it connects to.
    pub local_port: u16,
}

impl Flow {
    /// Which of `workers` listeners takes this connection: `0 .. workers`, 0 for none.
    ///
    /// Connections of one client differ in their port only, and Linux hands out even ones first; so every bit of the
    /// tuple has to reach the top bits, which choose.
    #[inline(always)]
    pub const fn worker(&self, workers: u32) -> u32 {
        ((self.hash() as u64 * workers as u64) >> 32) as u32
    }

    #[inline(always)]
    const fn hash(&self) -> u32 {
        let [r0, r1, r2, r3] = self.remote_addr;
        let [l0, l1, l2, l3] = self.local_addr;
        let ports = (self.remote_port as u32) << 16 | self.local_port as u32;
        let mut hash = mix(ports, r3);
        hash = mix(hash, r2);
        hash = mix(hash, r1);
        hash = mix(hash, r0);
        hash = mix(hash, l3);
        hash = mix(hash, l2);
        hash = mix(hash, l1);
        hash = mix(hash, l0);
        avalanche(hash)
    }
}

/// One step of a multiplicative hash; the factor is 2³² divided by the golden ratio (Knuth, TAOCP 3, §6.4).
#[inline(always)]
const fn mix(hash: u32, word: u32) -> u32 {
    let hash = (hash ^ word).wrapping_mul(0x9e37_79b1);
    hash ^ hash >> 15
}

/// The finaliser of `MurmurHash3` for 32 bits: each input bit flips each output bit with probability near one half.
#[inline(always)]
const fn avalanche(mut hash: u32) -> u32 {
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: [u32; 4] = [0, 0, 0xffff_0000, u32::from_le_bytes([10, 98, 0, 1])];

    fn flow(client: u32, port: u16) -> Flow {
        Flow {
            remote_addr: [0, 0, 0xffff_0000, u32::from_le_bytes([10, 77, 1, 2]) + (client << 24)],
            local_addr: LOCAL,
            remote_port: port,
            local_port: 8080,
        }
    }

    /// Pearson's statistic against the even spread.
    fn chi_square(flows: impl Iterator<Item = Flow>, workers: u32) -> f64 {
        let mut counts = [0u32; 64];
        let mut total = 0;
        for flow in flows {
            counts[flow.worker(workers) as usize] += 1;
            total += 1;
        }
        let expected = f64::from(total) / f64::from(workers);
        let of = |count: &u32| (f64::from(*count) - expected).powi(2) / expected;
        counts[..workers as usize].iter().map(of).sum()
    }

    /// The value that chi-square exceeds with probability 0.001 (Wilson and Hilferty's approximation).
    fn critical(workers: u32) -> f64 {
        let freedom = f64::from(workers - 1);
        let part = 2.0 / (9.0 * freedom);
        freedom * (1.0 - part + 3.0902 * part.sqrt()).powi(3)
    }

    #[test]
    fn connections_of_one_client_spread_evenly_over_any_number_of_workers() {
        for workers in [2, 3, 4, 7, 8, 16, 64] {
            let even_ports = (0..10_000u16).map(|i| flow(0, 32768 + 2 * (i % 14_000)));
            let chi = chi_square(even_ports, workers);
            assert!(chi < critical(workers), "{workers} workers: {chi}");
        }
    }

    #[test]
    fn clients_with_one_connection_each_spread_evenly() {
        for workers in [2, 3, 4, 8] {
            let chi = chi_square((0..200).map(|client| flow(client, 40_000)), workers);
            assert!(chi < critical(workers), "{workers} workers: {chi}");
        }
    }

    #[test]
    fn the_same_connection_always_falls_to_the_same_worker() {
        assert_eq!(flow(1, 50_000).worker(8), flow(1, 50_000).worker(8));
    }

    #[test]
    fn one_worker_or_none_is_number_0() {
        assert_eq!(flow(1, 50_000).worker(1), 0);
        assert_eq!(flow(1, 50_000).worker(0), 0);
    }
}
