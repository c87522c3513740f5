//! Reads the files of a Debian package: an `ar` archive with a compressed `tar` archive in it.
//!
//! Names in it are read only to report files that are left out; nothing is written.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::Path,
};

use super::{
    OfflineError, Stream,
    cut::{Cutter, fill},
    limit::{Left, count},
    printable,
    sources::spare,
    unpack::{Compression, Streams, Unpacked, unpack},
};

const AR_MAGIC_LEN: usize = 8;
const AR_HEADER_LEN: usize = 60;
/// Block size of `tar`.
const BLOCK: u64 = 512;

/// Cuts all files of the package.
pub(super) fn cut(cutter: &mut Cutter<'_>, path: &Path) -> Result<(), OfflineError> {
    let left = Left::new(path);
    let fail = |error| left.unreadable(path, error);
    let file = BufReader::new(File::open(path).map_err(fail)?);
    let mut archive = tar::Archive::new(data(file).map_err(fail)?);
    let (mut seen, mut end) = (0, 0);
    // Raw: a long name is an entry of its own, and is skipped at any length.
    for entry in archive.entries().map_err(fail)?.raw(true) {
        let entry = entry.map_err(fail)?;
        count(&mut seen, path)?;
        if cutter.shared.has_failed() {
            return Ok(());
        }
        end = entry
            .raw_file_position()
            .saturating_add(entry.size())
            .div_ceil(BLOCK)
            .saturating_mul(BLOCK);
        if entry.header().entry_type().is_file() && entry.size() > 0 {
            let name = path.join(String::from_utf8_lossy(&entry.path_bytes()).as_ref());
            let done = cutter.cut(&name, &mut Stream(entry), &left);
            spare(cutter, &name, done)?;
        }
    }
    read_to_end(archive.into_inner(), end).map_err(fail)
}

/// Reads to the end. After the last file, which ends at `end`, the archive has a block of zeros
/// and nothing else.
fn read_to_end(mut archive: Unpacked, end: u64) -> io::Result<()> {
    if archive.read_so_far() < end.saturating_add(BLOCK) {
        return Err(io::Error::other("its archive of files is cut off behind a file"));
    }
    let mut buffer = vec![0; 64 << 10];
    loop {
        match fill(&mut archive, &mut buffer)? {
            0 => return Ok(()),
            has if buffer[..has].iter().all(|byte| *byte == 0) => {}
            _ => {
                let what = "its archive of files is followed by something else";
                return Err(io::Error::other(what));
            }
        }
    }
}

/// The archive of files in the package, decompressed while it is read. A package has only one:
/// several would be parts, and the first part alone is incomplete.
fn data(mut file: impl Read + Seek + 'static) -> io::Result<Unpacked> {
    let len = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut [0; AR_MAGIC_LEN])?;
    let mut found = None;
    let mut place = AR_MAGIC_LEN as u64;
    while place < len {
        let mut header = [0; AR_HEADER_LEN];
        file.seek(SeekFrom::Start(place))?;
        file.read_exact(&mut header)?;
        let text = |from: usize, to: usize| str::from_utf8(&header[from..to]).map(str::trim_end);
        let (Ok(name), Ok(size)) = (text(0, 16), text(48, 58)) else { return Err(no_archive()) };
        let Ok(size) = size.parse::<u64>() else { return Err(no_archive()) };
        let start = place + AR_HEADER_LEN as u64;
        let end = start.checked_add(size).filter(|end| *end <= len);
        let end = end.ok_or_else(|| io::Error::other("the package is cut off"))?;
        if let Some(ending) = name.trim_end_matches('/').strip_prefix("data.tar") {
            let how = compression(ending)?;
            if found.replace((start, size, how)).is_some() {
                return Err(io::Error::other("it has several archives of files; valid: one"));
            }
        }
        place = end.checked_next_multiple_of(2).ok_or_else(no_archive)?;
    }
    let (start, size, how) = found.ok_or_else(no_archive)?;
    file.seek(SeekFrom::Start(start))?;
    unpack(how, Streams::All, file.take(size))
}

fn compression(ending: &str) -> io::Result<Compression> {
    match ending {
        "" => Ok(Compression::None),
        ".gz" => Ok(Compression::Gzip),
        ".xz" => Ok(Compression::Xz),
        ".zst" => Ok(Compression::Zstd),
        other => {
            let what = "is not supported yet; valid: .gz, .xz, .zst and none";
            Err(io::Error::other(format!("data.tar with {} {what}", printable(other))))
        }
    }
}

fn no_archive() -> io::Error {
    io::Error::other("the package's archive is damaged")
}
