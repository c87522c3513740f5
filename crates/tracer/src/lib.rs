//! QEMU TCG plugin: records every page that a guest touches; the ground truth of the lab.
//!
//! **Problem.** The quality of a working-set estimate can be judged only against the truth: every
//! page that the guest touches, and when, in the same run, on the same clock.
//!
//! **Idea.** Under emulation QEMU executes each guest access itself and reports it to a plugin
//! (as Pin did for MEB's authors). Time is divided into ticks of 100 ms. A page is recorded once
//! per tick, in order of first touch. From this follow exact stack distances, miss-ratio curves
//! and working sets at any granularity of pages and ticks ([`lab`](../lab/truth/index.html)
//! computes them).
//!
//! ```text
//! qemu-system-x86_64 -plugin liboverbook_tracer.so,out=FILE,ram=BYTES -machine q35 -accel tcg …
//!
//! api       what QEMU offers       layout   addresses to page numbers   code    translated pages
//! recorder  the hot path           writer   ticks, the thread           trace   the file
//! ```
//!
//! **Scope.** The trace has the accesses that this machine makes. Every data access counts. Code
//! is read from guest RAM when it is translated (`code`); it then runs from QEMU's own buffer,
//! and its pages are idle.
//!
//! **Cost.** A call per guest access: memory-bound guests run several times slower. Two lists and
//! one array of 4 bytes per page.
//!
//! **Leaves out.** Page table walks by the (emulated) MMU, and reads and writes by devices.
//! Neither is an access of a vCPU, so the plugin does not see it. Usually the vCPU that prepares
//! or uses a device's buffer touches the buffer too.

mod api;
mod code;
mod layout;
mod options;
mod recorder;
mod trace;
mod writer;

#[cfg(test)]
mod fake_qemu;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use api::{Info, MemInfo, PluginId, TracedBlock};
use code::HostRam;
use layout::{Layout, PAGE_BYTES};
use options::Options;
use recorder::Recorder;
use writer::Stop;

/// The version of QEMU's plugin API that this plugin uses; QEMU refuses to load a plugin of an
/// unknown version.
#[allow(non_upper_case_globals, reason = "QEMU looks for this name")]
#[unsafe(no_mangle)]
static qemu_plugin_version: c_int = api::VERSION;

/// One tracer per QEMU.
static TRACER: OnceLock<Tracer> = OnceLock::new();

