//! Links the preloaded library with the script `link.ld`, which leaves out the TLS segment.

fn main() {
    let script = std::env::current_dir().map(|dir| dir.join("link.ld"));
    let script = script.expect("cargo runs this in the package's directory");
    // The whole path: cargo would not find a relative one after the checkout has moved.
    println!("cargo::rerun-if-changed={}", script.display());
    // Of the linkers that gcc knows, GNU ld can leave out a segment.
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=bfd");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-T,{}", script.display());
}
