"use strict";
// What all views share: the data, words, colours, charts that live until language or theme change.
const DATA = JSON.parse(document.getElementById("data").textContent);
const VIEWS = {}; // name -> {draw(), leave()}, filled by the view's own file
const state = { language: "en", dark: false, view: "overview" };
const PALETTE = [
  "#4c78a8",
  "#f58518",
  "#54a24b",
  "#e45756",
  "#72b7b2",
  "#b279a2",
  "#9d755d",
  "#bab0ac",
  "#eeca3b",
  "#ff9da6",
];
const charts = new Map();
const $ = (id) => document.getElementById(id);

const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);

function say(key, values = {}) {
  return filled(DATA.words[state.language][key] ?? key, values);
}

function sentence(note) {
  // of the planner: its own words, or the same in Chinese
  const chinese = state.language === "zh" && DATA.notes_zh[note.key];
  return chinese ? filled(chinese, note.values) : note.text;
}

function part(name) {
  // "tp exposed" and "gemm" alike
  const [axis, exposed] = name.split(" ");
  if (exposed) return say("exposed", { axis: say(axis) });
  return say(name === "bubble" ? "bubbleTime" : name);
}

function figure(value, digits = 3) {
  return value === 0
    ? "0"
    : Number(value.toPrecision(digits)).toLocaleString(state.language, {
        maximumFractionDigits: 6,
      });
}

function theme(name) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
}

function chart(id, height, option, label) {
  // made anew: the canvas knows one language and theme
  charts.get(id)?.dispose();
  const box = $(id);
  box.style.height = height + "px";
  if (label) box.setAttribute("aria-label", label);
  const made = echarts.init(box, state.dark ? "dark" : null, {
    locale: state.language === "zh" ? "ZH" : "EN",
  });
  made.setOption({
    animation: false,
    backgroundColor: "transparent",
    color: PALETTE,
    textStyle: { color: theme("front"), fontFamily: getComputedStyle(document.body).fontFamily },
    ...option,
  });
  charts.set(id, made);
  return made;
}

function axisStyle(more) {
  return {
    axisLabel: { color: theme("front") },
    axisLine: { lineStyle: { color: theme("faint") } },
    splitLine: { lineStyle: { color: theme("line") } },
    nameTextStyle: { color: theme("front") },
    ...more,
  };
}

const legend = (more = {}) => ({
  type: "scroll",
  top: 0,
  textStyle: { color: theme("front") },
  ...more,
});
const narrow = () => document.body.clientWidth < 600;

function rows(table, head, lines) {
  // a table built from text alone
  table.textContent = "";
  const line = (cells, kind, parent) => {
    const row = parent.insertRow();
    for (const cell of cells) {
      const box = document.createElement(kind);
      if (kind === "th") box.scope = "col";
      box.textContent = cell.text ?? cell;
      if (cell.bad) box.className = "bad";
      row.append(box);
    }
  };
  line(head, "th", table.createTHead());
  const body = table.createTBody();
  lines.forEach((cells) => line(cells, "td", body));
}

function show(view) {
  for (const name of Object.keys(VIEWS)) {
    const chosen = name === view;
    if (!chosen && name === state.view) VIEWS[name].leave?.();
    $(name).hidden = !chosen;
    $("tab-" + name).setAttribute("aria-selected", chosen);
    $("tab-" + name).tabIndex = chosen ? 0 : -1;
  }
  state.view = view;
  VIEWS[view].draw();
}

function write() {
  // every word, then the view that is seen
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  document.documentElement.dataset.theme = state.dark ? "dark" : "light";
  document.querySelectorAll("[data-word]").forEach((box) => {
    box.textContent = say(box.dataset.word);
  });
  document
    .querySelectorAll("[data-label]")
    .forEach((box) => box.setAttribute("aria-label", say(box.dataset.label)));
  $("language").textContent = say("language");
  $("language").lang = state.language === "zh" ? "en" : "zh-CN";
  $("theme").setAttribute("aria-pressed", state.dark);
  $("title").textContent = DATA.title;
  const plan = DATA.compare[0];
  $("summary").textContent =
    say("summary", {
      devices: DATA.overview.devices,
      gpu: DATA.gpu,
      step: figure(plan.step),
      rate: figure(plan.rate),
      bubble: figure(100 * plan.bubble, 2),
      peak: figure(plan.total),
      capacity: figure(plan.capacity),
    }) + (plan.fits ? "" : " — " + say("tooBig"));
  $("notes").textContent = "";
  for (const note of DATA.notes.length ? DATA.notes.map(sentence) : [say("none")]) {
    const item = document.createElement("li");
    item.textContent = note;
    $("notes").append(item);
  }
  show(state.view);
}

function start() {
  state.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  state.language = (navigator.language || "en").startsWith("zh") ? "zh" : "en";
  const names = Object.keys(VIEWS);
  $("language").onclick = () => {
    state.language = state.language === "zh" ? "en" : "zh";
    write();
  };
  $("theme").onclick = () => {
    state.dark = !state.dark;
    write();
  };
  names.forEach((name, at) => {
    const tab = $("tab-" + name);
    tab.onclick = () => show(name);
    tab.onkeydown = (event) => {
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[
        event.key
      ];
      if (next === undefined) return;
      event.preventDefault();
      const other = names[(next + names.length) % names.length];
      show(other);
      $("tab-" + other).focus();
    };
  });
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => VIEWS[state.view].draw(), 150);
  });
  write();
}
