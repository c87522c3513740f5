// An invented host with 200 VMs: more than a test machine can carry, and more ticks than one a second.

import { readFileSync } from 'node:fs';
import { createServer, type ServerResponse } from 'node:http';
import { once } from 'node:events';
import { extname, join } from 'node:path';
import type { components } from '../src/api';

type Schemas = components['schemas'];

const SITE = join(import.meta.dirname, '../dist/site');
const MIB = 2 ** 20;
const KINDS: Record<string, string> = { '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml' };
const NAMES = ['web', 'shop', 'ci', 'mail'] as const;

const waitsWords = (waits: number) => `it waits ${Math.round(waits * 100)} % of its time for pages that are out`;

/** A tick of this host; figures change with its number. */
export function tick(number: number, vms: number): Schemas['DashboardTick'] {
  const wave = (at: number) => Math.sin(number / 5 + at) / 2 + 0.5;
  const all = Array.from({ length: vms }, (_, at): Schemas['DashboardVm'] => {
    const group = NAMES[at % NAMES.length]!;
    const waits = at === 8 ? 0.1 + 0.04 * wave(0) : 0.002;
    const used = Math.round(300 + 400 * wave(at)) * MIB;
    return {
      name: `${group}-${Math.floor(at / NAMES.length) + 1}`,
      group,
      state: 'ok',
      trouble: waits > 0.02 ? { level: 'warning', lacks_memory: true, text: waitsWords(waits) } : null,
      wait_ratio: waits,
      ram_bytes: 1024 * MIB,
      min_bytes: 256 * MIB,
      base_bytes: 512 * MIB,
      max_bytes: 1024 * MIB,
      target_bytes: 768 * MIB,
      balloon_bytes: 832 * MIB,
      used_bytes: used,
      shared_bytes: 48 * MIB,
      saved_bytes: 40 * MIB,
      freed_bytes: 16 * MIB,
      paged_out_bytes: 64 * MIB,
      working_set_bytes: 400 * MIB,
      swap_bytes_per_second: 0,
      overload: 'none',
      decision: waits > 0.02 ? 'group web has no surplus: its budget is in use' : '',
      is_changing: false,
      last_change: null,
    };
  });
  const groups = NAMES.map((name): Schemas['GroupStatus'] => {
    const own = all.filter((vm) => vm.group === name);
    const used = own.reduce((sum, vm) => sum + (vm.used_bytes ?? 0), 0);
    const budget = own.length * { web: 500, shop: 540, ci: 800, mail: 900 }[name]! * MIB;
    const lent = name === 'mail' ? own.length * 55 * MIB : 0;
    const borrowed = name === 'web' ? own.length * 55 * MIB : 0;
    const loan = {
      lender: 'mail',
      borrower: 'web',
      amount_bytes: lent + borrowed,
      reason: { code: 'lend', text: 'its VM web-3 is short, and 2 GiB of group mail lie idle' },
    };
    return {
      name,
      policy: 'balance',
      budget_bytes: budget,
      used_bytes: used,
      promised_bytes: own.length * 40 * MIB,
      reserve_bytes: own.length * 20 * MIB,
      lends: lent + borrowed > 0,
      lent_bytes: lent,
      borrowed_bytes: borrowed,
      loans: lent + borrowed > 0 ? [loan] : [],
      surplus_bytes: Math.max(0, budget + borrowed - lent - used - own.length * 60 * MIB),
      deficit_bytes: Math.max(0, used + own.length * 40 * MIB - budget - borrowed + lent),
      stays_over: null,
      vms: own.map((vm) => vm.name),
      tracking: '1%',
      dedup: { configured: 'adaptive', pool_bytes: 0, saved_bytes: own.length * 40 * MIB, known_pages: 0 },
      free_pages: {
        lazy_bytes: 0,
        handed_over_bytes_total: 0,
        taken_bytes_total: 0,
        taken_back_bytes_total: 0,
        refaulted_bytes_total: 0,
      },
      cache: null,
      worker: null,
    };
  });
  const used = all.reduce((sum, vm) => sum + (vm.used_bytes ?? 0), 0);
  const host: Schemas['HostStatus'] = {
    version: '0',
    wall_ms: 1_780_000_000_000 + number * 1000,
    tick_age_ms: 0,
    mode: 'enforce',
    paused: false,
    total_bytes: vms * 800 * MIB,
    available_bytes: vms * 760 * MIB - used,
    ksm_is_driven: false,
    pool_host: 'a',
    pool_is_seated: true,
    pool_moving: ['ci-4'],
    vms,
    unreachable_vms: 0,
    uncooperative_vms: 0,
    reasons: [],
  };
  const lacks = all.filter((vm) => vm.trouble);
  const first = lacks.map((vm) => ({ level: vm.trouble!.level, text: `${vm.name}: ${vm.trouble!.text}`, vms: [vm.name] }));
  const verdict: Schemas['HostVerdict'] = {
    level: lacks.length > 0 ? 'warning' : 'ok',
    text: first[0] ? `WARNING: ${first[0].text}` : `OK: ${vms} VMs, 4 groups`,
    troubles: first,
  };
  const others = all.filter((vm) => !vm.trouble);
  return { verdict, host, reserve_bytes: vms * 40 * MIB, pool: POOL, groups, vms: [...lacks, ...others] };
}

