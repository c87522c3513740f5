//! The guide's Markdown as a man page, for the elements that the guide's pages use.
//!
//! A table becomes a list: its first column has the terms, its last their text, and a column
//! between them is named. A link keeps its words alone, since the guide's pages are no man pages.

use std::mem;

use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use roff::{Inline, Roff, bold, italic, roman};

/// Appends the page's text to `roff`, without its title.
pub(super) fn append(roff: &mut Roff, markdown: &str) {
    let mut page = RoffPage {
        roff,
        font: roman,
        line: Vec::new(),
        heads: Vec::new(),
        cells: Vec::new(),
        lists: 0,
        is_at_mark: false,
        is_code: false,
    };
    for event in Parser::new_ext(markdown, Options::ENABLE_TABLES) {
        page.take(event);
    }
}

/// A font for words.
type Font = fn(String) -> Inline;

struct RoffPage<'a> {
    roff: &'a mut Roff,
    font: Font,
    line: Vec<Inline>,
    /// The cells of a table's first row, and those of its present row.
    heads: Vec<Vec<Inline>>,
    cells: Vec<Vec<Inline>>,
    lists: usize,
    /// An item's first paragraph stands on the line of its mark.
    is_at_mark: bool,
    is_code: bool,
}

impl RoffPage<'_> {
    fn take(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.begin(&tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) if self.is_code => {
                for line in text.lines() {
                    // An empty line would end the paragraph in some viewers.
                    self.roff.text([roman(if line.is_empty() { " " } else { line })]);
                }
            }
            Event::Text(text) => self.line.push((self.font)(text.into_string())),
            Event::Code(text) => self.line.push(bold(text.into_string())),
            Event::SoftBreak | Event::HardBreak => self.line.push(roman(" ")),
            _ => {}
        }
    }

    fn begin(&mut self, tag: &Tag<'_>) {
        match tag {
            Tag::Paragraph if !mem::take(&mut self.is_at_mark) => {
                self.roff.control("PP", []);
            }
            Tag::CodeBlock(_) => {
                self.is_code = true;
                self.roff.control("PP", []).control("RS", ["4"]).control("nf", []);
            }
            Tag::List(_) => {
                self.flush();
                self.lists += 1;
                if self.lists > 1 {
                    self.roff.control("RS", ["4"]);
                }
            }
            Tag::Item => {
                self.is_at_mark = true;
                self.roff.control("IP", ["*", "2"]);
            }
            Tag::Strong => self.font = bold,
            Tag::Emphasis => self.font = italic,
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Heading(level) => self.heading(level),
            TagEnd::CodeBlock => {
                self.is_code = false;
                self.roff.control("fi", []).control("RE", []);
            }
            TagEnd::List(_) => {
                self.lists -= 1;
                if self.lists > 0 {
                    self.roff.control("RE", []);
                }
            }
            TagEnd::Strong | TagEnd::Emphasis => self.font = roman,
            TagEnd::TableCell => self.cells.push(mem::take(&mut self.line)),
            TagEnd::TableHead => self.heads = mem::take(&mut self.cells),
            TagEnd::TableRow => self.row(),
            TagEnd::Paragraph | TagEnd::Item => self.flush(),
            _ => {}
        }
    }

    fn heading(&mut self, level: HeadingLevel) {
        let words: String = mem::take(&mut self.line).iter().map(text_of).collect();
        let request = match level {
            HeadingLevel::H1 => return,
            HeadingLevel::H2 => "SH",
            _ => "SS",
        };
        self.roff.control(request, [words.as_str()]);
    }

    fn row(&mut self) {
        let mut cells = mem::take(&mut self.cells).into_iter();
        let (Some(term), Some(meaning)) = (cells.next(), cells.next_back()) else { return };
        self.roff.control("TP", []).text(term).text(meaning);
        for (head, cell) in self.heads.iter().skip(1).zip(cells) {
            let mut line = head.clone();
            line.push(roman(": "));
            line.extend(cell);
            self.roff.control("br", []).text(line);
        }
    }

    fn flush(&mut self) {
        if !self.line.is_empty() {
            self.roff.text(mem::take(&mut self.line));
        }
    }
}

fn text_of(inline: &Inline) -> &str {
    match inline {
        Inline::Roman(text) | Inline::Italic(text) | Inline::Bold(text) => text,
        Inline::LineBreak => " ",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guides_elements_have_their_counterparts() {
        let mut roff = Roff::new();
        let page = "# Title\n\nOne\n[link](a.md) and `code`.\n\n## `[host]`\n\n\
            | key | default | meaning |\n|-|-|-|\n| `qmp` | none | Globs. |\n\n\
            * first\n* **second**\n\n```sh\n.run\n\nend\n```\n";
        append(&mut roff, page);
        let text = roff.to_roff();
        let told = ".PP\nOne link and \\fBcode\\fR.\n.SH [host]\n.TP\n\\fBqmp\\fR\nGlobs.\n.br\n\
            default: none\n.IP * 2\nfirst\n.IP * 2\n\\fBsecond\\fR\n.PP\n.RS 4\n.nf\n\\&.run\n \nend\n\
            .fi\n.RE\n";
        assert_eq!(text, told);
    }
}
