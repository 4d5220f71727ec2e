// Asks a session of a running daemon, then prints its answers as they come.
//   node desk.mjs [SESSION] [QUESTION] [ENDPOINT] [ANSWERS]
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const [session = "alpha", question = "trend", endpoint = "tcp://127.0.0.1:7801", answers = "Infinity"] =
  process.argv.slice(2);
const BEAT_MS = 5000; // the daemon forgets the subscriptions of a client that says nothing for 30 s

const socket = new Dealer({ linger: 0, heartbeatInterval: 5000, heartbeatTimeout: 15000 });
socket.connect(endpoint);

const waiting = new Map(); // requests by id
let number = 0;

async function request(type, members = {}) {
  const id = ++number;
  const reply = new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
  await socket.send(encode({ type, id, ...members }));
  return reply;
}

let seen = 0;
let last = ""; // the newest event that we know
let subscription;

async function subscribe() {
  const reply = await request("subscribe", { sessions: [session], events: ["answer"], after: last });
  subscription = reply.id;
  last ||= reply.newest;
}

async function beat() {
  const { subscriptions } = await request("heartbeat");
  if (!subscriptions.includes(subscription)) await subscribe(); // of an earlier connection
}

function heard(message) {
  switch (message.type) {
    case "event": {
      const { question, text, data_version, staleness_ns, flags } = message.data;
      const age = Number(staleness_ns) / 1e9;
      console.log(`${question} = ${text} (version ${data_version}, ${age} s old, ${flags.join(" ")})`);
      last = message.event;
      return ++seen < Number(answers);
    }
    case "lost":
      console.log(`missed ${message.events} events: ${message.reason}`);
      last = message.after || last;
      return true;
    case "error":
      waiting.get(message.id)?.reject(new Error(`${message.message} (${message.code})`));
      break;
    default:
      waiting.get(message.id)?.resolve(message);
  }
  waiting.delete(message.id);
  return true;
}

async function read() {
  // nanoseconds since 1970 do not fit into a double
  for await (const [payload] of socket) if (!heard(decode(payload, { useBigInt64: true }))) return;
}

const reading = read();
const failed = (error) => {
  console.error(error.message);
  process.exit(1);
};
try {
  const { version, daemon } = await request("hello", { version: 1 });
  console.log(`protocol ${version}, daemon ${daemon}`);
  const reply = await request("ask", { session, question, deadline_ms: 5000 });
  console.log(`asked: ${reply.text} (version ${reply.data_version})`);
  await subscribe();
} catch (error) {
  failed(error);
}
const beating = setInterval(() => beat().catch(failed), BEAT_MS);
await reading;
clearInterval(beating);
socket.close();
