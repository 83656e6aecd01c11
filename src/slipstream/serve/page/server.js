// What the page asks of the server. The key, where one is needed, is kept for this tab alone and travels in a header.

const PLACE = "slipstream.key";

export const key = {
  get: () => sessionStorage.getItem(PLACE),
  set: (value) => sessionStorage.setItem(PLACE, value),
  forget: () => sessionStorage.removeItem(PLACE),
};

/** The server said no; `message` is its own. */
export class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param; // the field that it did not take
  }
}

/** Ask for a path; with a body as JSON by POST. Throws `Refused` on any answer but a good one. */
export async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `${response.status} ${response.statusText}`;
  throw new Refused(response.status, message, told?.error?.param);
}

/** The data of a response's server-sent events, one by one. EventSource cannot send a key. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
