//! The kernel's asynchronous input (`io_submit`), which the C library does not wrap.

use std::io;
use std::os::fd::RawFd;

/// `IOCB_CMD_PREAD`
const READ: u16 = 0;

/// A queue of reads that the kernel processes.
#[derive(Debug)]
pub(crate) struct Queue {
    context: libc::c_ulong,
}

/// One read: `bytes` bytes of the file, from `offset` to `start`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Read {
    /// The destination.
    pub(crate) start: *mut u8,
    /// The number of bytes.
    pub(crate) bytes: usize,
    /// The offset in the file.
    pub(crate) offset: i64,
}

/// `struct io_event`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct AioEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

impl Queue {
    /// A queue for up to `depth` reads at a time.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn new(depth: usize) -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word, the context's name.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        checked(result)?;
        Ok(Self { context })
    }

    /// Starts all reads together, and waits until each has completed.
    ///
    /// # Safety
    /// The destinations are mapped, and no other code uses them in the meantime.
    ///
    /// # Errors
    /// When a read fails or is short.
    pub(crate) unsafe fn read_all(&mut self, file: RawFd, reads: &[Read]) -> io::Result<()> {
        let fd = file.cast_unsigned();
        let mut orders: Vec<libc::iocb> = reads
            .iter()
            .map(|read| {
                // SAFETY: plain numbers, for which zero is a valid value.
                let mut order: libc::iocb = unsafe { std::mem::zeroed() };
                order.aio_lio_opcode = READ;
                order.aio_fildes = fd;
                order.aio_buf = read.start.expose_provenance() as u64;
                order.aio_nbytes = read.bytes as u64;
                order.aio_offset = read.offset;
                order.aio_data = read.bytes as u64;
                order
            })
            .collect();
        let mut pointers: Vec<*mut libc::iocb> =
            orders.iter_mut().map(std::ptr::from_mut).collect();
        let mut submitted = 0;
        while submitted < pointers.len() {
            let rest = &mut pointers[submitted..];
            // SAFETY: the control blocks live until their reads have completed; the caller
            // guarantees the destinations.
            let result = unsafe {
                let (count, list) = (rest.len(), rest.as_mut_ptr());
                libc::syscall(libc::SYS_io_submit, self.context, count, list)
            };
            match checked(result) {
                Ok(count) => submitted += count,
                Err(error) if submitted == 0 => return Err(error),
                // Submitted reads must complete before the caller may continue.
                Err(_) => break,
            }
        }
        let is_short = submitted < reads.len();
        self.wait(submitted)?;
        if is_short {
            Err(io::Error::other("the kernel took only part of a batch"))
        } else {
            Ok(())
        }
    }

    fn wait(&self, mut left: usize) -> io::Result<()> {
        let mut result = Ok(());
        while left > 0 {
            let mut events = [AioEvent::default(); 8];
            let (most, list) = (left.min(events.len()), events.as_mut_ptr());
            let none = std::ptr::null_mut::<libc::timespec>();
            // SAFETY: the kernel writes at most `most` events.
            let came = unsafe {
                libc::syscall(libc::SYS_io_getevents, self.context, 1_usize, most, list, none)
            };
            let came = match checked(came) {
                Ok(came) => came,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(error),
            };
            for event in &events[..came] {
                if u64::try_from(event.result) != Ok(event.data) {
                    let short = format!("{} of {} bytes came", event.result, event.data);
                    result = Err(io::Error::other(short));
                }
            }
            left -= came;
        }
        result
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: no read is in flight any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn checked(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
