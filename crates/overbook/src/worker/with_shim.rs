//! Which processes have the shim: those whose abstract address stands in `/proc/net/unix`. Asking
//! the shim would disturb it, and a QEMU without one has nobody to ask.

/// The processes whose shims listen.
#[must_use]
pub fn with_shim() -> Vec<u32> {
    // Without the file no shim can be reached either.
    in_table(&std::fs::read_to_string("/proc/net/unix").unwrap_or_default()).collect()
}

/// The same by the kernel's table of unix sockets.
fn in_table(table: &str) -> impl Iterator<Item = u32> + '_ {
    let addresses = table.lines().filter_map(|line| line.split('@').nth(1));
    let pids = addresses.filter_map(|name| name.rsplit('.').next()?.parse().ok().zip(Some(name)));
    pids.filter(|(pid, name)| protocol::address(*pid) == *name).map(|(pid, _)| pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shims_are_found_by_their_addresses_and_nothing_else_is() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39441 @overbook-shim.4711\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 39442 /run/overbook-shim.4712\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 39443\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39444 @overbook-shim.x\n\
            0000000000000000: 00000002 00000000 00010000 0005 01 39445 @overbook-shim.047\n";
        assert_eq!(in_table(table).collect::<Vec<_>>(), [4711]);
    }
}
