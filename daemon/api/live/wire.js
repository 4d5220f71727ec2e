// Requests to the daemon that this page came from, and its stream of events.

import { $, setState } from "./words.js";

const AGAIN_MS = 1000;
// Where the daemon has tenants, every request has a key; it is sent in a header, never in an address.
let key = sessionStorage.getItem("foretick.key") || "";

export const send = (path, options = {}) => fetch(path, { ...options, headers: { ...options.headers, ...(key && { "x-api-key": key }) } });

export async function get(path) {
  const reply = await send(path);
  const found = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(found.message), { status: reply.status });
  return found;
}

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// Resolves when the reader has given a key; this tab keeps it until it is closed.
export function entered(why) {
  setState("a key is needed", true);
  $("entry-why").textContent = why;
  $("entry").hidden = false;
  $("key").focus();
  return new Promise((done) => {
    $("enter").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value.trim();
      sessionStorage.setItem("foretick.key", key);
      $("key").value = "";
      $("entry").hidden = true;
      done();
    };
  });
}

// An EventSource can send no header, so the stream is read here. `refused(why)` is awaited before it is tried with another key.
export async function listen(query, { opened, refused, lost, handlers }) {
  let last = "";
  for (;;) {
    try {
      const reply = await send("/v1/events?" + query, { headers: last && { "last-event-id": last } });
      if (reply.status === 401) {
        await refused((await reply.json()).message);
        continue;
      }
      if (!reply.ok) throw new Error();
      opened();
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = "", part; !(part = await reader.read()).done;) {
        const blocks = (text + part.value).split("\n\n");
        text = blocks.pop();
        for (const block of blocks) {
          const fields = Object.fromEntries(block.split("\n").map((line) => [line.split(": ", 1)[0], line.slice(line.indexOf(": ") + 2)]));
          last = fields.id || last;
          // apart from the stream: a mistake there is no loss of the connection
          if (fields.event in handlers) queueMicrotask(() => handlers[fields.event](JSON.parse(fields.data)));
        }
      }
    } catch (error) {}
    lost();
    await pause(AGAIN_MS);
  }
}
