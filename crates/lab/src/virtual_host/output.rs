//! The output of a script, followed by the mark and the exit code.
//!
//! **Idea.** Both come through one port, so the code arrives after all of the output. Bytes that
//! could be the beginning of the mark are held back until more bytes decide.

/// The most digits of an exit code.
const DIGITS: usize = 3;

/// Splits the output as it comes.
#[derive(Debug)]
pub(super) struct Splitter {
    mark: Vec<u8>,
    held: Vec<u8>,
}

/// New output, split.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutputPart {
    /// Output of the script.
    pub(super) output: Vec<u8>,
    /// Its exit code, at the end of the output.
    pub(super) code: Option<u8>,
}

impl Splitter {
    /// Splits an output that ends with this mark.
    pub(super) fn new(mark: &str) -> Self {
        Self { mark: mark.as_bytes().to_vec(), held: Vec::new() }
    }

    /// Adds new bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) -> OutputPart {
        self.held.extend_from_slice(bytes);
        let length = self.mark.len();
        let Some(at) = self.held.windows(length).position(|window| window == self.mark) else {
            let may_be_mark = |count: &usize| self.held.ends_with(&self.mark[..*count]);
            let kept = (1..length).rev().find(may_be_mark).unwrap_or(0);
            let output = self.held.drain(..self.held.len() - kept).collect();
            return OutputPart { output, code: None };
        };
        let output = self.held.drain(..at).collect();
        let code = &self.held[length..];
        let end = code.iter().take(DIGITS + 1).position(|byte| *byte == b'\n');
        let code = end.and_then(|end| std::str::from_utf8(&code[..end]).ok()?.parse().ok());
        OutputPart { output, code }
    }

    /// The rest of an output that has ended without a mark.
    pub(super) fn rest(self) -> Vec<u8> {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(parts: &[&str]) -> (String, Option<u8>) {
        let (mut splitter, mut output, mut code) = (Splitter::new("<mark>"), Vec::new(), None);
        for part in parts {
            let part = splitter.push(part.as_bytes());
            output.extend(part.output);
            code = code.or(part.code);
        }
        (String::from_utf8(output).unwrap(), code)
    }

    #[test]
    fn the_code_is_found_wherever_the_output_is_cut() {
        let whole = "a<ma\n<<mark>17\n";
        for cut in 0..whole.len() {
            let (left, right) = whole.split_at(cut);
            assert_eq!(pushed(&[left, right]), ("a<ma\n<".to_owned(), Some(17)), "{cut}");
        }
    }

    #[test]
    fn output_is_passed_on_as_soon_as_it_is_no_mark() {
        assert_eq!(pushed(&["progress 1\n"]), ("progress 1\n".to_owned(), None));
        let mut splitter = Splitter::new("<mark>");
        assert_eq!(splitter.push(b"end <m").output, b"end ");
        assert_eq!(splitter.rest(), b"<m");
    }
}
