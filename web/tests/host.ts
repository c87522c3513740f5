// The real daemon with a few scripted guests, in a directory of its own.

import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  readdirSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { createServer, connect, type Server } from 'node:net';
import { join, resolve } from 'node:path';

const BIN = resolve(process.env.OVERBOOK_BIN ?? '../target/release');
export const TOKEN = '0123456789abcdef';
/** Longest wait for a state of the daemon, in milliseconds. */
const LIMIT = 120_000;

/** Group, name, RAM, memory in use, available memory, and MiB swapped in a second. */
export type Guest = readonly [string, string, number, number, number, number];

const GUESTS: readonly Guest[] = [
  ['web', 'web-1', 192, 120, 4, 3],
  ['web', 'web-2', 192, 60, 20, 0],
  ['web', 'web-3', 192, 40, 150, 0],
  ['shop', 'shop-1', 128, 90, 10, 0],
  ['shop', 'shop-2', 128, 70, 10, 0],
  ['alone', 'build', 96, 30, 60, 0],
];

const CONFIG = (dir: string, port: number) => `
[host]
qmp = ["${dir}/*/*.qmp"]
state = "${dir}/state"
attach = "off"
reserve = "256MiB"

[mode]
balloon = "enforce"

[api]
socket = "${dir}/api"
tcp = "127.0.0.1:${port}"
token_file = "${dir}/token"

[overload]
interval_s = 2

[group.web]
vms = ["web-*"]
budget = "400MiB"
base = "128MiB"
min = "64MiB"

[group.shop]
vms = ["shop-*"]
budget = "96MiB"
base = "64MiB"
`;

export class Host {
  #children: ChildProcess[] = [];
  // A VM is of a group if its socket lies in the group's directory, and only root may write there.
  #dir = '';
  #forward?: Server;
  /** The address of its TCP listener. */
  url = '';
  /** The address at which its unix socket is forwarded, as by `ssh -L`. */
  forwarded = '';

  static async start(guests = GUESTS): Promise<Host> {
    if (process.getuid!() !== 0) {
      throw new Error('run this as root: only in directories of root does the daemon believe in a group');
    }
    const host = new Host();
    await host.#start(guests);
    return host;
  }

  async #start(guests: readonly Guest[]): Promise<void> {
    this.#dir = mkdtempSync('/run/overbook-dashboard-');
    const qemu = join(this.#dir, 'qemu-system-x86_64');
    copyFileSync(join(BIN, 'overbook-scripted-qemu'), qemu);
    chmodSync(qemu, 0o755);
    for (const [group, name, ...sizes] of guests) {
      mkdirSync(join(this.#dir, group), { recursive: true });
      const words = [name, join(this.#dir, group, `${name}.qmp`), ...sizes.map(String)];
      this.#run(qemu, words);
    }
    const port = await freePort();
    writeFileSync(join(this.#dir, 'token'), `${TOKEN}\n`, { mode: 0o600 });
    const config = join(this.#dir, 'overbook.toml');
    writeFileSync(config, CONFIG(this.#dir, port));
    this.#run(join(BIN, 'overbook'), ['daemon', '--config', config]);
    this.url = `http://127.0.0.1:${port}`;
    this.#forward = createServer((client) => {
      const daemon = connect(join(this.#dir, 'api'));
      client.pipe(daemon).pipe(client);
      client.on('error', () => daemon.destroy());
      daemon.on('error', () => client.destroy());
    }).listen(0, '127.0.0.1');
    await once(this.#forward, 'listening');
    this.forwarded = `http://localhost:${(this.#forward.address() as { port: number }).port}`;
  }

  #run(program: string, words: string[]): void {
    const log = openSync(join(this.#dir, 'log'), 'a');
    this.#children.push(spawn(program, words, { stdio: ['pipe', log, log] }));
  }

  /** CPU time of the daemon and of the process that answers the API, in seconds. */
  daemonSeconds(): number {
    const daemon = this.#children.at(-1)!.pid!;
    // A child belongs to the thread that has started it.
    const tasks = readdirSync(`/proc/${daemon}/task`);
    const children = tasks.flatMap((task) =>
      readFileSync(`/proc/${daemon}/task/${task}/children`, 'utf8').split(' ').filter(Boolean),
    );
    if (children.length === 0) {
      throw new Error('the daemon has no process that answers the API');
    }
    const all = [daemon, ...children.map(Number)];
    return all.reduce((sum, pid) => sum + secondsOf(pid), 0);
  }

  /** Asks the API until `holds`. */
  async until(path: string, holds: (answer: any) => boolean): Promise<void> {
    const end = Date.now() + LIMIT;
    let last: unknown;
    for (;;) {
      try {
        const answer = await fetch(this.url + path, { headers: { authorization: `Bearer ${TOKEN}` } });
        last = await answer.json();
        if (answer.ok && holds(last)) {
          return;
        }
      } catch (error) {
        last = error;
      }
      if (Date.now() > end) {
        const log = readFileSync(join(this.#dir, 'log'), 'utf8');
        throw new Error(`${path} never came to be so: ${JSON.stringify(last)}\n${log}`);
      }
      await new Promise((done) => setTimeout(done, 200));
    }
  }

  async stop(): Promise<void> {
    this.#forward?.close();
    // The daemon is the last child; it ends first, so that it does not miss the guests.
    for (const child of this.#children.reverse()) {
      const ended = child.exitCode === null && child.signalCode === null ? once(child, 'exit') : null;
      child.kill('SIGTERM');
      await ended;
    }
    rmSync(this.#dir, { recursive: true });
  }
}

/** CPU time of a process: fields 14 and 15 of proc_pid_stat(5), in ticks of 10 ms. */
function secondsOf(pid: number): number {
  const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
  const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
  return (Number(fields[11]) + Number(fields[12])) / 100;
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  server.close();
  await once(server, 'close');
  return port;
}
