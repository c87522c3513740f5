//! Lays the preloaded library out by `link.ld`: without a TLS segment.

fn main() {
    println!("cargo::rerun-if-changed=link.ld");
    let script = std::env::current_dir().map(|dir| dir.join("link.ld"));
    let script = script.expect("cargo runs this in the package's directory");
    // Of the linkers that gcc knows, GNU ld leaves such a segment out when it is told to.
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}", script.display());
}
