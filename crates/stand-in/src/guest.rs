//! The program that a vCPU runs, and its input: a list of pages, each with its expected content.
//!
//! A few lines of machine code do what [`Content`] does. They compare each word with the value
//! derived from the page's id, make one small change, or write all words anew. At the first wrong
//! word the guest copies the page for the host, and stops. It stores its position in the
//! [`Mailbox`], so that the host needs no system call except the one that runs the guest. The
//! guest exits by a store to an address without memory.
//!
//! The code is stored among this program's constants, and never runs there.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::page::{Content, PAGE, WORDS, Words};

/// Pages of a mailbox: the list, and the copy of a wrong page.
pub(crate) const MAILBOX_PAGES: usize = 2;
/// Jobs that fit in the list: one less than its lines, because the first line is the header.
pub(crate) const MOST_JOBS: usize = WORDS / LINE - 1;
/// Words per line of the list.
const LINE: usize = 8;

// The guest is started with rdi, the mailbox, and r15, the address of the exit store.
//
// Its registers: rsi the job's number, rbx the job, r8 the page, r9 its id, r10 its count, r11
// the order, ecx the word's number, rdx the expected word, r12 the word found. The mailbox is
// that of `Mailbox`, in bytes.
std::arch::global_asm!(
    // rdx = rng::mix(id ^ ecx << 54)
    ".macro overbook_word id",
    "mov rdx, rcx",
    "shl rdx, 54",
    r"xor rdx, \id",
    "movabs rax, 0x9e3779b97f4a7c15",
    "imul rdx, rax",
    "mov rax, rdx",
    "shr rax, 30",
    "xor rdx, rax",
    "movabs rax, 0xbf58476d1ce4e5b9",
    "imul rdx, rax",
    "mov rax, rdx",
    "shr rax, 27",
    "xor rdx, rax",
    "movabs rax, 0x94d049bb133111eb",
    "imul rdx, rax",
    "mov rax, rdx",
    "shr rax, 31",
    "xor rdx, rax",
    ".endm",
    // Compares word ecx with rdx; zero will do where zeros are allowed. Goes on only if it is
    // right.
    ".macro overbook_look",
    "mov r12, [r8 + rcx * 8]",
    "cmp r12, rdx",
    r"je .Loverbook_right\@",
    "mov rax, r12",
    "or rax, [rbx + 40]",
    "jnz .Loverbook_wrong",
    r".Loverbook_right\@:",
    ".endm",
    //
    ".pushsection .rodata",
    ".balign 16",
    ".globl overbook_guest_code",
    "overbook_guest_code:",
    "mov rsi, [rdi]",
    "mov qword ptr [rdi + 16], 0",
    ".Loverbook_next:",
    "cmp rsi, [rdi + 8]",
    "jae .Loverbook_leave",
    "mov rbx, rsi",
    "shl rbx, 6",
    "lea rbx, [rdi + rbx + 64]",
    "mov r8, [rbx]",
    "mov r9, [rbx + 8]",
    "mov r10, [rbx + 16]",
    "mov r11, [rbx + 24]",
    "xor ecx, ecx",
    "mov rdx, r9",
    "overbook_look",
    "inc ecx",
    "mov rdx, r10",
    "overbook_look",
    "cmp r11, 1",
    "je .Loverbook_modify",
    "inc ecx",
    ".Loverbook_compare:",
    "xor edx, edx",
    "test r9, r9",
    "jz .Loverbook_expected",
    "overbook_word r9",
    ".Loverbook_expected:",
    "overbook_look",
    "inc ecx",
    "cmp ecx, 512",
    "jb .Loverbook_compare",
    "cmp r11, 2",
    "jne .Loverbook_done",
    // Writes all of the page anew.
    "mov r9, [rbx + 32]",
    "mov [r8], r9",
    "mov qword ptr [r8 + 8], 0",
    "mov ecx, 2",
    ".Loverbook_fill:",
    "overbook_word r9",
    "mov [r8 + rcx * 8], rdx",
    "inc ecx",
    "cmp ecx, 512",
    "jb .Loverbook_fill",
    "jmp .Loverbook_done",
    ".Loverbook_modify:",
    "inc r10",
    "mov [r8 + 8], r10",
    ".Loverbook_done:",
    "inc rsi",
    "jmp .Loverbook_next",
    ".Loverbook_wrong:",
    "mov qword ptr [rdi + 16], 1",
    "mov [rdi + 24], rcx",
    "mov [rdi + 32], r12",
    "xor ecx, ecx",
    ".Loverbook_copy:",
    "mov rax, [r8 + rcx * 8]",
    "mov [rdi + rcx * 8 + 4096], rax",
    "inc ecx",
    "cmp ecx, 512",
    "jb .Loverbook_copy",
    ".Loverbook_leave:",
    "mov [rdi], rsi",
    "mov [r15], eax",
    "jmp overbook_guest_code",
    ".globl overbook_guest_code_end",
    "overbook_guest_code_end:",
    ".popsection",
);

