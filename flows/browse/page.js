// The page of `semix browse`. Its state is the address after `#`, so that every view is a link.
// All text from the server goes through textContent: nothing in a root becomes markup.

const PAGE = 24; // series
const POLL_MS = 1000; // while all records are being read
const NOTICE_MS = 4000;
const LIMITS = ["max_correlation", "min_fall", "min_disagreement", "max_stability"];
const ONE_VALUE = ["round", "state", "flag", "sort", ...LIMITS];
const NEEDS_MEASURES = ["correlation", "fall", "disagreement", "stability"];
const PIXEL_ART = 64; // pixels; smaller images are enlarged without smoothing

const $ = (id) => document.getElementById(id);
const filters = $("filters");
let root; // facts that do not change
let rows = []; // of the page of series that is shown
let neighbours = {};
let listed = ""; // the query of that page
let opened; // facts of the series that is shown
let request = 0; // number of the latest request for a page of series
let noticeTimer;

function el(tag, attributes = {}, ...children) {
  const node = document.createElementNS(
    tag === "svg" || attributes.svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const count = (number) => number.toLocaleString("en");
const fixed = (value, digits = 2) => value === null ? "–" : (value + 0).toFixed(digits).replace("-", "−");
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; start `semix browse` again");
  }
  if (answer.headers.get("content-type")?.startsWith("application/json")) {
    const values = await answer.json();
    if (answer.ok) return values;
    throw new Error(values.error ?? "this address is not understood");
  }
  throw new Error((await answer.text()).trim());
}

const post = (path, body) => ask(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}),
});

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = false;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => { $("notice").hidden = true; }, NOTICE_MS);
}

// The address

const address = () => new URLSearchParams(location.hash.slice(1));

function link(changes) {
  const values = address();
  for (const [name, value] of Object.entries(changes)) {
    values.delete(name);
    for (const item of [value].flat()) if (item !== null && item !== "") values.append(name, item);
  }
  return "#" + values;
}

function go(changes, { replace = false, state = history.state } = {}) {
  const target = link(changes);
  if (replace) history.replaceState(state, "", target);
  else history.pushState(state, "", target);
  show();
}

function query(values = address()) {
  const asked = new URLSearchParams();
  for (const target of values.getAll("class")) asked.append("classes", target);
  for (const name of ONE_VALUE) if (values.get(name)) asked.set(name, values.get(name));
  return asked;
}

async function show() {
  const values = address();
  fillFilters(values);
  await Promise.all([showList(values), showSeries(values)].map((shown) => shown.catch((e) => notice(e.message))));
}

// The list

function fillFilters(values) {
  const [first = "", second = ""] = values.getAll("class");
  filters.first.value = first;
  filters.second.value = second;
  for (const name of ONE_VALUE) filters[name].value = values.get(name) ?? "";
  $("clear").hidden = !query(values).size;
  if (LIMITS.some((name) => values.get(name))) $("limits").open = true;
}

async function showList(values, { again = false } = {}) {
  const asked = query(values);
  asked.set("offset", values.get("offset") ?? 0);
  asked.set("limit", PAGE);
  if (!again && listed === String(asked)) return markCurrent();
  listed = String(asked);
  const number = ++request;
  let page;
  try {
    page = await ask(`/api/series?${asked}`);
  } catch (error) {
    listed = "";
    throw error;
  }
  if (number !== request) return; // a later one is under way
  rows = page.rows;
  showState(page);
  $("rows").replaceChildren(...listItems(rows, values.get("sort") === "pair"));
  $("empty").hidden = page.total > 0;
  $("pages").hidden = page.total <= PAGE;
  const last = page.offset + rows.length;
  $("range").textContent = `${count(page.offset + 1)}–${count(last)} of ${count(page.total)}`;
  $("earlier").disabled = page.offset === 0;
  $("later").disabled = last >= page.total;
  markCurrent();
}

function listItems(rows, grouped) {
  const items = [];
  let heading = "";
  for (const row of rows) {
    const pair = pairText(row);
    const title = root.rounds.length > 1 ? `${pair}, round ${row.round}` : pair;
    if (grouped && title !== heading) items.push(el("li", {}, el("h2", {}, title)));
    heading = title;
    items.push(el("li", {}, listRow(row)));
  }
  return items;
}

function listRow(row) {
  const strip = row.left_out !== null ? el("span", {}, `left out: ${row.left_out}`) : picture(row);
  return el("a",
    { href: link({ series: row.group, image: null }), "data-group": row.group, class: row.excluded ? "excluded" : null,
      onclick: (event) => openSeries(event, row.group) },
    el("span", { class: "name" }, el("b", {}, `series ${row.group}`), el("small", {}, ...pairNames(row.classes))),
    strip,
    el("span", { class: "measures" }, ...measureTexts(row), ...tags(row)));
}

