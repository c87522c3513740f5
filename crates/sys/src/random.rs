//! Numbers that no process can guess.

/// A word of the kernel's random numbers.
#[must_use]
pub fn word() -> u32 {
    let mut bytes = [0; 4];
    loop {
        // SAFETY: the kernel writes at most as many bytes as there are.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        // So few bytes come at once, or a signal came before the kernel had any.
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
