/**
 * Node's fetch through kvlb: streams, large bodies, chunked uploads, fifty at a time, streams left by an AbortController.
 *
 *     node with_fetch.mjs --persist URL --turns URL --engine URL --engine URL
 *
 * What it is told and what it reports is as common.py says.
 */

import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

// The same numbers as in common.py, for the same reasons.
const LIMIT_MS = 240_000;
const TIMEOUT_MS = 60_000;
const MANY = 50;
const ENDLESS = 7000;
const FREED_MS = 2000;
const COLD_TOKENS = 16;
const PADDING = "x".repeat(3_000_000);

const PATHS = ["/v1/completions", "/v1/chat/completions"];

const { values: places } = parseArgs({
  options: { persist: { type: "string" }, turns: { type: "string" }, engine: { type: "string", multiple: true } },
});
const report = { client: `fetch of Node ${process.versions.node}`, checked: [], wrong: [] };
Object.assign(report, { requests: 0, left: 0, unsure: 0, cached_tokens: 0 });

setTimeout(() => process.exit(3), LIMIT_MS).unref();

function equal(what, found, wanted) {
  const [left, right] = [JSON.stringify(found), JSON.stringify(wanted)];
  if (left !== right) report.wrong.push(`${what}: ${left?.slice(0, 200)} where ${right?.slice(0, 200)} was to be`);
}

function saw(answer) {
  report.requests += 1;
  report.cached_tokens += answer?.cached ?? 0;
  return answer;
}

/** A request that no engine has seen. */
function question(path) {
  const text = `${randomBytes(16).toString("hex")} asks the librarian: who wrote the oldest book on the shelves? `;
  const body = { model: "tiny", max_tokens: 24, temperature: 0, seed: 7 };
  if (path === "/v1/completions") return { ...body, prompt: text };
  return { ...body, messages: [{ role: "system", content: text }, { role: "user", content: "Answer in short." }] };
}

function answerOf(body) {
  const [choice] = body.choices;
  const { prompt_tokens: prompt, prompt_tokens_details: details } = body.usage;
  return { text: choice.text ?? choice.message.content, finish: choice.finish_reason, prompt, cached: details.cached_tokens };
}

/** Reads a streamed completion piece by piece, which must be events to its end, and end as it should. */
async function answerOfEvents(body) {
  let text = "";
  for await (const piece of body.pipeThrough(new TextDecoderStream())) text += piece;
  const events = text.split("\n\n");
  if (events.pop() !== "" || events.pop() !== "data: [DONE]") throw new Error("the stream did not end with [DONE]");
  const whole = { text: "", finish: null };
  for (const event of events) {
    const chunk = JSON.parse(event.replace(/^data: /, ""));
    for (const choice of chunk.choices) {
      whole.text += choice.text ?? choice.delta.content ?? "";
      whole.finish = choice.finish_reason ?? whole.finish;
    }
    if (chunk.usage) {
      whole.prompt = chunk.usage.prompt_tokens;
      whole.cached = chunk.usage.prompt_tokens_details.cached_tokens;
    }
  }
  return whole;
}

function send(url, body, more = {}) {
  const headers = { "Content-Type": "application/json" };
  return fetch(url, { method: "POST", headers, body, signal: AbortSignal.timeout(TIMEOUT_MS), ...more });
}

async function ask(base, path, body, stream) {
  const sent = stream ? { ...body, stream: true, stream_options: { include_usage: true } } : body;
  const answer = await send(base + path, JSON.stringify(sent));
  equal(`${path}, status`, answer.status, 200);
  const wanted = stream ? "text/event-stream" : "application/json";
  equal(`${path}, content type`, answer.headers.get("content-type").split(";")[0], wanted);
  return stream ? answerOfEvents(answer.body) : answerOf(await answer.json());
}

/** Of an answer, what does not depend on the cache. */
function said({ text, finish, prompt }) {
  return { text, finish, prompt };
}

async function models() {
  const list = async (base) => (await (await fetch(`${base}/v1/models`)).json()).data.map((model) => model.id);
  equal("models", await list(places.persist), await list(places.engine[0]));
  const head = await fetch(`${places.persist}/v1/models`, { method: "HEAD" });
  equal("HEAD", [head.status, Number(head.headers.get("content-length")) > 0, await head.text()], [200, true, ""]);
  const broken = await send(`${places.persist}/v1/completions`, "{");
  const straight = await send(`${places.engine[0]}/v1/completions`, "{");
  equal("a broken body", [broken.status, await broken.text()], [straight.status, await straight.text()]);
  report.requests += 3;
}

async function answers() {
  for (const path of PATHS) {
    const body = question(path);
    const plain = saw(await ask(places.persist, path, body, false));
    const streamed = saw(await ask(places.persist, path, body, true));
    for (const engine of places.engine) {
      const straight = await ask(engine, path, body, false);
      equal(`${path}, answer`, said(plain), said(straight));
      equal(`${path}, streamed answer`, said(streamed), said(straight));
    }
  }
}