function picture(row) {
  const image = el("img", { loading: "lazy", alt: `images of series ${row.group}`, src: `/strip/${row.group}?v=${row.version}` });
  image.addEventListener("load", () => {
    if (image.naturalHeight <= PIXEL_ART) image.className = "pixelated";
  });
  image.addEventListener("error", async () => {
    const problem = await ask(`/strip/${row.group}?v=${row.version}`).catch((error) => error.message);
    image.replaceWith(el("span", {}, String(problem)));
  });
  return image;
}

function measureTexts(row) {
  const texts = [];
  if (row.correlation !== null) texts.push(["correlation", row.correlation, "rank correlation of alpha and CLIP weight"]);
  if (row.fall >= 0.005) texts.push(["fall", row.fall, "largest fall of the CLIP weight along alpha"]);
  if (row.disagreement !== null) texts.push(["disagreement", row.disagreement, "largest difference between both encoders' labels"]);
  if (row.stability !== null) texts.push(["stability", row.stability, "inversion stability of the noise"]);
  return texts.map(([name, value, title]) => el("span", { title }, `${name} ${fixed(value)}`));
}

function tags(row) {
  const names = [...row.flags.map((flag) => flag.replace("_", " ")), ...(row.excluded ? ["excluded"] : [])];
  return names.map((name) => el("span", { class: "tag" }, name));
}

const pairText = (row) => row.classes.map((k) => root.classes[k]).join(" · ") || "pair not read yet";

function pairNames(classes) {
  if (!classes.length) return ["not read yet"];
  const [first, ...others] = classes.map((k) => root.classes[k]);
  return [el("bdi", { class: "second" }, others.join(" + ")), " → ", el("bdi", { class: "first" }, first)];
}

function markCurrent() {
  const current = address().get("series");
  for (const anchor of document.querySelectorAll("#rows a")) {
    if (anchor.dataset.group === current) {
      anchor.setAttribute("aria-current", "true");
      if (document.body.classList.contains("open")) anchor.scrollIntoView({ block: "nearest" });
    } else anchor.removeAttribute("aria-current");
  }
}

function showState(state) {
  const texts = [`${count(state.series)} series`];
  if (state.series < root.planned) texts[0] += ` of ${count(root.planned)} planned`;
  if (state.left_out) texts.push(`${count(state.left_out)} left out by the build`);
  texts.push(`${count(state.num_excluded)} excluded`);
  $("counts").textContent = texts.join(" · ");
  $("problems").hidden = !state.problems.length;
  $("problems").firstElementChild.textContent = `${state.problems.length === 1 ? "1 problem" : `${count(state.problems.length)} problems`}; everything intact is shown`;
  $("problems").lastElementChild.replaceChildren(...state.problems.map((problem) => el("li", {}, problem)));
  showMeasuring(state);
}

function showMeasuring(state) {
  const box = $("measuring"), done = state.measured_shards >= state.shards;
  box.hidden = done;
  if (done) return;
  if (state.measuring) {
    box.textContent = `reading records: ${count(state.measured_shards)} of ${count(state.shards)} shards; orders and limits cover these`;
  } else if (!box.querySelector("button")) {
    const gigabytes = (root.bytes / 1e9).toFixed(root.bytes < 1e10 ? 2 : 0);
    const start = async () => { await post("/api/measure").catch((error) => notice(error.message)); poll(); };
    box.replaceChildren(`for orders and limits, all records must be read: up to ${gigabytes} GB`,
      el("button", { type: "button", onclick: start }, "read them"));
  }
}

let polling = false;
async function poll() {
  if (polling) return;
  polling = true;
  for (;;) {
    const state = await ask("/api/state").catch(() => null);
    if (!state || !state.measuring) break;
    showState(state);
    const done = state.measured_shards >= state.shards;
    const values = address();
    if (done || NEEDS_MEASURES.includes(values.get("sort")) || rows.some((row) => !row.measured && row.left_out === null)) {
      await showList(values, { again: true }).catch(() => null);
    }
    if (done) break;
    await wait(POLL_MS);
  }
  polling = false;
}

// One series

function openSeries(event, group) {
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  openGroup(group);
}

function openGroup(group) {
  // Going from one series to the next replaces the address, so that "back" leads to the list.
  const replace = address().has("series");
  go({ series: group, image: null }, { replace, state: replace ? history.state : { opened: true } });
}

