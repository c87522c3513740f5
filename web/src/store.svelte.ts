// All state of the page: the latest tick, the token, and the part that the address names.
// Older ticks are forgotten, so the page does not grow.

import type { components } from './api';

type Schemas = components['schemas'];
// The description marks fields optional that an older daemon leaves out; this page has the daemon of
// its own build, which sends all.
export type Vm = Schemas['DashboardVm'];
export type Group = Required<Schemas['GroupStatus']>;
export type Tick = Omit<Schemas['DashboardTick'], 'groups' | 'host'> & {
  groups: Group[];
  host: Required<Schemas['HostStatus']>;
};
export type Capacity = Schemas['CapacityStatus'];
export type Curve = Schemas['MissRatioCurve'];
export type HistoryRow = Schemas['HistoryRow'];

/** An answer of the API that is an error, in its words. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

/** A daemon that says nothing for this long is taken for lost, in milliseconds. */
const SILENCE = 20_000;
const LONGEST_PAUSE = 10_000;

class Store {
  /** The latest tick. */
  tick = $state.raw<Tick | null>(null);
  /** Its age in seconds, by this browser's clock. */
  tickAge = $state(0);
  /** Why there are no ticks; empty: they come. */
  trouble = $state('');
  /** Whether the API wants a token that this page does not have. */
  needsToken = $state(false);
  token = $state(sessionStorage.getItem('token') ?? '');
  /** The open part: `vm/web-1`, `group/web`, `fit`, `held-back`, `pool`; empty: none. */
  part = $state(partOf(location.hash));
  capacity = $state.raw<Capacity | null>(null);
  /** Why the capacity is not known. */
  noCapacity = $state('');

  #tickCame = 0;
  #live: AbortController | null = null;
  #pause = 500;

  start(): void {
    addEventListener('hashchange', () => (this.part = partOf(location.hash)));
    document.addEventListener('visibilitychange', () => this.#follow());
    setInterval(() => void this.#measure(), 30_000);
    setInterval(() => (this.tickAge = Math.floor((Date.now() - this.#tickCame) / 1000)), 1_000);
    this.#follow();
  }

  /** Asks the API. */
  async ask<T>(path: string, method = 'GET'): Promise<T> {
    // Without a limit, unanswered questions would take all connections that a browser makes.
    const signal = AbortSignal.timeout(SILENCE);
    const answer = await fetch(path, { method, headers: this.#headers(), signal });
    if (answer.status === 401) {
      this.signOut();
    }
    const body: unknown = await answer.json();
    if (!answer.ok) {
      throw new ApiError(answer.status, (body as { error: string }).error);
    }
    return body as T;
  }

  signIn(token: string): void {
    this.token = token;
    sessionStorage.setItem('token', token);
    this.needsToken = false;
    this.#follow();
  }

  signOut(): void {
    this.token = '';
    sessionStorage.removeItem('token');
    this.needsToken = true;
    this.tick = null;
    this.#live?.abort();
  }

  open(part: string): void {
    location.hash = part;
  }

  #headers(): HeadersInit {
    return this.token ? { authorization: `Bearer ${this.token}` } : {};
  }

  /** Follows the ticks from now on; not while the page is hidden. */
  #follow(): void {
    this.#live?.abort();
    this.#live = null;
    if (document.visibilityState === 'hidden' || this.needsToken) {
      return;
    }
    const live = new AbortController();
    this.#live = live;
    void this.#read(live);
    void this.#measure();
  }

  async #read(live: AbortController): Promise<void> {
    let silent = setTimeout(() => {}, 0);
    const request = new AbortController();
    const end = () => request.abort();
    live.signal.addEventListener('abort', end);
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(end, SILENCE);
    };
    try {
      heard();
      const answer = await fetch('/v1/ticks', { headers: this.#headers(), signal: request.signal });
      if (answer.status === 401) {
        this.signOut();
        return;
      }
      if (!answer.ok || !answer.body) {
        throw new Error(`it answers ${answer.status}`);
      }
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (;;) {
        const { done, value } = await reader.read();
        if (done) {
          throw new Error('the connection has ended');
        }
        heard();
        text += value;
        const parts = text.split('\n\n');
        text = parts.pop() ?? '';
        this.#take(parts);
      }
    } catch (error) {
      if (!live.signal.aborted) {
        this.trouble = `The daemon cannot be asked: ${(error as Error).message}`;
        setTimeout(() => this.#live === live && this.#follow(), this.#pause);
        this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
      }
    } finally {
      clearTimeout(silent);
      live.signal.removeEventListener('abort', end);
      request.abort();
    }
  }

  /** Takes in the last tick of these events. */
  #take(events: string[]): void {
    const tick = events.findLast((event) => event.startsWith('event: tick'));
    const data = tick?.split('\n').find((line) => line.startsWith('data: '));
    if (data) {
      this.tick = JSON.parse(data.slice(6)) as Tick;
      this.#tickCame = Date.now();
      this.tickAge = 0;
      this.trouble = '';
      this.#pause = 500;
    }
  }

  async #measure(): Promise<void> {
    if (document.visibilityState === 'hidden' || this.needsToken) {
      return;
    }
    try {
      this.capacity = await this.ask<Capacity>('/v1/capacity');
      this.noCapacity = '';
    } catch (error) {
      this.capacity = null;
      this.noCapacity = (error as Error).message;
    }
  }
}

function partOf(hash: string): string {
  try {
    return decodeURIComponent(hash.slice(1));
  } catch {
    return '';
  }
}

export const store = new Store();