/// The guest's code, which is position-independent.
pub(crate) fn code() -> &'static [u8] {
    unsafe extern "C" {
        static overbook_guest_code: u8;
        static overbook_guest_code_end: u8;
    }
    let (start, end) = (&raw const overbook_guest_code, &raw const overbook_guest_code_end);
    // SAFETY: both symbols enclose the code above, which is never written to.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// The operation on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestOrder {
    /// Compares the whole page.
    Check,
    /// Compares id and count, and increments the count.
    Modify,
    /// Compares the whole page, then writes this content.
    Rewrite(Content),
}

impl GuestOrder {
    /// The content of the page after the operation.
    pub(crate) fn outcome(self, content: Content) -> Content {
        match self {
            Self::Check => content,
            Self::Modify => Content { count: content.count + 1, ..content },
            Self::Rewrite(content) => content,
        }
    }
}

/// A page in the guest, and the operation on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// The page's address in the guest.
    pub(crate) address: u64,
    /// The expected content.
    pub(crate) content: Content,
    /// The operation. A page that may have become zeros is not modified.
    pub(crate) order: GuestOrder,
}

/// A word with a wrong value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Its number in the page.
    pub(crate) index: usize,
    /// The value found.
    pub(crate) found: u64,
}

/// The memory through which host and guest communicate.
#[derive(Debug)]
pub(crate) struct Mailbox<'a> {
    list: &'a Words,
    copy: &'a Words,
}

impl<'a> Mailbox<'a> {
    /// A mailbox in these pages.
    pub(crate) fn new([list, copy]: [&'a Words; MAILBOX_PAGES]) -> Self {
        Self { list, copy }
    }

    /// Puts a job on the list.
    pub(crate) fn put(&self, number: usize, job: &Job) {
        let Job { address, content, order } = *job;
        let (order, fresh) = match order {
            GuestOrder::Check => (0, 0),
            GuestOrder::Modify => (1, 0),
            GuestOrder::Rewrite(fresh) => (2, fresh.id),
        };
        let is_strict = u64::from(!content.is_freed);
        let words = [address, content.id, content.count, order, fresh, is_strict];
        for (word, value) in self.list[(number + 1) * LINE..].iter().zip(words) {
            word.store(value, Relaxed);
        }
    }

    /// Requests the jobs with these numbers.
    pub(crate) fn ask(&self, jobs: std::ops::Range<usize>) {
        self.list[0].store(jobs.start as u64, Relaxed);
        self.list[1].store(jobs.end as u64, Relaxed);
    }

    /// The number of the job at which the guest has stopped, and the wrong word of that job's
    /// page, if there is one.
    pub(crate) fn answer(&self) -> (usize, Option<Wrong>) {
        let number = |word: &AtomicU64| usize::try_from(word.load(Relaxed)).unwrap_or(usize::MAX);
        let is_wrong = self.list[2].load(Relaxed) != 0;
        let wrong = Wrong { index: number(&self.list[3]), found: self.list[4].load(Relaxed) };
        (number(&self.list[0]), is_wrong.then_some(wrong))
    }

    /// The wrong page, as the guest read it a second time.
    pub(crate) fn copy(&self) -> &Words {
        self.copy
    }
}

const _: () = assert!(PAGE == 4096 && WORDS == 512 && LINE * size_of::<u64>() == 1 << 6);