const GIB = 2 ** 30;
const POOL: Schemas['PoolStatus'] = {
  host: 'a',
  is_seated: true,
  age_ms: 2000,
  controller: 'c-1',
  hosts: ['a', 'b', 'c'].map((host, at) => ({
    host,
    is_there: host !== 'c',
    vms: 24 - 4 * at,
    memory_bytes: 24 * GIB,
    given_bytes: (18 - 3 * at) * GIB,
    promised_bytes: (24 - 4 * at) * GIB,
    reserve_bytes: 2 * GIB,
    in_repositories_bytes: at === 0 ? 3 * GIB : 0,
    kept_for_vms_bytes: at === 1 ? 3 * GIB : 0,
    kept_for_pages_bytes: at === 1 ? 1 * GIB : 0,
    transient_overloads: at,
    sustained_overloads: 0,
  })),
  moves: [{ vm: 'ci-4', from: 'a', to: 'b', is_withdrawn: false, source: 'sends it', target: 'waits at 10.0.0.2:4711' }],
};

const CURVE: Schemas['MissRatioCurve'] = {
  vm: 'web-3',
  working_set_bytes: 900 * MIB,
  swapped_bytes: 0,
  references_per_second: 9000,
  age_ms: 300,
  points: Array.from({ length: 33 }, (_, at) => ({
    memory_bytes: at * 32 * MIB,
    miss_ratio: Math.exp(-at / 7) * (at < 24 ? 1 : 0.3),
  })),
};

const EXPLANATION = `web-3 may use all of its 1 GiB of RAM, and is paged; it belongs to group web (policy balance).

Limits       min 256 MiB, base 512 MiB (guaranteed), max 1 GiB
Of its base  all, and 256 MiB above it: a grant, which can be taken back
Working set  900 MiB; knowing it took 0.80 % of one vCPU in the last half minute
Paging       704 MiB in memory, 64 MiB paged out; 30 MiB untouched for a minute
Unchanged    group web has no surplus: its budget is in use
Last change  3 min before this tick: target lowered to 768 MiB: web-1 misses more without it
To change it a larger \`budget\` in [group.web]
`;

function history(): Schemas['HistoryRow'][] {
  const start = 1_780_000_000_000 - 600_000;
  return Array.from({ length: 600 }, (_, at) => ({
    wall_ms: start + at * 1000,
    step_seconds: 1,
    target_bytes: (at < 400 ? 900 : 768) * MIB,
    used_bytes: Math.round(700 + 50 * Math.sin(at / 40)) * MIB,
    change: at === 400 ? 'target lowered to 768 MiB: web-1 misses more without it' : null,
    mode: at === 400 ? 'enforce' : null,
    refusals: [],
  }));
}

export class InventedHost {
  #server = createServer();
  #readers = new Set<ServerResponse>();
  url = '';

  /** `troubles`: some more, after those of its VMs. */
  constructor(
    readonly vms: number,
    readonly troubles: Schemas['HostTrouble'][] = [],
  ) {}

  async start(): Promise<void> {
    this.#server.on('request', ({ url }, response) => {
      const json = (value: unknown) => response.end(JSON.stringify(value));
      if (url === '/v1/ticks') {
        response.writeHead(200, { 'content-type': 'text/event-stream' });
        this.#readers.add(response);
        response.on('close', () => this.#readers.delete(response));
        this.send(0);
      } else if (url?.startsWith('/v1/explain/')) {
        json({ vm: 'web-3', text: EXPLANATION });
      } else if (url?.endsWith('/curve')) {
        json(CURVE);
      } else if (url?.startsWith('/v1/history/')) {
        json(history());
      } else if (url === '/v1/capacity') {
        const at_once = { vms: 4, if_independent: 3 };
        const part = { certainty: 0.97, given_ratio: 0.75, fit_vms: this.vms + 6, measured_vms: 200, measured_seconds: 86_400 };
        const sizes = { targets_bytes: 2 ** 32, repositories_bytes: 2 ** 31, memory_bytes: 2 ** 37, given_bytes: 2 ** 36 };
        json({ ...part, ...sizes, vms: this.vms, sustained: at_once, transient: at_once });
      } else {
        const file = url === '/' ? '/index.html' : url!;
        response.setHeader('content-type', KINDS[extname(file)] ?? 'text/html');
        response.end(readFileSync(SITE + file));
      }
    });
    this.#server.listen(0, '127.0.0.1');
    await once(this.#server, 'listening');
    this.url = `http://127.0.0.1:${(this.#server.address() as { port: number }).port}`;
  }

  send(number: number): void {
    const sent = tick(number, this.vms);
    sent.verdict.troubles.push(...this.troubles);
    const text = JSON.stringify(sent);
    this.#readers.forEach((reader) => reader.write(`event: tick\ndata: ${text}\n\n`));
  }

  stop(): void {
    this.#server.close();
    this.#server.closeAllConnections();
  }
}
