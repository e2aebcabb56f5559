// A chat with the served model, and what became of each turn: replica, cached tokens, times.

import * as api from "./api.js";
import { h, mark, panel, say } from "./dom.js";
import { percent, seconds, whole } from "./format.js";
import { bubble as icon } from "./icons.js";
import { chip } from "./parts.js";

export { icon };
export const title = "Playground";

const turns = []; // outlives a visit to another view, not the page

function field(text, control) {
  return h("label", {}, h("span", {}, text), control);
}

function bubble(role, text) {
  return h("article", { class: `turn ${role}`, "aria-label": role === "user" ? "You" : "Model" }, h("h3", {}, role === "user" ? "You" : "Model"), h("p", { class: "said" }, text));
}

/** What is known of a turn so far. */
function report(turn) {
  const cached = turn.cached === null ? null : `${whole(turn.cached)}${turn.prompt ? ` of ${whole(turn.prompt)} (${percent(turn.cached / turn.prompt)})` : ""} prompt tokens cached`;
  const pace = turn.tokens > 1 && turn.last > turn.first ? `${((turn.tokens - 1) / ((turn.last - turn.first) / 1000)).toFixed(1)} tokens/s` : null;
  const first = turn.first === null ? null : `TTFT ${seconds((turn.first - turn.began) / 1000)}`;
  const parts = [first, pace, turn.tokens ? `${whole(turn.tokens)} tokens` : null, cached, turn.end];
  return [turn.replica ? chip(turn.replica) : null, ...parts.filter(Boolean).map((text) => h("span", {}, text))].filter(Boolean);
}

export function open() {
  const model = h("select");
  const system = h("textarea", { rows: 3 }, "You are a helpful assistant. Answer in one short paragraph.");
  const tokens = h("input", { type: "number", min: 1, max: 4096, value: 128 });
  const heat = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
  const prompt = h("textarea", { rows: 3, placeholder: "Ask something", "aria-label": "Prompt", required: true });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", class: "quiet", disabled: true }, "Stop");
  const clear = h("button", { type: "button", class: "quiet" }, "New chat");
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Chat", tabindex: "0" });
  const form = h("form", { class: "ask" }, prompt, h("div", { class: "with" }, h("span", { class: "dim" }, "Ctrl + Enter sends"), stop, send));
  let stopper = null;

  function write(turn) {
    const said = bubble("assistant", turn.text);
    const facts = h("p", { class: "facts-line" }, report(turn));
    said.append(facts);
    talk.append(bubble("user", turn.asked), said);
    turn.show = () => {
      say(said.querySelector(".said"), turn.text);
      facts.replaceChildren(...report(turn));
      talk.scrollTop = talk.scrollHeight;
    };
    turn.show();
  }

  async function ask() {
    const turn = { asked: prompt.value.trim(), text: "", began: performance.now(), first: null, last: null, tokens: 0, cached: null, prompt: 0, replica: null, end: null };
    if (!turn.asked || stopper) return;
    const before = turns.filter((one) => one.text).flatMap((one) => [{ role: "user", content: one.asked }, { role: "assistant", content: one.text }]);
    const messages = [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), ...before, { role: "user", content: turn.asked }];
    turns.push(turn);
    write(turn);
    prompt.value = "";
    stopper = new AbortController();
    stop.disabled = false;
    send.disabled = true;
    try {
      await api.chat({ model: model.value, messages, max_tokens: tokens.valueAsNumber || 128, temperature: heat.valueAsNumber || 0 }, stopper.signal, (headers) => started(turn, headers), (chunk) => grown(turn, chunk));
    } catch (error) {
      turn.end = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    }
    stopper = null;
    stop.disabled = true;
    send.disabled = false;
    turn.show();
  }

  function started(turn, headers) {
    turn.replica = headers.get("x-warmroot-replica") || null;
    turn.cached = Number(headers.get("x-warmroot-cached-tokens"));
    turn.show();
  }

  function grown(turn, chunk) {
    const text = chunk.choices[0]?.delta?.content ?? "";
    if (text) {
      turn.last = performance.now();
      turn.first ??= turn.last;
      turn.text += text;
    }
    if (chunk.usage) {
      turn.tokens = chunk.usage.completion_tokens;
      turn.prompt = chunk.usage.prompt_tokens;
      turn.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? turn.cached;
    }
    turn.show();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => stopper?.abort());
  clear.addEventListener("click", () => {
    stopper?.abort();
    turns.length = 0;
    talk.replaceChildren();
  });
  for (const turn of turns) write(turn);

  return {
    element: h("div", { class: "split" }, panel("Chat", h("div", { class: "chat" }, talk, form), clear), panel("Settings", h("div", { class: "settings" }, field("Model", model), field("System prompt", system), field("Most tokens", tokens), field("Temperature", heat)))),
    update(state) {
      if ([...model.options].map((option) => option.value).join() !== state.models.join()) model.replaceChildren(...state.models.map((name) => h("option", {}, name)));
      mark(send, "title", state.ready ? null : "no replica is ready: it will wait");
    },
    close: () => stopper?.abort(),
  };
}
