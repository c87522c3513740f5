//! libvirt's C interface, where the `virt` crate has no safe one: statistics of all domains in one
//! call, and domain events.
//!
//! Events only wake the watcher ([`WAKE`]), which then asks libvirt. So an event that is lost costs
//! at most a second, and no event's content is trusted.

#![allow(unsafe_code, reason = "the boundary to libvirt's C interface")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};
use std::ptr;
use std::sync::Once;
use std::thread;

use virt::connect::Connect;
use virt::domain::JobStats;
use virt::error::Error;

use crate::wake::WAKE;

/// libvirt's statistics of one domain.
#[derive(Debug, Default)]
pub(crate) struct DomainStats {
    /// Its UUID.
    pub(crate) uuid: String,
    /// Its name.
    pub(crate) name: String,
    /// libvirt's number of the domain, which each start of it changes.
    pub(crate) number: u32,
    /// The numbers, by libvirt's names. Sizes are in KiB.
    pub(crate) fields: BTreeMap<String, u64>,
}

/// The statistics of all running domains. A domain on which another call is under way has no
/// figures from its QEMU, and nothing waits for it.
///
/// # Errors
/// libvirt's.
pub(crate) fn stats_of_all(connect: &Connect) -> Result<Vec<DomainStats>, Error> {
    let groups = virt_sys::VIR_DOMAIN_STATS_BALLOON | virt_sys::VIR_DOMAIN_STATS_STATE;
    let flags = virt_sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE
        | virt_sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT;
    let mut list: *mut virt_sys::virDomainStatsRecordPtr = ptr::null_mut();
    // SAFETY: the connection is open; libvirt stores a list at `list` unless it fails.
    let count = unsafe {
        virt_sys::virConnectGetAllDomainStats(connect.as_ptr(), groups, &raw mut list, flags)
    };
    let count = usize::try_from(count).map_err(|_| Error::last_error())?;
    // SAFETY: the list has `count` records, each valid until the list is freed below.
    let stats = (0..count).map(|index| unsafe { read(&**list.add(index)) }).collect();
    // SAFETY: the list came from the call above, and nothing of it is kept.
    unsafe { virt_sys::virDomainStatsRecordListFree(list) };
    Ok(stats)
}

/// # Safety
/// The record is one that libvirt has made and not freed.
unsafe fn read(record: &virt_sys::virDomainStatsRecord) -> DomainStats {
    let mut uuid = [0; virt_sys::VIR_UUID_STRING_BUFLEN as usize];
    // SAFETY: the record's domain is valid, and the buffer has the length that libvirt asks for.
    // Both texts end with a zero byte, which the buffer has in any case.
    let (uuid, name, number) = unsafe {
        virt_sys::virDomainGetUUIDString(record.dom, uuid.as_mut_ptr());
        let name = text(virt_sys::virDomainGetName(record.dom));
        (text(uuid.as_ptr()), name, virt_sys::virDomainGetID(record.dom))
    };
    let count = usize::try_from(record.nparams).unwrap_or(0);
    let mut fields = BTreeMap::new();
    for index in 0..count {
        // SAFETY: the record has `count` parameters, whose names end with a zero byte. A value is
        // read by the type that its parameter names.
        let (name, value) = unsafe {
            let field = &*record.params.add(index);
            let value = match virt_sys::virTypedParameterType::try_from(field.type_) {
                Ok(virt_sys::VIR_TYPED_PARAM_ULLONG) => Some(field.value.ul),
                Ok(virt_sys::VIR_TYPED_PARAM_UINT) => Some(u64::from(field.value.ui)),
                Ok(virt_sys::VIR_TYPED_PARAM_INT) => u64::try_from(field.value.i).ok(),
                Ok(virt_sys::VIR_TYPED_PARAM_LLONG) => u64::try_from(field.value.l).ok(),
                _ => None,
            };
            (text(field.field.as_ptr()), value)
        };
        fields.extend(value.map(|value| (name, value)));
    }
    DomainStats { uuid, name, number, fields }
}

/// # Safety
/// The text ends with a zero byte, or the pointer is null.
unsafe fn text(of: *const c_char) -> String {
    if of.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(of) }.to_string_lossy().into_owned()
}

/// Whether a job is under way, by libvirt's answer about it.
pub(crate) fn is_job(job: &JobStats) -> bool {
    u32::try_from(job.r#type) != Ok(virt_sys::VIR_DOMAIN_JOB_NONE)
}

/// Starts libvirt's event loop on a thread of its own. To be called before the first connection
/// is opened; connections then notice by themselves that libvirtd has ended.
pub(crate) fn start_events() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: no connection is open yet.
        if unsafe { virt_sys::virEventRegisterDefaultImpl() } < 0 {
            return;
        }
        // SAFETY: the implementation is registered, and only this thread runs it.
        thread::spawn(|| while unsafe { virt_sys::virEventRunDefaultImpl() } == 0 {});
    });
}

/// Events of all domains of one connection, until it is dropped.
#[derive(Debug)]
pub(crate) struct Subscription<'a> {
    connect: &'a Connect,
    ids: Vec<c_int>,
}

impl<'a> Subscription<'a> {
    /// Wakes the watcher when a domain starts or ends, a balloon changes, or metadata does. A
    /// refused event is left out.
    pub(crate) fn new(connect: &'a Connect) -> Self {
        type Generic =
            unsafe extern "C" fn(virt_sys::virConnectPtr, virt_sys::virDomainPtr, *mut c_void);
        // SAFETY: libvirt calls each function with the arguments of its event, which it has.
        let (lifecycle, balloon, metadata) = unsafe {
            (
                std::mem::transmute::<*const (), Generic>(on_lifecycle as *const ()),
                std::mem::transmute::<*const (), Generic>(on_balloon as *const ()),
                std::mem::transmute::<*const (), Generic>(on_metadata as *const ()),
            )
        };
        let events = [
            (virt_sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE, lifecycle),
            (virt_sys::VIR_DOMAIN_EVENT_ID_BALLOON_CHANGE, balloon),
            (virt_sys::VIR_DOMAIN_EVENT_ID_METADATA_CHANGE, metadata),
        ];
        let register = |(event, call): (virt_sys::virDomainEventID, Generic)| {
            let event = c_int::try_from(event).ok()?;
            let (all, nothing) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the connection is open; the functions need no data, so none has to be freed.
            let id = unsafe {
                virt_sys::virConnectDomainEventRegisterAny(
                    connect.as_ptr(),
                    all,
                    event,
                    Some(call),
                    nothing,
                    None,
                )
            };
            (id >= 0).then_some(id)
        };
        Self { connect, ids: events.into_iter().filter_map(register).collect() }
    }
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        for id in &self.ids {
            // SAFETY: the connection is open, and the number is one that it gave out.
            unsafe { virt_sys::virConnectDomainEventDeregisterAny(self.connect.as_ptr(), *id) };
        }
    }
}

unsafe extern "C" fn on_lifecycle(
    _: virt_sys::virConnectPtr,
    _: virt_sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    _: *mut c_void,
) -> c_int {
    WAKE.wake(true);
    0
}

unsafe extern "C" fn on_balloon(
    _: virt_sys::virConnectPtr,
    _: virt_sys::virDomainPtr,
    _actual_kib: c_ulonglong,
    _: *mut c_void,
) {
    WAKE.wake(false);
}

unsafe extern "C" fn on_metadata(
    _: virt_sys::virConnectPtr,
    _: virt_sys::virDomainPtr,
    _kind: c_int,
    _namespace: *const c_char,
    _: *mut c_void,
) {
    WAKE.wake(true);
}
