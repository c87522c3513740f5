import { defineConfig } from '@playwright/test';

export default defineConfig({
  testDir: 'tests',
  // The daemon leaves memory alone for its first minute.
  timeout: 180_000,
  expect: { timeout: 30_000 },
  workers: 1,
  fullyParallel: false,
  forbidOnly: true,
  reporter: 'list',
  use: {
    launchOptions: {
      executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
      // Root may not use Chromium's sandbox; the pages are our own.
      args: process.getuid?.() === 0 ? ['--no-sandbox'] : [],
    },
    viewport: { width: 1200, height: 800 },
    locale: 'en-GB',
  },
});
