//! Numbers that no process can guess.

/// Returns a word from the kernel's random numbers.
#[must_use]
pub fn word() -> u32 {
    let mut bytes = [0; 4];
    loop {
        // SAFETY: the kernel writes at most the given number of bytes.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        // Four bytes come at once, unless a signal arrives before the kernel has random numbers.
        if got == 4 {
            return u32::from_ne_bytes(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn words_differ() {
        let words: std::collections::BTreeSet<u32> = (0..16).map(|_| super::word()).collect();
        assert!(words.len() > 8, "{words:?}");
    }
}
