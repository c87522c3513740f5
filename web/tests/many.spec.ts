// The page with 200 VMs: its speed, its memory, and the pictures of the guide.

import { expect, test, type Page } from '@playwright/test';
import { InventedHost } from './invented';
import { expectAccessible, expectNoSidewaysScroll, faultsOf, heapOf } from './page';

const VMS = 200;
const TICKS = 300;
const PICTURES = process.env.PICTURES;

let host: InventedHost;

test.beforeEach(async () => {
  host = new InventedHost(VMS);
  await host.start();
});

test.afterEach(() => host.stop());

/** Sends a tick, and waits until the page shows it. */
async function send(page: Page, number: number): Promise<void> {
  host.send(number);
  await page.waitForFunction(
    (wanted) => document.documentElement.dataset.tick === String(wanted),
    1_780_000_000_000 + number * 1000,
  );
}

test('a tick of 200 VMs takes a small part of a second, and many leave nothing behind', async ({ page }) => {
  const faults = faultsOf(page);
  await page.goto(`${host.url}/#vm/web-3`);
  await expect(page.getByRole('img', { name: /Miss-ratio curve/ }).locator('canvas')).toBeVisible();
  let number = 0;
  const some = async (count: number) => {
    for (let i = 0; i < count; i += 1) {
      number += 1;
      await send(page, number);
    }
  };
  await some(100);
  const before = await heapOf(page);
  const nodes = () => page.evaluate(() => document.querySelectorAll('*').length);
  const nodesBefore = await nodes();
  const client = await page.context().newCDPSession(page);
  await client.send('Performance.enable');
  const busy = async () => {
    const { metrics } = await client.send('Performance.getMetrics');
    return metrics.find((metric) => metric.name === 'TaskDuration')!.value;
  };
  const busyBefore = await busy();
  await some(TICKS);
  const perTick = ((await busy()) - busyBefore) / TICKS;
  const after = await heapOf(page);
  console.log(`${VMS} VMs: ${(perTick * 1000).toFixed(1)} ms a tick, heap ${before.toFixed(1)} → ${after.toFixed(1)} MiB`);
  // One tick a second; the machine of the tests does other work at the same time.
  expect(perTick).toBeLessThan(0.25);
  expect(after).toBeLessThan(before + 2);
  expect(await nodes()).toBeLessThan(nodesBefore + 50);
  expect(faults).toEqual([]);
});

for (const [scheme, width, height] of [
  ['light', 1200, 860],
  ['dark', 1200, 860],
  ['light', 360, 740],
] as const) {
  test(`a VM's curve and past in ${scheme} colours at ${width} px`, async ({ page }) => {
    host.stop();
    host = new InventedHost(24);
    await host.start();
    await page.setViewportSize({ width, height });
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: 'reduce' });
    await page.goto(host.url);
    await expect(page.getByLabel('Verdict')).toContainText('web-3: it waits 12 % of its time');
    await expect(page.getByLabel('Verdict')).toContainText('To change it: a larger budget in [group.web]');
    await expectNoSidewaysScroll(page);
    if (PICTURES && scheme === 'light') {
      await page.screenshot({ path: `${PICTURES}/dashboard-${scheme}-${width}.png` });
    }
    await page.getByLabel('Verdict').getByRole('link').click();
    await expect(page.getByRole('img', { name: /Miss-ratio curve/ }).locator('canvas')).toBeVisible();
    await expect(page.getByRole('img', { name: /last ten minutes/ }).locator('canvas')).toBeVisible();
    await expectAccessible(page);
    await expectNoSidewaysScroll(page);
    if (PICTURES && scheme === 'dark') {
      await page.getByRole('complementary').screenshot({ path: `${PICTURES}/dashboard-vm-${scheme}-${width}.png` });
    }
  });
}

test('a VM whose name is also a word of the sentence is a link where it is named', async ({ page }) => {
  host.stop();
  host = new InventedHost(24, [{ level: 'warning', text: '2 VMs are unreachable: are, web-1', vms: ['are', 'web-1'] }]);
  await host.start();
  await page.goto(host.url);
  const notice = page.locator('.notice', { hasText: '2 VMs are unreachable' });
  await expect(notice.getByRole('link')).toHaveText(['are', 'web-1']);
  const html = (await notice.innerHTML()).replace(/<!--.*?-->/g, '');
  expect(html).toContain('2 VMs are unreachable: <a');
});

test('the other hosts of the pool, and the VMs that move, are one click away', async ({ page }) => {
  host.stop();
  host = new InventedHost(24);
  await host.start();
  await page.goto(host.url);
  await page.getByRole('link', { name: '3 hosts in the pool, 1 moving' }).click();
  const panel = page.getByRole('complementary', { name: 'Pool of hosts' });
  await expect(panel).toContainText('20 VMs; they have 15 GiB of 24 GiB for VMs, and were promised 20 GiB; 2 GiB reserved');
  await expect(panel).toContainText("3 GiB of their pages in other hosts' memory");
  await expect(panel).toContainText("3 GiB kept for VMs that move to it; 1 GiB kept for other hosts' pages");
  await expect(panel).toContainText('1 in transient overload');
  await expect(panel).toContainText('It is not there. Its last report: 16 VMs');
  await expect(panel).toContainText('from a to b: a sends it, b waits at 10.0.0.2:4711');
  for (const width of [1200, 360]) {
    await page.setViewportSize({ width, height: 800 });
    await expectAccessible(page);
    await expectNoSidewaysScroll(page);
  }
});
