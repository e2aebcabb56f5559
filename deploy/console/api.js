// Talks to the server. The key is in sessionStorage, and goes out in one header and nowhere else.

const KEY = "warmroot-key";
// Relative to the page, so that it holds behind any proxy's path.
const at = (path) => new URL(`../${path}`, document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the server answered that is no success. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  const headers = { ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}), ...options.headers };
  const response = await fetch(at(path), { cache: "no-store", credentials: "omit", ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refusal(response.status, body?.error?.message ?? `the server answers ${response.status}`);
}

/** Whether the server shows its state without a key. */
export async function isOpen() {
  const response = await fetch(document.baseURI, { method: "HEAD", cache: "no-store", credentials: "omit" });
  return response.headers.get("x-warmroot-admin-key") === "none";
}

/** The state, within `timeout` milliseconds. */
export async function state(timeout) {
  const response = await send("admin/state?prefixes=240&decisions=60", { signal: AbortSignal.timeout(timeout) });
  return response.json();
}

/** Streams a chat: `onStart(headers)` once, `onChunk(chunk)` for each event. Throws what went wrong. */
export async function chat(body, signal, onStart, onChunk) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  onStart(response.headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended before its end");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.startsWith("data:") ? event.slice(5).trim() : null;
      if (data === "[DONE]") return;
      if (!data) continue; // a comment, which keeps proxies awake
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
}
