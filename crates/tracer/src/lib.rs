//! QEMU TCG plugin: records every page that a guest touches; the ground truth of the lab
