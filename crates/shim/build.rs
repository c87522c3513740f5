//! Lays the preloaded library out by `link.ld`: without a TLS segment.

fn main() {
    let script = std::env::current_dir().map(|dir| dir.join("link.ld"));
    let script = script.expect("cargo runs this in the package's directory");
    // By its whole path: that of a checkout that was moved is there no more.
    println!("cargo::rerun-if-changed={}", script.display());
    // Of the linkers that gcc knows, GNU ld leaves such a segment out when it is told to.
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}", script.display());
}
