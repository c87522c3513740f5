//! The page server: NBD on both sides.
//!
//! A VM's disks are exports of its group's `overbook disks` process. Each export is backed by a
//! stack of [`layer`]s. The protocol ([`nbd`]) knows nothing of sockets, and the sockets nothing
//! of layers.
//!
//! | part | what it does |
//! |---|---|
//! | [`nbd`] | the protocol: bytes in, bytes out |
//! | [`server`] | listens and negotiates |
//! | [`places`] | who may connect, and how often |
//! | [`serve`] | requests of one connection, many at a time |
//! | [`budget`] | memory that all connections of a process may hold |
//! | [`client`] | sends requests to another server |
//! | [`repository`] | memory that hosts lend each other |
//! | [`trial`] | checks a repository for errors |
//! | [`tls`] | certificates on both sides |
//! | [`layer`] | the interface of all layers |
//! | [`layers`] | one file each |
//! | [`order`] | the order of overlapping requests, above the layers |

pub mod budget;
pub mod buffer;
pub mod client;
mod dead_peers;
pub mod layer;
pub mod layers;
pub mod nbd;
pub mod order;
pub mod places;
pub mod repository;
pub mod serve;
pub mod server;
pub mod tls;
pub mod trial;
