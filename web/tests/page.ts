// Checks that every page must pass.

import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { expect, type Page } from '@playwright/test';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

/** Everything that the page says is wrong, also breaches of its Content-Security-Policy. */
export function faultsOf(page: Page): string[] {
  const faults: string[] = [];
  page.on('pageerror', (error) => faults.push(error.message));
  page.on('console', (message) => {
    // The browser itself reports each answer that is an error; the page expects some.
    if (message.type() === 'error' && !message.text().startsWith('Failed to load resource')) {
      faults.push(message.text());
    }
  });
  page.on('request', (request) => {
    if (new URL(request.url()).host !== new URL(page.url()).host && page.url() !== 'about:blank') {
      faults.push(`it asks ${request.url()}`);
    }
  });
  return faults;
}

/** Faults for people who use a keyboard, a screen reader or strong contrast. */
export async function expectAccessible(page: Page): Promise<void> {
  // Given as an expression, which the Content-Security-Policy of the page does not concern.
  await page.evaluate(`${axe}; undefined`);
  const found = await page.evaluate(async () => {
    const { passes, violations } = await (globalThis as any).axe.run();
    if (passes.length < 10) {
      throw new Error(`axe has checked ${passes.length} rules only`);
    }
    return violations.map((one: any) => [one.id, one.nodes.map((node: any) => node.html)]);
  });
  expect(found).toEqual([]);
}

export async function expectNoSidewaysScroll(page: Page): Promise<void> {
  const [content, window] = await page.evaluate(() => [
    document.documentElement.scrollWidth,
    document.documentElement.clientWidth,
  ]);
  expect(content).toBeLessThanOrEqual(window!);
}

/** The page's JavaScript memory after a collection of garbage, in MiB. */
export async function heapOf(page: Page): Promise<number> {
  const client = await page.context().newCDPSession(page);
  await client.send('HeapProfiler.collectGarbage');
  const { usedSize } = await client.send('Runtime.getHeapUsage');
  await client.detach();
  return usedSize / 2 ** 20;
}
