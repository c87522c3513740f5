// A stranger's questions to the dashboard of a real daemon.

import { expect, test, type Page } from '@playwright/test';
import { Host, TOKEN } from './host';
import { expectAccessible, expectNoSidewaysScroll, faultsOf } from './page';

let host: Host;
let faults: string[];

test.beforeAll(async () => {
  test.setTimeout(600_000);
  host = await Host.start();
  const lost = ({ text }: { text: string }) => text.includes('target lowered');
  await host.until('/v1/vms/web-3', (vm) => vm.last_change && lost(vm.last_change));
  await host.until('/v1/groups/shop', (group) => group.deficit_bytes > 0);
  await host.until('/v1/capacity', (capacity) => capacity.fit_vms > 0);
});

test.afterAll(async () => host?.stop());

test.beforeEach(({ page }) => {
  faults = faultsOf(page);
});

test.afterEach(() => expect(faults).toEqual([]));

async function signedIn(page: Page): Promise<void> {
  await page.goto(host.url);
  await page.getByLabel('token').fill(TOKEN);
  await page.keyboard.press('Enter');
  await expect(page.getByRole('heading', { name: 'Memory of the host' })).toBeVisible();
}

test('without the token there is nothing to see, and a wrong one is told', async ({ page }) => {
  await page.goto(host.url);
  await page.getByLabel('token').fill('0123456789abcdeX');
  await page.keyboard.press('Enter');
  await expect(page.getByRole('alert')).toHaveText('This is not the token.');
  await expect(page.getByText('web-3')).toHaveCount(0);
  await expectAccessible(page);
});

test('which VM waits?', async ({ page }) => {
  await signedIn(page);
  await expect(page.getByLabel('Verdict').locator('p').first()).toHaveText(
    // Of several VMs the one that waits most is named first.
    /^(WARNING|CRITICAL): (web-1: it (waits for its swap|is short of memory)|\d+ VMs (are|cannot be) .*: web-1\b)/,
  );
});

test('why did web-3 lose memory?', async ({ page }) => {
  await signedIn(page);
  await page.getByRole('cell', { name: 'web-3' }).getByRole('link').click();
  const panel = page.getByRole('complementary', { name: 'web-3' });
  await expect(panel.getByText(/target lowered to .*: /).first()).toBeVisible();
  await expect(panel.getByText(/ of its base|lent out|Limits/).first()).toBeVisible();
  await expectAccessible(page);
});

test('how many more fit?', async ({ page }) => {
  await signedIn(page);
  const tile = page.getByRole('link', { name: /\d+.*more VMs fit/ });
  await expect(tile).toBeVisible();
  await tile.click();
  await expect(page.getByRole('complementary')).toContainText(/\d+ VMs like these fit, and \d+ are here/);
});

test('which group is over its budget?', async ({ page }) => {
  await signedIn(page);
  // The greatest deficit comes first. The policy leaves `web` one that is smaller than its steps.
  const tile = page.getByRole('link', { name: /^shop.*over budget/ });
  await expect(tile).toBeVisible();
  await tile.click();
  await expect(page.getByRole('complementary')).toContainText('over its budget of 96 MiB by');
});

test('what does Overbook hold back now?', async ({ page }) => {
  await signedIn(page);
  await page.getByRole('link', { name: 'held back' }).click();
  const panel = page.getByRole('complementary');
  await expect(panel).toContainText('256 MiB, never handed out');
  await expect(panel).toContainText('kept for bursts');
});

test('all of it can be reached by keyboard', async ({ page }) => {
  await signedIn(page);
  await page.getByRole('link', { name: 'web-1' }).first().focus();
  await page.keyboard.press('Enter');
  await expect(page.getByRole('heading', { name: 'web-1' })).toBeFocused();
  await page.keyboard.press('Escape');
  await expect(page.getByRole('complementary')).toHaveCount(0);
  await expect(page.getByRole('link', { name: 'web-1' }).first()).toBeFocused();
  await page.getByRole('button', { name: /^web-1,/ }).focus();
  await page.keyboard.press('ArrowRight');
  await expect(page.getByRole('button', { name: /^web-2,/ })).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(page.getByRole('heading', { name: 'web-2' })).toBeFocused();
  await page.getByRole('button', { name: /^Used/ }).focus();
  await page.keyboard.press('Enter');
  await expect(page.getByRole('columnheader', { name: 'Used' })).toHaveAttribute('aria-sort', 'descending');
});

test('it pauses and resumes, but only when that is confirmed', async ({ page }) => {
  await signedIn(page);
  await page.getByRole('button', { name: 'Pause' }).click();
  await expectAccessible(page);
  await page.getByRole('button', { name: 'Cancel' }).click();
  await host.until('/v1/host', (status) => !status.paused);
  await page.getByRole('button', { name: 'Pause' }).click();
  await page.getByRole('button', { name: 'Pause all VMs' }).click();
  await host.until('/v1/host', (status) => status.paused);
  await page.getByRole('button', { name: 'Close' }).click();
  await page.getByRole('button', { name: 'Resume' }).click();
  await page.getByRole('button', { name: 'Resume all VMs' }).click();
  await host.until('/v1/host', (status) => !status.paused);
});

test('the forwarded unix socket shows everything and takes no order', async ({ page }) => {
  await page.goto(host.forwarded);
  await expect(page.getByText('Read-only')).toBeVisible();
  await expect(page.getByRole('button', { name: 'Release' })).toHaveCount(0);
  const status = await page.evaluate(async () => (await fetch('/v1/pause', { method: 'POST' })).status);
  expect(status).toBe(403);
});

for (const scheme of ['light', 'dark'] as const) {
  test(`in ${scheme} colours it is accessible, wide and narrow`, async ({ page }) => {
    await page.emulateMedia({ colorScheme: scheme, reducedMotion: 'reduce' });
    await signedIn(page);
    await page.getByRole('cell', { name: 'web-3' }).getByRole('link').click();
    await expect(page.getByRole('img', { name: /last ten minutes/ }).locator('canvas')).toBeVisible();
    const back = await page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
    expect(back).toBe(scheme === 'light' ? 'rgb(255, 255, 255)' : 'rgb(20, 23, 28)');
    for (const part of ['vm/web-3', 'group/shop', 'groups', 'fit', 'held-back', 'gained', 'pool', '']) {
      await page.evaluate((to) => (location.hash = to), part);
      await expect(page.getByRole('complementary')).toHaveCount(part ? 1 : 0);
      await page.setViewportSize({ width: 1200, height: 800 });
      await expectAccessible(page);
      await page.setViewportSize({ width: 360, height: 740 });
      await expectAccessible(page);
      await expectNoSidewaysScroll(page);
    }
  });
}

test('the first paint takes less than half a second', async ({ page }) => {
  await page.goto(host.url);
  const painted = await page.evaluate(
    () => performance.getEntriesByName('first-contentful-paint')[0]?.startTime,
  );
  expect(painted).toBeLessThan(500);
});
