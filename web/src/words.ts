// Figures and sentences. Reasons come from the daemon, in its own words.

import type { Vm } from './store.svelte';

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** A size as the daemon writes it, for example `1.2 GiB`. */
export function size(bytes: number | null | undefined): string {
  if (bytes == null) {
    return '–';
  }
  const unit = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), UNITS.length - 1);
  return `${Math.floor((bytes / 1024 ** unit) * 10) / 10} ${UNITS[unit]}`;
}

export function percent(ratio: number | null | undefined): string {
  return ratio == null ? '–' : `${Math.round(ratio * 100)} %`;
}

export function count(n: number, one: string, many: string): string {
  return n === 1 ? `1 ${one}` : `${n} ${many}`;
}

export function clock(wallMs: number): string {
  return new Date(wallMs).toLocaleTimeString();
}

export const sum = <T>(all: T[], of: (one: T) => number): number =>
  all.reduce((total, one) => total + of(one), 0);

/** Memory that a balloon keeps from the guest. */
export function ballooned(vm: Vm): number {
  return vm.balloon_bytes == null ? 0 : Math.max(0, vm.ram_bytes - vm.balloon_bytes);
}

export interface Line {
  label: string;
  text: string;
}

/** The lines of an explanation; the first line has no label. */
export function explanation(text: string): Line[] {
  const lines = text.split('\n').filter((line) => line.trim());
  return lines.map((line, at) =>
    at === 0
      ? { label: '', text: line }
      : { label: line.slice(0, 13).trim(), text: line.slice(13) },
  );
}
