// The live page: a chat with the model, and the draft tree of each step of one's own requests.

const SVG = "http://www.w3.org/2000/svg";
const EXAMPLES = [
  "Why is the sky blue?",
  "Count from one to twenty in words, separated by commas.",
  "Write a Python function that adds two numbers, and show how to call it.",
];
const KINDS = {
  drafter: "drafter network",
  ngrams: "n-grams",
  both: "both of them",
  resampled: "earlier draft, sampled again",
  grammar: "the only text that the guide allows",
  target: "the model's own choice",
  root: "last token before the step",
};
const REPLAY_MS = 450;
const DRAW_MS = 150; // a tree for each step would take a core, which a server on this machine has better use for

const by = (id) => document.getElementById(id);
const messages = [];
let runs = 0;
let running = null; // the AbortController of the request that runs
let comparing = false; // whether that request is the plain decoding of one that ended
let compared = false; // whether an answer of this visit has been compared
let view = noAnswer(); // the answer whose steps are shown
let replaying = null;

function noAnswer() {
  return { steps: [], spans: [], at: -1, follow: true, rate: 0 };
}

/* Small helpers */

function make(name, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  return fill(element, text, attributes, children);
}

function draw(name, { text, ...attributes } = {}, ...children) {
  return fill(document.createElementNS(SVG, name), text, attributes, children);
}

