//! The files of a Debian package: an `ar` archive, in it a compressed `tar` archive.
//!
//! Names inside are read only to tell of a file that is left out; nothing is written anywhere.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use super::{
    OfflineError,
    cut::{Cutter, Stream},
    limit::{Left, count},
    printable,
    sources::spare,
    unpack::{Compression, Unpacked, unpack},
};

const AR_MAGIC_LEN: usize = 8;
const AR_HEADER_LEN: usize = 60;

/// Cuts all files of the package.
pub(super) fn cut(cutter: &mut Cutter<'_>, path: &Path) -> Result<(), OfflineError> {
    let left = Left::new(path);
    let fail = |error| left.unreadable(path, error);
    let file = BufReader::new(File::open(path).map_err(fail)?);
    let mut archive = tar::Archive::new(data(file).map_err(fail)?);
    let mut seen = 0;
    // Raw: long names come as entries of their own, which are passed over, of whatever length.
    for entry in archive.entries().map_err(fail)?.raw(true) {
        let entry = entry.map_err(fail)?;
        count(&mut seen, path)?;
        if cutter.shared.has_failed() {
            break;
        }
        if entry.header().entry_type().is_file() && entry.size() > 0 {
            let name = path.join(String::from_utf8_lossy(&entry.path_bytes()).as_ref());
            let done = cutter.cut(&name, &mut Stream(entry), &left);
            spare(cutter, &name, done)?;
        }
    }
    Ok(())
}

/// The archive of files in the package, unpacked as it is read.
fn data(mut file: impl Read + 'static) -> io::Result<Unpacked> {
    file.read_exact(&mut [0; AR_MAGIC_LEN])?;
    loop {
        let mut header = [0; AR_HEADER_LEN];
        file.read_exact(&mut header)?;
        let text = |from: usize, to: usize| str::from_utf8(&header[from..to]).map(str::trim_end);
        let (Ok(name), Ok(size)) = (text(0, 16), text(48, 58)) else { return Err(no_archive()) };
        let Ok(size) = size.parse::<u64>() else { return Err(no_archive()) };
        if let Some(ending) = name.trim_end_matches('/').strip_prefix("data.tar") {
            let packed = file.take(size);
            let how = match ending {
                "" => Compression::None,
                ".gz" => Compression::Gzip,
                ".xz" => Compression::Xz,
                ".zst" => Compression::Zstd,
                other => {
                    let what = "is not supported yet; valid: .gz, .xz, .zst and none";
                    let other = printable(other);
                    return Err(io::Error::other(format!("data.tar with {other} {what}")));
                }
            };
            return unpack(how, packed);
        }
        let padded = size.checked_next_multiple_of(2).ok_or_else(no_archive)?;
        if io::copy(&mut (&mut file).take(padded), &mut io::sink())? < padded {
            return Err(io::Error::other("the package ends before its files"));
        }
    }
}

fn no_archive() -> io::Error {
    io::Error::other("the package's archive is damaged")
}
