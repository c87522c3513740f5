// The dashboard with 200 VMs, open for long: the memory of the browser, and the CPU time of a real
// daemon with scripted guests. `MINUTES=10 OVERBOOK_BIN=… npx playwright test long.spec.ts` runs it.

import { expect, test } from '@playwright/test';
import { Host, TOKEN, type Guest } from './host';
import { InventedHost } from './invented';
import { faultsOf, heapOf } from './page';

const MINUTES = Number(process.env.MINUTES ?? 0);
const VMS = 200;
const GROUPS = ['web', 'shop'];

/** Every tenth guest swaps, so that decisions change all the time. */
const GUESTS = Array.from({ length: VMS }, (_, at): Guest => {
  const group = GROUPS[at % GROUPS.length]!;
  const name = `${group}-${Math.floor(at / GROUPS.length) + 1}`;
  return [group, name, 128, 2, at % 10 === 0 ? 4 : 60, at % 10 === 0 ? 1 : 0];
});

test(`200 invented VMs at one tick a second for ${MINUTES} minutes`, async ({ page }) => {
  test.skip(MINUTES === 0, 'set MINUTES to run it');
  test.setTimeout(MINUTES * 60_000 + 300_000);
  const host = new InventedHost(VMS);
  await host.start();
  try {
    const faults = faultsOf(page);
    await page.goto(`${host.url}/#vm/web-3`);
    let tick = 0;
    const minute = async (): Promise<number> => {
      for (const end = Date.now() + 60_000; Date.now() < end; ) {
        tick += 1;
        host.send(tick);
        await page.waitForTimeout(1000);
      }
      return heapOf(page);
    };
    // The first minute fills the caches of the browser.
    const first = await minute();
    let last = first;
    for (let at = 0; at < MINUTES; at += 1) {
      last = await minute();
      console.log(`minute ${at + 1}: tick ${tick}, heap ${last.toFixed(2)} MiB`);
    }
    console.log(`${VMS} invented VMs, ${MINUTES} min: heap ${first.toFixed(2)} → ${last.toFixed(2)} MiB`);
    expect(last).toBeLessThan(first + 2);
    expect(faults).toEqual([]);
  } finally {
    host.stop();
  }
});

test(`200 VMs at one tick a second for ${MINUTES} minutes`, async ({ page }) => {
  test.skip(MINUTES === 0, 'set MINUTES to run it');
  test.setTimeout(MINUTES * 60_000 + 600_000);
  const host = await Host.start(GUESTS);
  try {
    await host.until('/v1/host', (status) => status.vms === VMS && status.unreachable_vms === 0);
    const faults = faultsOf(page);
    await page.goto(host.url);
    await page.getByLabel('token').fill(TOKEN);
    await page.keyboard.press('Enter');
    await expect(page.getByText(`${VMS} of ${VMS}`)).toBeVisible();
    await page.getByRole('cell', { name: 'web-1', exact: true }).getByRole('link').click();
    const ticks = new Set<string>();
    const minute = async (): Promise<{ cpu: number; heap: number; nodes: number }> => {
      const begun = [Date.now(), host.daemonSeconds()] as const;
      while (Date.now() < begun[0] + 60_000) {
        ticks.add((await page.locator('html').getAttribute('data-tick'))!);
        await page.waitForTimeout(500);
      }
      const cpu = (host.daemonSeconds() - begun[1]) / ((Date.now() - begun[0]) / 1000);
      const nodes = await page.evaluate(() => document.querySelectorAll('*').length);
      return { cpu, heap: await heapOf(page), nodes };
    };
    // The first minute fills the caches of the browser.
    const first = await minute();
    const before = ticks.size;
    const all = [];
    for (let at = 0; at < MINUTES; at += 1) {
      all.push(await minute());
      const { cpu, heap, nodes } = all.at(-1)!;
      console.log(`minute ${at + 1}: daemon ${(cpu * 100).toFixed(1)} % of a core, heap ${heap.toFixed(1)} MiB, ${nodes} nodes`);
    }
    const cpu = all.reduce((sum, one) => sum + one.cpu, 0) / all.length;
    const last = all.at(-1)!;
    console.log(
      `${VMS} VMs, ${MINUTES} min: daemon ${(cpu * 100).toFixed(1)} % of a core, ${ticks.size - before} ticks, ` +
        `heap ${first.heap.toFixed(1)} → ${last.heap.toFixed(1)} MiB, nodes ${first.nodes} → ${last.nodes}`,
    );
    expect(ticks.size - before).toBeGreaterThan(MINUTES * 50);
    expect(cpu).toBeLessThan(0.05);
    expect(last.heap).toBeLessThan(first.heap + 2);
    expect(last.nodes).toBeLessThan(first.nodes + 100);
    expect(faults).toEqual([]);
  } finally {
    await host.stop();
  }
});
