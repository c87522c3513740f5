//! A fake of QEMU's plugin API for tests, and a whole run of the plugin against it. The guest's
//! virtual addresses are physical; 0xfe00_0000 is a device; the fake translates nothing by
//! itself.

#![allow(unsafe_code, reason = "stands in for C functions")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::time::Duration;

use crate::api::{
    self, ExitCallback, HwAddr, Info, Instruction, MemInfo, MemoryCallback, PluginId, TracedBlock,
    TranslateCallback, VcpuCallback,
};

const DEVICE: u64 = 0xfe00_0000;

type Registered = (Option<VcpuCallback>, Option<TranslateCallback>, Option<ExitCallback>);
static REGISTERED: Mutex<Registered> = Mutex::new((None, None, None));
static MEMORY: Mutex<Option<(MemoryCallback, usize)>> = Mutex::new(None);

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_register_vcpu_init_cb(_: PluginId, callback: VcpuCallback) {
    REGISTERED.lock().unwrap().0 = Some(callback);
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_register_vcpu_tb_trans_cb(_: PluginId, callback: TranslateCallback) {
    REGISTERED.lock().unwrap().1 = Some(callback);
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_register_atexit_cb(_: PluginId, callback: ExitCallback, _: *mut c_void) {
    REGISTERED.lock().unwrap().2 = Some(callback);
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_register_vcpu_mem_cb(
    _: *mut Instruction,
    callback: MemoryCallback,
    _: c_int,
    _: c_int,
    data: *mut c_void,
) {
    *MEMORY.lock().unwrap() = Some((callback, data.expose_provenance()));
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_tb_n_insns(_: *const TracedBlock) -> usize {
    1
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_tb_get_insn(_: *const TracedBlock, _: usize) -> *mut Instruction {
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_insn_haddr(_: *const Instruction) -> *mut c_void {
    std::ptr::null_mut()
}

/// All accesses have eight bytes.
#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_mem_size_shift(_: MemInfo) -> c_uint {
    3
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_get_hwaddr(_: MemInfo, address: u64) -> *mut HwAddr {
    std::ptr::without_provenance_mut(usize::try_from(address).unwrap())
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_hwaddr_is_io(address: *const HwAddr) -> bool {
    address.addr() as u64 >= DEVICE
}

#[unsafe(no_mangle)]
extern "C" fn qemu_plugin_hwaddr_phys_addr(address: *const HwAddr) -> u64 {
    address.addr() as u64
}

#[test]
fn accesses_of_a_run_are_in_the_trace_and_devices_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("trace");
    let words = [format!("out={}", out.display()), format!("ram={}", 16 << 20)];
    let words = words.map(|word| CString::new(word).unwrap());
    let argv: Vec<*const c_char> = words.iter().map(|word| word.as_ptr()).collect();
    let info = Info {
        target_name: c"x86_64".as_ptr(),
        oldest_version: 2,
        version: 4,
        system_emulation: true,
    };
    // SAFETY: both pointers are valid for the call.
    assert_eq!(unsafe { crate::qemu_plugin_install(1, &raw const info, 2, argv.as_ptr()) }, 0);
    let (Some(vcpu), Some(translate), Some(exit)) = *REGISTERED.lock().unwrap() else { panic!() };
    vcpu(1, 0);
    translate(1, std::ptr::null_mut());
    let (access, data) = MEMORY.lock().unwrap().unwrap();
    let data = std::ptr::with_exposed_provenance_mut(data);
    // Page 5, page 5 again, one access across pages 8 and 9, a device, beyond RAM.
    for address in [0x5010, 0x5ff8, 0x8ffc, DEVICE, 16 << 20] {
        access(0, 0, address, data);
    }
    std::thread::sleep(Duration::from_millis(20));
    exit(1, std::ptr::null_mut());
    let bytes = std::fs::read(out).unwrap();
    assert_eq!(bytes[24..32], 4096_u64.to_le_bytes());
    // Three pages: 5, three further, one further.
    assert!(bytes.ends_with(&[3, 10, 6, 2]), "{:?}", &bytes[32..]);
    assert_eq!(crate::qemu_plugin_version, api::VERSION);
}