function closeSeries() {
  if (!address().has("series")) return;
  if (history.state?.opened) history.back();
  else go({ series: null, image: null }, { replace: true });
}

async function showSeries(values) {
  const group = values.get("series");
  document.body.classList.toggle("open", group !== null);
  $("series").hidden = group === null;
  if (group === null) { opened = undefined; return; }
  const sets = [values.get("labels") ?? "", ...(values.has("beside") ? [values.get("beside")] : [])];
  const key = JSON.stringify([group, sets]);
  if (opened?.key !== key) {
    const labels = new URLSearchParams(sets.map((name) => ["labels", name === "shards" ? "" : name]));
    let facts;
    try {
      facts = await ask(`/api/series/${encodeURIComponent(group)}?${labels}`);
    } catch (error) {
      if (address().get("series") === group) showBroken(group, error.message);
      return;
    }
    if (address().get("series") !== group) return;
    opened = { key, ...facts };
    drawSeries();
    if (!matchMedia("(min-width: 901px)").matches) scrollTo(0, 0);
  }
  if (opened.order) showImage(imageOf(values));
  await showNeighbours(values, group);
}

function showBroken(group, problem) {
  opened = undefined;
  $("series").replaceChildren(
    el("header", {}, closeButton(), el("h2", {}, `series ${group}`)), el("p", {}, problem));
}

const closeButton = () => el("button", { type: "button", id: "close", onclick: closeSeries }, "back");

function imageOf(values) {
  const last = opened.order.length - 1;
  const image = values.has("image") ? Number(values.get("image")) : Math.floor(last / 2);
  return Math.max(0, Math.min(last, Number.isInteger(image) ? image : 0));
}

function drawSeries() {
  const facts = opened;
  const header = el("header", {}, closeButton(),
    el("h2", {}, `series ${facts.group}`), el("span", { class: "place", id: "place" }),
    el("button", { type: "button", id: "previous", "aria-label": "previous series", disabled: true, onclick: () => step(-1) }, "‹"),
    el("button", { type: "button", id: "next", "aria-label": "next series", disabled: true, onclick: () => step(1) }, "›"));
  if (facts.left_out !== null) {
    $("series").replaceChildren(header, el("p", {}, `left out by the build: ${facts.left_out}`));
    return;
  }
  header.append(el("button", { type: "button", id: "exclude", onclick: toggleExcluded }),
    el("span", { class: "tags", id: "tags" }));
  const [first, ...others] = facts.names;
  const last = facts.order.length - 1;
  $("series").replaceChildren(header,
    el("div", { class: "image" }, el("img", { id: "image", alt: "" })),
    el("div", { class: "run" },
      el("input", { type: "range", id: "alpha", min: 0, max: last, step: 1, "aria-label": "image, by ascending alpha",
        oninput: (event) => go({ image: event.target.value }, { replace: true }) }),
      el("span", { class: "second" }, el("bdi", {}, others.join(" + "))),
      el("span", { class: "first" }, el("bdi", {}, first))),
    el("div", { class: "labels" }, ...facts.labels.map(labelsBox), besideBox()),
    factList());
  for (const position of facts.order) new Image().src = imageAddress(position); // so that the slider runs
  markExcluded();
}

const imageAddress = (position) => `/image/${opened.group}/${position}?v=${opened.version}`;

function labelsBox(labels, number) {
  const name = number ? "beside" : "labels";
  const options = [el("option", { value: number ? "shards" : "" }, "labels in the shards"),
    ...root.label_sets.map((set) => el("option", { value: set.digest }, set.text))];
  if (number) options.unshift(el("option", { value: "" }, "none"));
  const select = el("select", { "aria-label": number ? "labels beside them" : "labels", name,
    onchange: (event) => go({ [name]: event.target.value }, { replace: true }) }, ...options);
  select.value = number ? labels.set || "shards" : labels.set;
  const box = el("div", {}, root.label_sets.length ? select : null);
  if (labels.problem) box.append(el("p", {}, labels.problem));
  else box.append(curve(labels), el("div", { class: "values" }));
  return box;
}

function besideBox() {
  if (!root.label_sets.length || opened.labels.length > 1) return null;
  const options = [el("option", { value: "" }, "compare with…"), el("option", { value: "shards" }, "labels in the shards"),
    ...root.label_sets.map((set) => el("option", { value: set.digest }, set.text))];
  return el("div", {}, el("select", { "aria-label": "labels beside them", name: "beside",
    onchange: (event) => go({ beside: event.target.value }, { replace: true }) }, ...options));
}

