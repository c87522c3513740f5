//! Preloaded into QEMU: finds guest RAM, revokes and restores access to its granules. Mechanism only
