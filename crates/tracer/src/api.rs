//! The functions of QEMU's plugin API that the tracer uses, as `include/qemu/qemu-plugin.h` of
//! QEMU 9.1 to 10.x declares them (no Debian package contains that header). QEMU itself provides
//! them when it loads the plugin.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// The version of the API that this file describes.
pub(crate) const VERSION: c_int = 3;

/// QEMU's number for a plugin.
pub(crate) type PluginId = u64;
/// Describes one memory access to the functions below.
pub(crate) type MemInfo = u32;

/// A translation block.
#[repr(C)]
pub(crate) struct TracedBlock([u8; 0]);
/// An instruction of a translation block.
#[repr(C)]
pub(crate) struct Instruction([u8; 0]);
/// The physical address of an access.
#[repr(C)]
pub(crate) struct HwAddr([u8; 0]);
/// QEMU's description of itself. Only its beginning is declared; the rest is not read.
#[repr(C)]
pub(crate) struct Info {
    pub(crate) target_name: *const c_char,
    pub(crate) oldest_version: c_int,
    pub(crate) version: c_int,
    pub(crate) system_emulation: bool,
}

/// `QEMU_PLUGIN_CB_NO_REGS`: the callback reads no register of the guest.
pub(crate) const NO_REGS: c_int = 0;
/// `QEMU_PLUGIN_MEM_RW`.
pub(crate) const READS_AND_WRITES: c_int = 3;

/// Called for each vCPU that starts.
pub(crate) type VcpuCallback = extern "C" fn(PluginId, c_uint);
/// Called for each block that is translated.
pub(crate) type TranslateCallback = extern "C" fn(PluginId, *mut TracedBlock);
/// Called after an access to memory.
pub(crate) type MemoryCallback = extern "C" fn(c_uint, MemInfo, u64, *mut c_void);
/// Called when QEMU exits.
pub(crate) type ExitCallback = extern "C" fn(PluginId, *mut c_void);

// SAFETY: the signatures are those of the header; enumerations are C's `int`.
unsafe extern "C" {
    pub(crate) fn qemu_plugin_register_vcpu_init_cb(id: PluginId, callback: VcpuCallback);
    pub(crate) fn qemu_plugin_register_vcpu_tb_trans_cb(id: PluginId, callback: TranslateCallback);
    pub(crate) fn qemu_plugin_register_atexit_cb(
        id: PluginId,
        callback: ExitCallback,
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut Instruction,
        callback: MemoryCallback,
        flags: c_int,
        accesses: c_int,
        data: *mut c_void,
    );
    pub(crate) fn qemu_plugin_tb_n_insns(block: *const TracedBlock) -> usize;
    pub(crate) fn qemu_plugin_tb_get_insn(
        block: *const TracedBlock,
        index: usize,
    ) -> *mut Instruction;
    pub(crate) fn qemu_plugin_insn_haddr(instruction: *const Instruction) -> *mut c_void;
    pub(crate) fn qemu_plugin_mem_size_shift(info: MemInfo) -> c_uint;
    pub(crate) fn qemu_plugin_get_hwaddr(info: MemInfo, address: u64) -> *mut HwAddr;
    pub(crate) fn qemu_plugin_hwaddr_is_io(address: *const HwAddr) -> bool;
    pub(crate) fn qemu_plugin_hwaddr_phys_addr(address: *const HwAddr) -> u64;
}