function curve(labels) {
  const points = opened.order.map((position) => [opened.alphas[position], labels.weights[position]]);
  const values = points.map(([, weight]) => weight);
  const low = Math.min(0, ...values), high = Math.max(1, ...values);
  const y = (weight) => 100 * (high - weight) / (high - low);
  const path = (points) => "M" + points.map(([alpha, weight]) => `${100 * alpha} ${y(weight)}`).join("L");
  const svg = (tag, attributes) => el(tag, { svg: true, ...attributes });
  const node = svg("svg", { class: "curve", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img",
    "aria-label": "CLIP weight by alpha" });
  node.append(svg("title", {}));
  node.firstChild.textContent = "CLIP weight by alpha; dashed: as large as alpha";
  node.append(
    ...[0, 1].map((weight) => svg("line", { x1: 0, x2: 100, y1: y(weight), y2: y(weight) })),
    svg("path", { class: "ideal", d: path([[0, 0], [1, 1]]) }), svg("path", { d: path(points) }),
    svg("line", { class: "now", y1: 0, y2: 100 }));
  return node;
}

function showImage(number) {
  const facts = opened, position = facts.order[number], alpha = facts.alphas[position];
  const image = $("image");
  image.onload = () => { image.className = image.naturalHeight <= PIXEL_ART ? "pixelated" : ""; };
  image.onerror = () => showImageProblem(position);
  if (!image.src.endsWith(imageAddress(position))) image.src = imageAddress(position);
  image.alt = `image ${number + 1} of ${facts.order.length}, alpha ${fixed(alpha)}`;
  $("alpha").value = number;
  $("alpha").setAttribute("aria-valuetext", `alpha ${fixed(alpha)}`);
  const boxes = $("series").querySelectorAll(".labels > div");
  facts.labels.forEach((labels, index) => {
    if (labels.problem) return;
    const now = boxes[index].querySelector(".now");
    for (const name of ["x1", "x2"]) now.setAttribute(name, 100 * alpha);
    boxes[index].querySelector(".values").replaceChildren(...labelValues(labels, position));
  });
}

async function showImageProblem(position) {
  const problem = await ask(imageAddress(position)).catch((error) => error.message);
  if (opened) notice(String(problem));
}

function labelValues(labels, position) {
  const probabilities = new Map(labels.labels[position]);
  const [first, ...others] = opened.classes;
  const ofFirst = probabilities.get(first) ?? 0;
  const ofOthers = others.reduce((sum, k) => sum + (probabilities.get(k) ?? 0), 0);
  const rest = Math.max(0, 1 - ofFirst - ofOthers);
  const bar = el("span", { class: "bar", role: "img", "aria-label": "soft label" });
  for (const [name, share] of [["second", ofOthers], ["others", rest], ["first", ofFirst]]) {
    const part = el("i", { class: name });
    part.style.width = `${100 * share}%`;
    bar.append(part);
  }
  const shown = [...probabilities].sort((one, other) => other[1] - one[1]).slice(0, 6);
  const entry = (name, value, attributes) => el("div", attributes, el("dt", {}, el("bdi", {}, name)), el("dd", {}, value));
  const mixture = opened.classes.length > 2
    ? opened.mixtures[position].map((weight, k) => entry(`mixed from ${opened.names[k]}`, fixed(weight)))
    : [entry("alpha", fixed(opened.alphas[position], 3))];
  return [bar, el("dl", {}, ...mixture,
    entry("CLIP weight", fixed(labels.weights[position], 3), { class: "weight" }),
    ...shown.map(([k, value]) => entry(root.classes[k] ?? `class ${k}`, fixed(value, 3))),
    ...(labels.difference ? [entry("disagreement", fixed(labels.difference[position], 3))] : []))];
}

