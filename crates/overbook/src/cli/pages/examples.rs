//! Examples of each command, and related commands, for the man pages. A test parses each example.

/// A command line and its effect.
pub(super) type Example = (&'static str, &'static str);

/// A command, its examples, and the pages to read next.
type Entry = (&'static str, &'static [Example], &'static [&'static str]);

/// By the command's name in the page's title; `overbook` itself has none.
const ALL: [Entry; 45] = [
    (
        "",
        &[
            ("overbook status", "The host, its groups and its VMs, after a verdict in one line."),
            ("overbook explain web-1", "Why web-1 has the memory that it has."),
            ("overbook release", "Give every VM back what it had, and pause."),
        ],
        &["status", "top", "explain", "check", "doctor", "release"],
    ),
    (
        "daemon",
        &[("overbook daemon", "Run in the foreground, as the unit overbook.service does.")],
        &["status", "check"],
    ),
    (
        "disks",
        &[(
            "overbook disks web",
            "Serve the disks of the group web, as overbook-disks@web.service does.",
        )],
        &["repository"],
    ),
    (
        "repository",
        &[(
            "overbook repository --memory 4GiB --listen 10.0.0.2:10810 --tls /etc/overbook/tls/repository",
            "Lend 4 GiB to hosts that have a certificate of the pool's authority.",
        )],
        &["disks", "pki"],
    ),
    (
        "controller",
        &[(
            "overbook --config /etc/overbook/controller.toml controller",
            "Decide which VMs change hosts, as overbook-controller.service does.",
        )],
        &["cluster"],
    ),
    ("cluster", &[("overbook cluster status", "The pool in a few lines.")], &["controller"]),
    ("cluster-status", &[("overbook cluster status", "The pool in a few lines.")], &["cluster"]),
    (
        "cluster-hosts",
        &[("overbook cluster hosts", "The memory, VMs and overloads of each host.")],
        &["cluster"],
    ),
    (
        "cluster-overloads",
        &[("overbook cluster overloads", "The VMs of the pool that are overloaded.")],
        &["cluster"],
    ),
    (
        "cluster-migrations",
        &[("overbook cluster migrations", "The VMs that change hosts now.")],
        &["cluster"],
    ),
    (
        "cluster-explain",
        &[("overbook cluster explain web-1", "Where web-1 is, and whether it can be moved.")],
        &["cluster", "explain"],
    ),
    (
        "cluster-place",
        &[(
            "overbook cluster place web --memory 2GiB",
            "The hosts for one more VM of web, the best first.",
        )],
        &["cluster", "group"],
    ),
    (
        "pki",
        &[("overbook pki init /root/pki", "Make an authority for a pool.")],
        &["cluster", "repository"],
    ),
    ("pki-init", &[("overbook pki init /root/pki", "Make an authority for a pool.")], &["pki"]),
    (
        "pki-host",
        &[("overbook pki host /root/pki a 10.0.0.1", "Make the certificates of host a.")],
        &["pki"],
    ),
    (
        "pki-controller",
        &[(
            "overbook pki controller /root/pki controller --days 90",
            "Make a controller's certificate for 90 days.",
        )],
        &["pki"],
    ),
    (
        "pki-revoke",
        &[(
            "overbook pki revoke /root/pki /root/pki/a/etcd/client-cert.pem",
            "Revoke a certificate.",
        )],
        &["pki"],
    ),
    (
        "check",
        &[
            ("overbook check", "Every fault of the configuration, with its file and line."),
            ("overbook check --diff", "In addition, the effect of a reload."),
            ("overbook check --host", "The features of this host's kernel."),
        ],
        &["reload", "doctor"],
    ),
    (
        "doctor",
        &[
            ("overbook doctor", "The features that each VM lacks, and the line that mends each."),
            (
                "overbook doctor web-1 --all",
                "All about web-1, also features that it can do without.",
            ),
        ],
        &["check", "vm"],
    ),
    (
        "status",
        &[
            ("overbook status", "One page."),
            ("overbook status --watch 5", "The page again every 5 seconds."),
            ("overbook status --exit-code", "As a plugin of Nagios, Icinga and the like."),
        ],
        &["top", "vm", "group"],
    ),
    (
        "top",
        &[
            ("overbook top", "The host live; `?` shows the keys."),
            ("overbook top --batch -n 3", "Three pages for a pipe or a file."),
        ],
        &["status"],
    ),
    (
        "vm",
        &[
            ("overbook vm", "All VMs."),
            ("overbook vm web-1 --mrc", "The miss-ratio curve of web-1, in the terminal."),
        ],
        &["explain", "history", "mrc"],
    ),
    (
        "group",
        &[("overbook group web", "The group web: its budget, surplus and VMs.")],
        &["vm", "history"],
    ),
    (
        "explain",
        &[("overbook explain web-1", "Why web-1 has the memory that it has.")],
        &["vm", "plan"],
    ),
    (
        "capacity",
        &[(
            "overbook capacity --certainty 0.99",
            "The number of VMs that fit with that certainty.",
        )],
        &["status"],
    ),
    (
        "plan",
        &[
            ("overbook plan", "The latest plan: each change, each refusal, and its reason."),
            ("overbook plan --export", "Its input, for a report of a fault."),
            ("overbook plan --from host.json", "Decide such a file again."),
        ],
        &["explain"],
    ),
    (
        "pause",
        &[("overbook pause", "Nothing is changed any more; guests keep what they have.")],
        &["resume", "release"],
    ),
    ("resume", &[("overbook resume", "End the pause. For a minute nothing is taken.")], &["pause"]),
    (
        "reload",
        &[
            ("overbook reload", "Read the configuration again."),
            ("overbook reload --yes", "The same, although it takes much memory at once."),
        ],
        &["check"],
    ),
    (
        "release",
        &[
            ("overbook release", "Give every VM back what it had, and pause."),
            ("overbook release web --dry-run", "Tell what the group web would get back."),
        ],
        &["pause", "resume"],
    ),
    (
        "history",
        &[
            ("overbook history web-1 --since 7d", "The last week of web-1."),
            ("overbook history web --loans", "The loans of the group web."),
        ],
        &["vm", "group"],
    ),
    (
        "mrc",
        &[
            ("overbook mrc trace.oracleGeneral.zst", "The curve of a trace file."),
            ("overbook mrc trace.csv --column 2 --shards 0.01", "The curve of a sample."),
        ],
        &["vm"],
    ),
    (
        "static",
        &[("overbook static build /usr/bin -o debian12.spt", "A table of the code of programs.")],
        &["group"],
    ),
    (
        "static-build",
        &[("overbook static build root.qcow2 -o debian12.spt", "A table of an image.")],
        &["static"],
    ),
    (
        "static-capture",
        &[("overbook static capture web-1 -o web.spt", "A table of the memory of web-1.")],
        &["static"],
    ),
    (
        "static-show",
        &[(
            "overbook static show a.spt b.spt --mix a=3,b=2",
            "The memory that five guests could save.",
        )],
        &["static"],
    ),
    (
        "static-diff",
        &[("overbook static diff a.spt b.spt", "The pages of one table that the other lacks.")],
        &["static"],
    ),
    (
        "static-verify",
        &[("overbook static verify a.spt", "Whether the table is whole.")],
        &["static"],
    ),
    (
        "completions",
        &[("overbook completions bash", "The script that the package installs for bash.")],
        &["man"],
    ),
    ("man", &[("overbook man /tmp/pages", "Write all man pages.")], &["completions"]),
    (
        "lab",
        &[("overbook lab run quickstart", "Boot six guests, without Overbook and with it.")],
        &[],
    ),
    (
        "libvirt",
        &[(
            "overbook libvirt manage web-1",
            "Load the shim into the domain web-1 from its next start on.",
        )],
        &["doctor"],
    ),
    (
        "proxmox",
        &[(
            "overbook proxmox manage 101",
            "Give VM 101 a socket for Overbook from its next start on.",
        )],
        &["doctor"],
    ),
    (
        "proxmox-manage",
        &[("overbook proxmox manage 101", "Show the difference, ask, and give VM 101 a socket.")],
        &["proxmox-unmanage", "doctor"],
    ),
    (
        "proxmox-unmanage",
        &[("overbook proxmox unmanage 101", "Put the arguments of VM 101 back as they were.")],
        &["proxmox-manage"],
    ),
];

/// The examples of a command, and related commands.
pub(super) fn of(name: &str) -> (&'static [Example], &'static [&'static str]) {
    match ALL.iter().find(|(command, ..)| *command == name) {
        Some((_, examples, others)) => (examples, others),
        None => (&[], &[]),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::super::command_page;
    use super::*;
    use crate::cli::Cli;

    #[test]
    fn every_command_has_an_example_that_is_right_and_no_page_is_missing() {
        let mut table = Cli::command().disable_help_subcommand(true);
        table.build();
        let names: Vec<&str> = command_page::all(&table)
            .into_iter()
            .map(command_page::title)
            .map(|title| title.strip_prefix("overbook-").unwrap_or_default())
            .collect();
        for name in &names {
            let (examples, others) = of(name);
            assert!(!examples.is_empty(), "{name} has no example");
            for (line, _) in examples {
                Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
                let own = name.replace('-', " ");
                assert!(name.is_empty() || line.contains(&own), "{line} is not of {name}");
            }
            let missing = others.iter().find(|other| !names.contains(other));
            assert_eq!(missing, None, "{name} leads to a page that is not there");
        }
        for (name, ..) in ALL {
            assert!(names.contains(&name), "there is no command {name}");
        }
    }
}
