//! Connections to libvirt.
//!
//! The `virt` crate does not close a connection that is dropped, and libvirtd has a limit on its
//! clients. A call on a connection to a stopped libvirtd returns only when the connection is
//! closed, so the library asks for a sign of life now and then.

use std::ops::Deref;

use virt::connect::Connect;
use virt::error::Error;

/// The library asks libvirtd for a sign of life after this number of silent seconds.
const SILENT_S: i32 = 5;
/// The library closes the connection after this number of unanswered questions.
const MOST_UNANSWERED: u32 = 3;

/// An open connection, which is closed when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(Connect);

impl OpenConnection {
    /// Opens a connection.
    ///
    /// # Errors
    /// libvirt's.
    pub(crate) fn open(uri: &str) -> Result<Self, Error> {
        let connect = Connect::open(Some(uri))?;
        // A driver within this process has no such questions, and needs none.
        let _ = connect.set_keep_alive(SILENT_S, MOST_UNANSWERED);
        Ok(Self(connect))
    }
}

impl Deref for OpenConnection {
    type Target = Connect;

    fn deref(&self) -> &Connect {
        &self.0
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        // A connection that has failed is closed all the same.
        let _ = self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_connection_is_closed() {
        virt::error::clear_error_callback();
        let connection = OpenConnection::open("test:///default").unwrap();
        let mut other = (*connection).clone();
        drop(connection);
        // libvirt returns the number of references that are left.
        assert_eq!(other.close().unwrap(), 0);
    }
}