function factList() {
  const facts = opened;
  const entries = { seed: facts.seed, noise: facts.noise, shard: facts.tar };
  if (root.rounds.length > 1) entries.round = `${facts.round}: ${root.rounds[facts.round]}`;
  if (facts.correlation !== null) entries["rank correlation"] = fixed(facts.correlation);
  if (facts.fall !== null) entries["largest fall"] = facts.fall ? fixed(facts.fall) : "none, monotone";
  if (facts.disagreement !== null) entries["largest disagreement"] = fixed(facts.disagreement);
  return el("dl", { class: "facts" }, ...Object.entries(entries).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

async function showNeighbours(values, group) {
  const asked = query(values);
  neighbours = await ask(`/api/neighbours/${encodeURIComponent(group)}?${asked}`);
  if (address().get("series") !== group || !$("place")) return;
  const { position, total } = neighbours;
  $("place").textContent = position === null ? "not in this list" : `${count(position + 1)} of ${count(total)}`;
  $("previous").disabled = neighbours.previous === null;
  $("next").disabled = neighbours.next === null;
  if (position === null) return;
  const offset = PAGE * Math.floor(position / PAGE);
  if (offset !== Number(values.get("offset") ?? 0)) {
    history.replaceState(history.state, "", link({ offset: offset || null }));
    await showList(address());
  }
}

function step(by) {
  if (!address().has("series")) {
    if (rows.length) openGroup(rows[by > 0 ? 0 : rows.length - 1].group);
    return;
  }
  const group = by > 0 ? neighbours.next : neighbours.previous;
  if (group !== null && group !== undefined) openGroup(group);
}

function markExcluded() {
  $("series").classList.toggle("excluded", opened.excluded);
  $("exclude").textContent = opened.excluded ? "take back" : "exclude";
  $("tags").replaceChildren(...tags(opened));
}

async function toggleExcluded() {
  if (!opened || opened.left_out !== null) return;
  const facts = opened;
  try {
    const answer = await post("/api/excluded", { group: facts.group, excluded: !facts.excluded });
    facts.excluded = answer.excluded;
    notice(answer.excluded ? `series ${facts.group} is excluded` : `series ${facts.group} is kept`);
  } catch (error) {
    notice(error.message);
    return;
  }
  if (opened === facts) markExcluded();
  await showList(address(), { again: true }).catch((error) => notice(error.message));
}

// Events

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") return document.activeElement?.matches("select, input[type=number]") ? document.activeElement.blur() : closeSeries();
  if (event.target.matches("select, input[type=number]")) return;
  const steps = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 };
  if (event.key in steps) step(steps[event.key]);
  else if (event.key === "x") toggleExcluded();
  else if (["ArrowLeft", "ArrowRight"].includes(event.key) && opened?.order) {
    const last = opened.order.length - 1, now = imageOf(address()) + (event.key === "ArrowRight" ? 1 : -1);
    go({ image: Math.max(0, Math.min(last, now)) }, { replace: true });
  } else return;
  event.preventDefault();
}

function onFilter() {
  const classes = [filters.first.value, filters.second.value].filter((value) => value !== "");
  const values = Object.fromEntries(ONE_VALUE.map((name) => [name, filters[name].value]));
  go({ class: classes, ...values, offset: null }, { replace: true });
}

function onReset(event) {
  event.preventDefault();
  go({ class: null, offset: null, ...Object.fromEntries(ONE_VALUE.map((name) => [name, null])) }, { replace: true });
}

function move(by) {
  const offset = Math.max(0, Number(address().get("offset") ?? 0) + by * PAGE);
  go({ offset: offset || null }, { replace: address().has("series") });
  $("list").scrollIntoView();
}

function fillOptions() {
  const classes = [el("option", { value: "" }, "any"), ...root.classes.map((name, k) => el("option", { value: k }, name))];
  filters.first.replaceChildren(...classes);
  filters.second.replaceChildren(...classes.map((option) => option.cloneNode(true)));
  filters.round.replaceChildren(el("option", { value: "" }, "all"),
    ...root.rounds.map((by, number) => el("option", { value: number }, `${number}: ${by}`)));
  filters.round.parentElement.hidden = root.rounds.length < 2;
  filters.flag.replaceChildren(el("option", { value: "" }, "any"),
    ...Object.entries(root.flags).map(([name, groups]) => el("option", { value: name }, `${name.replace("_", " ")} (${count(groups)})`)));
  filters.flag.parentElement.hidden = !Object.keys(root.flags).length;
}

async function start() {
  try {
    root = await ask("/api/root");
  } catch (error) {
    notice(error.message);
    return;
  }
  $("url").textContent = root.url;
  document.title = `${root.url.split("/").pop()} · semix browse`;
  fillOptions();
  showState(root);
  await show();
  await firstPictures();
  if (!root.measure_on_request) await post("/api/measure").catch((error) => notice(error.message));
  poll();
}

// Reading all records slows the first view down, so it begins after that.
async function firstPictures() {
  const shown = [...document.querySelectorAll("#rows img")].slice(0, PAGE / 3);
  await Promise.race([wait(3 * POLL_MS), Promise.all(shown.map((image) => image.decode().catch(() => null)))]);
}

filters.addEventListener("change", onFilter);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", onReset);
$("earlier").addEventListener("click", () => move(-1));
$("later").addEventListener("click", () => move(1));
addEventListener("popstate", show);
addEventListener("keydown", onKey);
start();
