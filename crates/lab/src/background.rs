//! A thread that works until it is stopped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

/// The order to such a thread to end.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    pub fn is_given(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Such a thread; dropping it ends it, too.
#[derive(Debug)]
pub struct Background<T> {
    stop: Stop,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts one. Its work returns soon after the order.
    pub fn start(name: &str, work: impl FnOnce(&Stop) -> T + Send + 'static) -> io::Result<Self> {
        let stop = Stop::default();
        let its = stop.clone();
        let thread = Builder::new().name(name.to_owned()).spawn(move || work(&its))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl<T> Background<T> {
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends it, and returns the result of its work; `None`: it panicked.
    pub fn stop(mut self) -> Option<T> {
        self.end()
    }

    fn end(&mut self) -> Option<T> {
        self.stop.0.store(true, Ordering::Relaxed);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        thread.join().ok()
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        self.end();
    }
}
