import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

// `npm run dev` shows the sources, with the data of a daemon at this address.
const daemon = process.env.OVERBOOK ?? 'http://127.0.0.1:9090';

export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: 'dist/site',
    emptyOutDir: true,
    target: 'es2022',
    // Small files would become `data:` addresses, which the Content-Security-Policy forbids.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // Licences of the libraries that are part of the files.
    license: { fileName: 'licences.md' },
  },
  server: { proxy: { '/v1': daemon } },
});
