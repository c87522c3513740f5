//! Writes an initramfs: the "newc" cpio format that the kernel unpacks.
//!
//! Each entry is a header of thirteen hexadecimal numbers, the name and the content, both padded
//! to four bytes. An entry named `TRAILER!!!` ends the archive (Linux,
//! `driver-api/early-userspace/buffer-format`).

use std::collections::BTreeSet;

/// An initramfs under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    parents: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl Archive {
    /// Adds a file, and before it those of its parent directories that are missing.
    pub fn file_with_parents(&mut self, name: &str, content: &[u8]) {
        let parents = name.match_indices('/').map(|(end, _)| &name[..end]);
        for parent in parents.filter(|parent| !parent.is_empty()) {
            if self.parents.insert(parent.to_owned()) {
                self.directory(parent);
            }
        }
        self.file(name, content);
    }

    /// Adds a directory; its parents must have been added before.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, (0, 0), &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, EXECUTABLE, (0, 0), content);
    }

    /// Adds a character device.
    pub fn device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// The archive's bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let (content_size, name_size) = (size(content.len()), size(name.len() + 1));
        let (uid, gid, links, mtime, dev, check) = (0, 0, 1, 0, (0, 0), 0);
        let numbers = [
            self.entries,
            mode,
            uid,
            gid,
            links,
            mtime,
            content_size,
            dev.0,
            dev.1,
            device.0,
            device.1,
            name_size,
            check,
        ];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_name_and_content_are_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.file("ab", b"12345");
        let bytes = archive.finish();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[54..62], b"00000005", "file size");
        // 110 bytes of header and 3 of name, padded to 116; then 5 of content, padded to 8.
        assert_eq!(&bytes[110..130], b"ab\0\0\0\x0012345\0\0\x00070701");
    }

    #[test]
    fn parents_come_once_and_before_their_files() {
        let mut archive = Archive::default();
        archive.file_with_parents("one/two/a", b"");
        archive.file_with_parents("one/b", b"");
        let text = String::from_utf8(archive.finish()).unwrap();
        let names = text.split("070701").skip(1).map(|entry| entry[104..].trim_matches('\0'));
        assert_eq!(
            names.collect::<Vec<_>>(),
            ["one", "one/two", "one/two/a", "one/b", "TRAILER!!!"]
        );
    }
}