struct Tracer {
    layout: Layout,
    recorder: Recorder,
    host_ram: Mutex<HostRam>,
    stop: Stop,
    file: Mutex<Option<File>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// Called by QEMU after it has loaded the plugin. A result other than zero ends QEMU.
///
/// # Safety
/// To be called by QEMU: `info` and `argv` are as its plugin API says.
#[unsafe(no_mangle)]
unsafe extern "C" fn qemu_plugin_install(
    id: PluginId,
    info: *const Info,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    // SAFETY: QEMU passes a valid description for the length of this call.
    let (system, target) =
        unsafe { ((*info).system_emulation, CStr::from_ptr((*info).target_name)) };
    let count = usize::try_from(argc).unwrap_or(0);
    // SAFETY: QEMU passes `argc` strings.
    let words = (0..count).map(|i| unsafe { CStr::from_ptr(*argv.add(i)) }.to_string_lossy());
    let options = Options::parse(words, target.to_bytes() == b"x86_64" && system);
    match options.and_then(|options| Ok((File::create(&options.out)?, options))) {
        Ok((file, options)) => install(id, file, options.ram_bytes),
        Err(error) => {
            eprintln!("overbook tracer: {error}");
            1
        }
    }
}

fn install(id: PluginId, file: File, ram_bytes: u64) -> c_int {
    let layout = Layout::q35(ram_bytes);
    let tracer = Tracer {
        layout,
        recorder: Recorder::new(usize::try_from(layout.pages()).unwrap_or(usize::MAX)),
        host_ram: Mutex::new(HostRam::new(ram_bytes)),
        stop: Stop::default(),
        file: Mutex::new(Some(file)),
        writer: Mutex::new(None),
    };
    if TRACER.set(tracer).is_err() {
        eprintln!("overbook tracer: loaded twice: give -plugin once");
        return 1;
    }
    // SAFETY: the callbacks have the signatures that QEMU calls them with, and live as long as
    // QEMU.
    unsafe {
        api::qemu_plugin_register_vcpu_init_cb(id, on_vcpu);
        api::qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
        api::qemu_plugin_register_atexit_cb(id, on_exit, std::ptr::null_mut());
    }
    0
}

/// Starts the writer with the first vCPU: QEMU may fork before (`-daemonize`).
extern "C" fn on_vcpu(_id: PluginId, _vcpu: c_uint) {
    let Some(tracer) = TRACER.get() else { return };
    let file = tracer.file.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(mut file) = file else { return };
    let write = move || {
        let pages = tracer.layout.pages();
        if let Err(error) = writer::run(&tracer.recorder, &tracer.stop, &mut file, pages) {
            eprintln!("overbook tracer: cannot write the trace: {error}; it ends here");
        }
    };
    match std::thread::Builder::new().name("overbook-tracer".into()).spawn(write) {
        Ok(handle) => {
            *tracer.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
        }
        Err(error) => eprintln!("overbook tracer: cannot start its thread: {error}; no trace"),
    }
}

/// Records the pages from which a block is read, and instruments each access of its instructions.
extern "C" fn on_translation(_id: PluginId, block: *mut TracedBlock) {
    let Some(tracer) = TRACER.get() else { return };
    let mut host_ram = tracer.host_ram.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: block and instructions are valid during this call, the index is in range, and the
    // callbacks have the signatures that QEMU calls them with.
    unsafe {
        for index in 0..api::qemu_plugin_tb_n_insns(block) {
            let instruction = api::qemu_plugin_tb_get_insn(block, index);
            let access = std::ptr::from_ref(tracer).cast_mut().cast();
            api::qemu_plugin_register_vcpu_mem_cb(
                instruction,
                on_access,
                api::NO_REGS,
                api::READS_AND_WRITES,
                access,
            );
            let host = api::qemu_plugin_insn_haddr(instruction).addr() as u64;
            if let Some(page) = host_ram.page_of(host, own_maps) {
                tracer.recorder.touch(page);
            }
        }
    }
}

fn own_maps() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

/// The longest access, in bytes. An access that begins further from its page's end stays in the
/// page.
const LONGEST_ACCESS: u64 = 64;

extern "C" fn on_access(_vcpu: c_uint, info: MemInfo, address: u64, tracer: *mut c_void) {
    // SAFETY: `on_translation` passes the tracer, which lives for ever.
    let tracer = unsafe { &*tracer.cast_const().cast::<Tracer>() };
    tracer.access(info, address);
    let left_in_page = PAGE_BYTES - address % PAGE_BYTES;
    if left_in_page < LONGEST_ACCESS {
        // SAFETY: `info` is QEMU's own.
        let length = 1 << unsafe { api::qemu_plugin_mem_size_shift(info) };
        if left_in_page < length {
            tracer.access(info, address + left_in_page);
        }
    }
}

impl Tracer {
    #[inline]
    fn access(&self, info: MemInfo, address: u64) {
        // SAFETY: called on the vCPU's thread right after the access that `info` describes; the
        // returned value is used before the call returns.
        unsafe {
            let target = api::qemu_plugin_get_hwaddr(info, address);
            if target.is_null() {
                return;
            }
            let physical = api::qemu_plugin_hwaddr_phys_addr(target);
            let Some(page) = self.layout.page_of(physical) else { return };
            if self.recorder.knows(page) || api::qemu_plugin_hwaddr_is_io(target) {
                return;
            }
            self.recorder.touch(page);
        }
    }
}

/// Writes the rest of the trace.
extern "C" fn on_exit(_id: PluginId, _data: *mut c_void) {
    let Some(tracer) = TRACER.get() else { return };
    if !tracer.host_ram.lock().unwrap_or_else(PoisonError::into_inner).is_known() {
        eprintln!(
            "overbook tracer: no mapping has the size of guest RAM: translated code is missing"
        );
    }
    tracer.stop.ask();
    let writer = tracer.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(writer) = writer {
        // A panic has been reported already.
        let _ = writer.join();
    }
}
