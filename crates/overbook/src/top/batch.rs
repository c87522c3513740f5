//! Pages as text, one a second, for a pipe or a file.

use std::{path::Path, thread};

use super::{
    draw,
    state::ScreenState,
    watch::{PAUSE, Page, PollerEvent},
};
use crate::cli::{CliError, output::Output, screen};
use api::{client::ApiClient, verdict::HostVerdict};

/// Writes `count` pages, or pages until the reader closes the pipe.
pub(super) fn run(socket: &Path, count: Option<u64>) -> Result<(), CliError> {
    let client = ApiClient::new(socket)?;
    let mut answer = Ok(super::watch::ask(&client, None)?);
    let mut written = 0;
    loop {
        let text = match answer {
            Ok(page) => text(page, screen::width()),
            // The daemon may be restarting.
            Err(error) => HostVerdict::of_failure(&error).text + "\n",
        };
        written += 1;
        let begin = if written == 1 { "" } else { "\n" };
        let is_read = Output::text(&format!("{begin}{text}")).write()?;
        if !is_read || count == Some(written) {
            return Ok(());
        }
        thread::sleep(PAUSE);
        answer = super::watch::ask(&client, None);
    }
}

/// A page in words. With a `width` no line is longer.
fn text(page: Page, width: Option<usize>) -> String {
    let mut state = ScreenState::default();
    state.learn(PollerEvent::Page(Box::new(page)));
    draw::lines(&state, width)
        .iter()
        .map(|line| format!("{}\n", line.to_string().trim_end()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::draw::tests::page;

    #[test]
    fn a_page_is_text_of_any_length_and_of_the_given_width() {
        let mut page = page();
        let vm = page.vms[0].clone();
        let named = |n: u32| api::wire::VmStatus { name: format!("web-{n}"), ..vm.clone() };
        page.vms = (0..100).map(named).collect();
        let whole = text(page.clone(), None);
        assert!(whole.starts_with("WARNING: "), "{whole}");
        assert_eq!(whole.lines().filter(|line| line.starts_with("web-")).count(), 100);
        let narrow = text(page, Some(40));
        assert!(narrow.lines().all(|line| line.chars().count() <= 40), "{narrow}");
        assert_eq!(whole.lines().count(), narrow.lines().count());
    }
}
