//! The table of services, fleets and inventories that edges write and read; every lock and atomic lives here.

pub mod index;
pub mod kv;
