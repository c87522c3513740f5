//! The version that each program tells, as `0.1.0 (210597913678)`.
//!
//! The build script finds the commit. It depends on the sources alone, so two builds of one commit
//! tell the same. Without a commit (a debug build, or sources from neither git nor `git archive`)
//! the version is the number alone.

/// The version, with the commit where it is known.
pub const VERSION: &str = env!("OVERBOOK_VERSION");

#[cfg(test)]
mod commit;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_begins_with_the_packages_number() {
        let rest = VERSION.strip_prefix(env!("CARGO_PKG_VERSION")).unwrap();
        assert!(rest.is_empty() || rest.starts_with(" (") && rest.ends_with(')'), "{VERSION}");
    }
}