function fill(element, text, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

function headers() {
  const key = by("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refuse(response) {
  if (response.status === 401) by("key-field").hidden = false;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the server answered ${response.status}`);
  error.full = body?.error?.code === "context_length_exceeded";
  throw error;
}

/** `work`, at most every DRAW_MS: `soon` draws what has changed by then, `now` at once. */
function paced(work) {
  let [timer, last] = [null, -DRAW_MS];
  const now = () => {
    clearTimeout(timer);
    [timer, last] = [null, performance.now()];
    work();
  };
  return { now, soon: () => (timer ??= setTimeout(now, last + DRAW_MS - performance.now())) };
}

function counted(count, noun, plural = `${noun}s`) {
  return `${count} ${count === 1 ? noun : plural}`;
}

/* The server */

async function* events(body, signal) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch("/v1/chat/completions", options);
  if (!response.ok) await refuse(response);
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function load() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) await refuse(response);
  const [model] = (await response.json()).data;
  by("model").textContent = model.id;
  by("most").max = model.max_model_len;
  by("method").replaceChildren(...model.drafting_methods.map((name) => make("option", { text: name, value: name })));
}

/** Say below the steps what drafts gain in all requests of the server, by its metrics. */
async function showServer() {
  const response = await fetch("/metrics", { headers: headers() });
  if (!response.ok) return;
  const lines = [...(await response.text()).matchAll(/^redraft_(\w+)(?:\{.*\})? (\S+)$/gm)];
  const sum = (name) => lines.reduce((total, [, metric, value]) => total + (metric === name ? Number(value) : 0), 0);
  const [steps, error] = [sum("engine_steps_total"), sum("step_time_error")];
  const perStep = (what) => (sum(`spec_decode_num_${what}_tokens_total`) / steps).toFixed(2);
  by("server").textContent = steps ? `All requests since the start: ${perStep("draft")} guesses a step, ${perStep("expected")} expected to be kept, `
    + `${perStep("accepted")} kept; predicted step times are ${Math.round(100 * error)}% off` : "";
}

/* Steps */

/** A step as the page shows it: its tree, and what each gained token came from. */
function step(tree) {
  const kept = tree.path.slice(1);
  const kinds = tree.gained.map((_, place) => (place < kept.length ? tree.nodes[kept[place]].origin : "target"));
  return { ...tree, kinds };
}

function totals(steps) {
  const drafting = steps.slice(1); // the first token is the prompt's
  const sum = (count) => drafting.reduce((total, one) => total + count(one), 0);
  const gained = sum((one) => one.gained.length);
  return {
    tokens: gained + (steps[0]?.gained.length ?? 0),
    gained,
    perStep: drafting.length ? gained / drafting.length : 0,
    steps: drafting.length,
    kept: sum((one) => one.path.length - 1),
    drafted: sum((one) => one.nodes.length - 1),
  };
}

function showFigures(steps, rate) {
  const all = totals(steps);
  by("per-step").textContent = all.steps ? all.perStep.toFixed(2) : "–";
  by("per-second").textContent = rate ? rate.toFixed(rate < 10 ? 1 : 0) : "–";
  by("count").replaceChildren(String(all.steps), make("small", { text: ` for ${counted(all.gained, "token")}` }));
  by("kept").replaceChildren(String(all.kept), make("small", { text: ` of ${all.drafted}` }));
}

/** Draw what has come of an answer that runs since it was drawn last. */
function drawAnswer(answer) {
  const { tokens } = totals(answer.steps);
  answer.rate = rateOf(answer, tokens);
  addSteps(answer);
  if (view === answer) {
    showFigures(answer.steps, answer.rate);
    if (answer.follow) show(answer.steps.length - 1);
  }
  scrollDown();
}

/** Add the text and the columns of steps that have none yet. */
function addSteps(answer) {
  for (let place = answer.spans.length; place < answer.steps.length; place++) addText(answer, place);
  if (view === answer) addColumns();
}

function addText(answer, place) {
  const { gained, kinds } = answer.steps[place];
  const spans = gained.map((text, token) => {
    const space = text.trim() ? text.match(/^\s*/)[0] : "";
    const [kind, word] = [kinds[token], text.slice(space.length)];
    const span = make("span", { title: `step ${place}: ${KINDS[kind]}` }, space, make("mark", { text: word, class: kind }));
    span.addEventListener("click", () => select(answer, place));
    return span;
  });
  answer.spans.push(spans);
  answer.text.append(...spans);
}

function addColumns() {
  for (let place = by("timeline").childElementCount; place < view.steps.length; place++) addColumn(place);
}

function addColumn(place) {
  const { kinds } = view.steps[place];
  const label = `step ${place}: ${counted(kinds.length, "token")}`;
  // No tab stop: there are hundreds, and the arrow keys reach every step from the tree.
  const column = make("button", { type: "button", "aria-label": label, title: label, tabindex: -1 });
  column.append(...kinds.map((kind) => make("i", { class: kind })));
  column.addEventListener("click", () => select(view, place));
  by("timeline").append(column);
}

function openView(answer) {
  stopReplay();
  view.spans[view.at]?.forEach((span) => span.classList.remove("shown"));
  view = answer;
  view.at = -1;
  by("timeline").replaceChildren();
  addColumns();
}

/** An answer without steps: `text` stands where its tree will be. */
function showNoSteps(answer, text) {
  openView(answer);
  showFigures([], 0);
  by("title").textContent = "Draft tree";
  by("outcome").textContent = "";
  by("tree").replaceChildren(make("p", { class: "empty muted", text }));
  for (const control of ["back", "replay", "on"]) by(control).disabled = true;
}

function select(answer, place) {
  if (answer !== view) {
    openView(answer);
    showFigures(answer.steps, answer.rate);
  }
  stopReplay();
  answer.follow = false;
  show(place);
}

function show(place) {
  addSteps(view); // the arrow keys may be ahead of what was drawn
  if (place < 0 || place >= view.steps.length) return;
  const mark = (at, on) => {
    view.spans[at]?.forEach((span) => span.classList.toggle("shown", on));
    by("timeline").children[at]?.classList.toggle("shown", on);
  };
  mark(view.at, false);
  view.at = place;
  mark(place, true);
  const column = by("timeline").children[place];
  const strip = by("timeline");
  if (column.offsetLeft < strip.scrollLeft || column.offsetLeft + 40 > strip.scrollLeft + strip.clientWidth) {
    strip.scrollLeft = column.offsetLeft - strip.clientWidth / 2;
  }
  const shown = view.steps[place];
  by("title").textContent = place ? `Step ${place}` : "The prompt";
  by("outcome").textContent = outcome(shown, place);
  by("tree").replaceChildren(drawTree(shown));
  by("back").disabled = place === 0;
  by("on").disabled = place === view.steps.length - 1;
  by("replay").disabled = view.steps.length < 2;
}

function outcome(shown, place) {
  const drafted = shown.nodes.length - 1;
  const kept = shown.path.length - 1;
  const gained = shown.gained.length;
  if (!place) return "the model chooses the first token";
  const end = gained <= kept ? ", the text ends here" : "";
  const guesses = drafted ? `${counted(drafted, "guess", "guesses")} checked, ${kept} kept: ` : "no guesses, ";
  return `${guesses}${counted(gained, "token")}${end}`;
}

/* The tree: levels from left to right, the accepted path on the top line */

const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
const short = (text) => (text.length > 14 ? `${text.slice(0, 13)}…` : text);
const percent = (chance) => (chance >= 0.0995 ? `${Math.round(100 * chance)}%` : `${(100 * chance).toFixed(1)}%`);

function drawTree(shown) {
  const bonus = shown.gained.length > shown.path.length - 1 ? shown.gained.at(-1) : null;
  const nodes = shown.nodes.map((node, at) => ({
    ...node, kept: shown.path.includes(at), children: [], label: short(visible(node.token)),
  }));
  if (bonus !== null) {
    const parent = shown.path.at(-1);
    nodes.push({ parent, token: bonus, origin: "target", kept: true, children: [], label: short(visible(bonus)) });
  }
  nodes.forEach((node, at) => {
    if (at) nodes[node.parent].children.push(at);
  });
  const widths = [];
  let line = 0;
  const place = (at, depth) => {
    const node = nodes[at];
    const chance = node.score !== undefined && at ? 36 : 0;
    node.depth = depth;
    node.width = Math.max(26, 7.6 * [...node.label].length + 18 + chance);
    widths[depth] = Math.max(widths[depth] ?? 0, node.width);
    node.children.sort((a, b) => nodes[b].kept - nodes[a].kept || nodes[b].score - nodes[a].score);
    node.line = line;
    node.children.forEach((child, order) => {
      if (order) line += 1;
      place(child, depth + 1);
    });
  };
  place(0, 0);
  const starts = [4];
  widths.forEach((width, depth) => starts.push(starts[depth] + width + 30));
  const size = { width: starts.at(-1) - 22, height: 36 * (line + 1) + 8 };
  const svg = draw("svg", {
    viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": `draft tree of ${counted(shown.nodes.length - 1, "guess", "guesses")}`,
  });
  svg.setAttribute("width", size.width); // never smaller, so that its words stay readable: the tree scrolls
  svg.setAttribute("height", size.height);
  const edges = draw("g");
  const shapes = draw("g");
  nodes.forEach((node, at) => {
    node.x = starts[node.depth];
    node.y = 36 * node.line + 22;
    if (at) edges.append(edge(nodes[node.parent], node));
    shapes.append(drawNode(node, nodes));
  });
  edges.append(...[...edges.querySelectorAll(".kept")]); // above the others
  svg.append(edges, shapes);
  return svg;
}

function edge(from, to) {
  const x = from.x + from.width;
  const turn = x + 15;
  const curve = from.line === to.line ? `M${x} ${from.y}H${to.x}`
    : `M${x} ${from.y}C${turn} ${from.y} ${x + 4} ${to.y} ${Math.min(turn + 8, to.x)} ${to.y}H${to.x}`;
  return draw("path", { d: curve, class: to.kept ? "edge kept" : "edge" });
}

function drawNode(node, nodes) {
  const group = draw("g", { class: `node ${node.kept ? "kept" : "lost"} ${node.origin === "target" ? "by-target" : ""}` });
  const [x, y] = [node.x, node.y - 13];
  group.append(...shape(node.origin, x, y, node.width, 26));
  const text = draw("text", { x: x + 9, y: node.y + 0.5, text: node.label });
  group.append(text);
  let title = `${JSON.stringify(node.token)}: ${KINDS[node.origin]}`;
  if (node.score !== undefined && node.parent >= 0) {
    const chance = Math.exp(node.score);
    const own = Math.exp(node.score - nodes[node.parent].score);
    group.append(draw("text", { x: x + node.width - 8, y: node.y + 0.5, text: percent(chance), class: "chance" }));
    title += `\nlikely to be kept: ${percent(chance)}; after its parent: ${percent(own)}\n${node.kept ? "kept" : "not kept"}`;
  }
  group.append(draw("title", { text: title }));
  return group;
}

/** A kind's outline: kinds differ in shape, not in colour only. */
function shape(kind, x, y, width, height) {
  const box = (inset, radius) => draw("rect", {
    x: x + inset, y: y + inset, width: width - 2 * inset, height: height - 2 * inset, rx: radius, class: `shape ${kind}`,
  });
  if (kind === "ngrams") {
    const cut = 7;
    const [right, bottom] = [x + width, y + height];
    const d = `M${x + cut} ${y}H${right - cut}L${right} ${y + height / 2}L${right - cut} ${bottom}H${x + cut}L${x} ${y + height / 2}Z`;
    return [draw("path", { d, class: "shape ngrams" })];
  }
  if (kind === "both") return [box(0, 8), box(3.2, 5)];
  return [box(0, kind === "target" ? height / 2 : kind === "root" ? 3 : 8)];
}

function drawLegend() {
  const item = (text, kind, kept) => make("li", {},
    draw("svg", { width: 32, height: 18, viewBox: "-2 -2 36 22", "aria-hidden": "true" },
      draw("g", { class: kept ? "kept" : "" }, ...shape(kind, 0, 0, 32, 18))),
    make("span", { text }));
  by("legend").append(
    item("guess of the drafter network", "drafter", true), item("of n-grams", "ngrams", true),
    item("of both", "both", true), item("sampled again", "resampled", true),
    item("the model's own choice", "target", true),
    make("li", { text: "filled, thick line: kept" }), make("li", { text: "%: estimated chance to be kept" }),
  );
}

/* Replay */

function stopReplay() {
  clearInterval(replaying);
  replaying = null;
  by("replay").textContent = "Replay";
}

function replay() {
  if (replaying) return stopReplay();
  view.follow = false;
  show(0);
  by("replay").textContent = "Stop";
  replaying = setInterval(() => (view.at + 1 < view.steps.length ? show(view.at + 1) : stopReplay()), REPLAY_MS);
}

/* The chat */

/** Tokens per second of a run: by the server's measure at its end, until then by the time since its first token. */
function rateOf({ metrics, begun }, tokens) {
  const ms = metrics?.generation_time_ms || (tokens > 4 ? performance.now() - begun : 0);
  return ms > 0 ? (1e3 * (tokens - 1)) / ms : 0;
}

async function send(text) {
  by("welcome").hidden = true;
  let full = false;
  messages.push({ role: "user", content: text });
  const answer = { ...noAnswer(), content: "" };
  answer.text = make("div", { class: "text running" });
  const card = make("article", { class: "answer" }, answer.text);
  by("messages").append(make("div", { class: "user", text }), card);
  card.scrollIntoView({ block: "end" });
  showNoSteps(answer, "The model reads the prompt.");
  answer.body = {
    messages: [...messages], stream: true, seed: crypto.getRandomValues(new Uint32Array(1))[0],
    temperature: Number(by("temperature").value), max_tokens: Number(by("most").value) || null,
    drafting_method: by("method").value || null, // who asks before the list came gets the server's own
  };
  const drawing = paced(() => drawAnswer(answer));
  await ask(card, async (signal) => {
    const options = { include_usage: true };
    for await (const event of events({ ...answer.body, draft_trees: true, stream_options: options }, signal)) {
      const [choice] = event.choices;
      answer.content += choice?.delta?.content ?? "";
      answer.finish = choice?.finish_reason ?? answer.finish;
      answer.steps.push(...(choice?.draft_trees ?? []).map(step));
      answer.metrics = event.metrics ?? answer.metrics;
      answer.usage = event.usage ?? answer.usage;
      answer.begun ||= answer.steps.length && performance.now();
      drawing.soon();
    }
  }, (error) => (full = error.full && messages.length > 1));
  if (full) { // what was said before leaves no room: the question begins another chat
    by("messages").lastElementChild.remove();
    by("messages").lastElementChild.remove();
    messages.length = 0;
    by("messages").append(make("div", { class: "muted break", text: "The chat had filled the model's context. A new one begins here." }));
    return send(text);
  }
  drawing.now();
  answer.text.classList.remove("running");
  if (answer.content) messages.push({ role: "assistant", content: answer.content });
  else messages.pop(), (by("prompt").value ||= text); // refused, or stopped before it began: not part of the chat
  if (!answer.steps.length && view === answer) showNoSteps(answer, "There was no step.");
  addNotes(card, answer);
  if (answer.metrics && totals(answer.steps).tokens > 1) addComparison(card, answer);
  scrollDown();
  showServer().catch(() => {}); // it is only beside the answer
}

function addNotes(card, { finish, usage }) {
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const notes = [];
  if (finish === "length" && usage) notes.push(`cut after ${counted(usage.completion_tokens, "token")}`);
  if (cached) notes.push(`the cache had ${cached} of the prompt's ${usage.prompt_tokens} tokens`);
  card.append(...notes.map((text) => make("div", { class: "muted", text })));
}

/** Run one request at a time; what goes wrong is said below its answer, unless `mended` says that it is dealt with. */
async function ask(card, work, mended = () => false) {
  const mine = (running = new AbortController());
  const number = ++runs;
  setRunning();
  try {
    await work(mine.signal);
  } catch (error) {
    if (error.name !== "AbortError" && !mended(error)) card.append(make("p", { class: "error", text: error.message }));
  }
  if (number === runs) running = null;
  setRunning();
}

function setRunning() {
  by("send").textContent = running && !comparing ? "Stop" : "Send";
  document.querySelectorAll(".compare > button").forEach((button) => (button.disabled = Boolean(running)));
  by("new").disabled = Boolean(running) && !comparing;
}

function scrollDown() {
  const box = by("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

/* Plain decoding of the same request */

function addComparison(card, answer) {
  const box = make("div", { class: "compare" });
  const button = make("button", { type: "button", text: "Run it by plain decoding too" });
  button.disabled = Boolean(running); // a comparison that gave way to another question comes back while that runs
  button.addEventListener("click", () => compare(card, box, answer));
  box.append(button);
  card.append(box);
  if (!compared && !by("prompt").value.trim()) compare(card, box, answer); // who types has another question
}

async function compare(card, box, answer) {
  [comparing, compared] = [true, true];
  const plain = make("div", { class: "row" });
  const drafted = make("div", { class: "row with" });
  const verdict = make("div", { class: "verdict" });
  const { drafting_method: _, ...body } = answer.body;
  const run = { content: "", tokens: 0, metrics: null, begun: 0, rate: 0 };
  const drawing = paced(() => {
    run.rate = rateOf(run, run.tokens);
    const most = Math.max(run.rate, answer.rate);
    bar(drafted, "with drafting", answer.rate, most);
    bar(plain, "plain decoding", run.rate, most);
  });
  drawing.now();
  box.replaceChildren(drafted, plain, verdict);
  scrollDown();
  await ask(card, async (signal) => {
    const options = { include_usage: true, continuous_usage_stats: true };
    for await (const event of events({ ...body, speculative: false, stream_options: options }, signal)) {
      run.content += event.choices[0]?.delta?.content ?? "";
      run.tokens = event.usage?.completion_tokens ?? run.tokens;
      run.metrics = event.metrics ?? run.metrics;
      run.begun ||= run.tokens && performance.now();
      drawing.soon();
    }
    drawing.now();
    const { perStep } = totals(answer.steps);
    verdict.append(
      answer.rate && run.rate ? make("strong", { text: `${(answer.rate / run.rate).toFixed(2)}× as fast` }) : "",
      make("span", { class: "muted", text: `${perStep.toFixed(2)} tokens per step instead of 1` }),
      make("span", { class: "muted", text: run.content === answer.content ? "✓ the same text" : "the texts differ" }),
    );
    if (run.content !== answer.content) {
      box.append(make("details", {}, make("summary", { text: "Text of plain decoding" }), make("p", { text: run.content })));
    }
  });
  comparing = false;
  setRunning();
  if (!verdict.childElementCount) addComparison(card, answer), box.remove();
  scrollDown();
}

function bar(row, label, rate, most) {
  const share = most ? (100 * rate) / most : 0;
  row.replaceChildren(
    make("span", { text: label }),
    draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { width: 100, height: 10, class: "track" }), draw("rect", { width: share, height: 10, class: "rate" })),
    make("span", { text: rate ? `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : "…" }),
  );
}

/* Controls */

/** Send a question; a comparison that runs gives way to it. */
function askNext(text) {
  running?.abort();
  comparing = false;
  send(text);
}

by("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running && !comparing) return running.abort();
  const text = by("prompt").value.trim();
  if (!text) return;
  by("prompt").value = "";
  askNext(text);
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running || comparing) by("composer").requestSubmit();
  }
});
by("settings").addEventListener("submit", (event) => event.preventDefault());
by("key").addEventListener("change", () => load().catch(showFailure));
by("new").addEventListener("click", () => {
  running?.abort(); // at most a comparison
  messages.length = 0;
  document.querySelectorAll("#messages > :not(#welcome)").forEach((element) => element.remove());
  by("welcome").hidden = false;
  showNoSteps(noAnswer(), "The tree of the latest step appears here.");
  by("prompt").focus();
});
by("back").addEventListener("click", () => select(view, view.at - 1));
by("on").addEventListener("click", () => select(view, view.at + 1));
by("replay").addEventListener("click", replay);
by("tree").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (move && view.steps.length) select(view, Math.min(Math.max(view.at + move, 0), view.steps.length - 1));
});

function showFailure(error) {
  by("model").textContent = error.message;
}

by("examples").append(...EXAMPLES.map((text) => {
  const button = make("button", { type: "button", text });
  button.addEventListener("click", () => (!running || comparing) && askNext(text));
  return button;
}));
drawLegend();
by("prompt").focus();
load().catch(showFailure);
