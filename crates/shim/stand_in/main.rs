//! Stands in for QEMU: on command, makes, uses, discards and gives up RAM by the calls that QEMU
//! makes.
//!
//! One command per line on standard input, one answer per line on standard output: `ok …` or `bad
//! …`. Blocks are numbered from 0 in the order in which they were plugged; pages are numbered
//! within their block.

mod block;
mod calls;

use std::io::{BufRead, Write};

use block::RawBlock;

fn main() {
    let mut blocks = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let answer = match obey(&mut blocks, &line) {
            Ok(words) => format!("ok {words}"),
            Err(words) => format!("bad {words}"),
        };
        println!("{answer}");
        let _ = std::io::stdout().flush();
    }
}

fn obey(blocks: &mut Vec<Option<RawBlock>>, line: &str) -> Result<String, String> {
    let mut words = line.split_whitespace();
    let command = words.next().unwrap_or_default();
    let rest: Vec<&str> = words.collect();
    let number = |at: usize| {
        rest.get(at).and_then(|word| word.parse::<usize>().ok()).ok_or(format!("argument {at}"))
    };
    if command == "plug" {
        let kind = rest.get(1).copied().unwrap_or("private");
        blocks.push(Some(RawBlock::plug(number(0)?, kind)?));
        return Ok((blocks.len() - 1).to_string());
    }
    match command {
        "mlockall" => return calls::lock_everything(),
        "close-all" => return Ok(calls::close_everything()),
        "fork" => return calls::fork_and_look(blocks.iter().flatten().next()),
        _ => {}
    }
    if command == "unplug" {
        let slot = blocks.get_mut(number(0)?).ok_or("no such block")?;
        return slot.take().ok_or("no such block".to_owned())?.unplug();
    }
    let block = blocks.get(number(0)?).and_then(Option::as_ref).ok_or("no such block")?;
    match command {
        "fill" => block.fill(number(1)?),
        "check" => block.check(number(1)?),
        "stamp" => block.stamp(number(1)?, number(2)?, number(3)?),
        "holds" => block.holds(number(1)?, number(2)?, number(3)?, false),
        "holds-or-zeros" => block.holds(number(1)?, number(2)?, number(3)?, true),
        "touch" => block.touch(number(1)?),
        "discard" => block.discard(number(1)?, number(2)?),
        "report" => block.report(number(1)?, number(2)?),
        "use" => block.use_anew(number(1)?, number(2)?, number(3)?),
        "drop" => block.drop_freed(number(1)?, number(2)?),
        "clear" => block.clear(number(1)?, number(2)?),
        "write" => calls::write(block, number(1)?, number(2)?, number(3)?),
        "zeros" => block.zeros(number(1)?, number(2)?),
        "remap" => block.remap(number(1)?),
        "register" => calls::register(block),
        "register-beside-writes" => calls::register_beside_writes(block, number(1)?, number(2)?),
        "watch-writes" => calls::watch_writes(block),
        "write-seen" => calls::write_seen(block, number(1)?),
        "unregister" => calls::unregister(block),
        "read-direct" => calls::read_direct(block, number(1)?, rest.get(2).ok_or("no file")?),
        "load-direct" => calls::load_direct(block, rest.get(1).ok_or("no file")?),
        "write-out" => calls::write_out(block, number(1)?),
        "pin" => calls::pin(block, number(1)?, number(2)?),
        _ => Err(format!("unknown command {command}")),
    }
}