async function affinity() {
  const warmth = ({ cached, prompt }) => (cached === prompt - 1 ? "warm" : cached < COLD_TOKENS ? "cold" : cached);
  const often = async (base, path, streams) => {
    const body = question(path);
    const found = [];
    for (const stream of streams) found.push(warmth(saw(await ask(base, path, body, stream))));
    return found;
  };
  for (const path of PATHS) {
    const kept = await often(places.persist, path, [false, true, false, true, false, true]);
    equal(`${path}, kept`, kept, ["cold", "warm", "warm", "warm", "warm", "warm"]);
    const turns = await often(places.turns, path, [false, false, true, true]);
    equal(`${path}, in turn`, turns, ["cold", "cold", "warm", "warm"]);
  }
}

async function many() {
  for (let round = 0; round < 2; round += 1) {
    const jobs = Array.from({ length: MANY }, (_, number) => {
      const path = PATHS[(number >> 1) % 2];
      return { path, body: question(path), stream: number % 2 === 1 };
    });
    const found = await Promise.all(jobs.map(({ path, body, stream }) => ask(places.turns, path, body, stream)));
    for (const [number, { path, body }] of jobs.entries()) {
      const straight = await ask(places.engine[number % 2], path, body, false);
      equal(`${path}, one of ${MANY}`, said(saw(found[number])), said(straight));
    }
  }
}

async function large() {
  const [path] = PATHS;
  const body = question(path);
  const straight = await ask(places.engine[0], path, body, false);
  const sent = new TextEncoder().encode(JSON.stringify({ ...body, padding: PADDING }));
  const pieces = (start = 0) => {
    const pull = (controller) => {
      controller.enqueue(sent.subarray(start, (start += 70_000)));
      if (start >= sent.length) controller.close();
    };
    return new ReadableStream({ pull });
  };
  const ways = [() => [sent], () => [pieces(), { duplex: "half" }]];
  for (const base of [places.persist, places.turns]) {
    for (const way of ways) {
      const answer = await send(base + path, ...way());
      equal("answer after 3 MB", said(saw(answerOf(await answer.json()))), said(straight));
    }
  }
  const text = JSON.stringify({ content: "a shelf of books ".repeat(60_000) });
  const read = async (base) => (await send(`${base}/tokenize`, text)).text();
  equal("a large answer", (await read(places.turns)) === (await read(places.engine[1])), true);
  saw();
}

async function tokensMade() {
  let made = 0;
  for (const engine of places.engine) {
    const page = await (await fetch(`${engine}/metrics`)).text();
    made += Number(page.match(/^llamacpp:tokens_predicted_total (\d+)/m)[1]);
  }
  return made;
}

async function busy() {
  const slots = await Promise.all(places.engine.map(async (engine) => (await fetch(`${engine}/slots`)).json()));
  return slots.flat().some((slot) => slot.is_processing);
}

async function leaving() {
  for (const path of PATHS) {
    const before = await tokensMade();
    const leave = new AbortController();
    const body = JSON.stringify({ ...question(path), max_tokens: ENDLESS, stream: true });
    const answer = await send(places.turns + path, body, { signal: leave.signal });
    const reader = answer.body.getReader();
    for (let piece = 0; piece < 3; piece += 1) await reader.read();
    leave.abort();
    const ended = await reader.read().then(() => "read on", (error) => error.name);
    equal("a stream that was left", ended, "AbortError");
    const began = performance.now();
    while (await busy()) {
      if (performance.now() - began > FREED_MS) {
        report.wrong.push(`an engine was not free ${FREED_MS} ms after its client had left`);
        break;
      }
      await sleep(10);
    }
    console.log(`told: freed within ${(performance.now() - began).toFixed()} ms after the client had left`);
    const made = (await tokensMade()) - before;
    equal("tokens made for a client that left", made > 0 && made < ENDLESS ? "few" : made, "few");
    report.requests += 1;
    report.left += 1;
  }
}

const CHECKS = {
  "GET, HEAD and a broken body": models,
  "answers as from the engine, streamed or not": answers,
  "cached tokens prove affinity": affinity,
  "50 at a time, twice": many,
  "3 MB with a length and in chunks, and a large answer": large,
  "a client that leaves frees its engine": leaving,
};

for (const [what, check] of Object.entries(CHECKS)) {
  const before = report.wrong.length;
  try {
    await check();
  } catch (error) {
    console.error(error);
    report.wrong.push(`${what}: ${error}`);
  }
  if (report.wrong.length === before) report.checked.push(what);
}
console.log(JSON.stringify(report));
process.exitCode = report.wrong.length > 0 ? 1 : 0;
