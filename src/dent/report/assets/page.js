const data = JSON.parse(document.getElementById("data").textContent);
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

/** Open the contents where the page is wide, and highlight the section being read. */
function setUpContents() {
  const box = document.querySelector("nav details");
  if (!box) return;
  const wide = matchMedia("(min-width: 72rem)");
  const fold = () => { box.open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !links.has(entry.target.id)) continue;
      links.forEach((link) => link.classList.remove("here"));
      links.get(entry.target.id).classList.add("here");
    }
  }, { rootMargin: "0px 0px -70% 0px" });
  document.querySelectorAll("section, .chapter").forEach((section) => watch.observe(section));
}

/** Open the chapter that a link leads to, and all chapters on paper. */
function setUpChapters() {
  const chapters = [...document.querySelectorAll("details.chapter")];
  if (!chapters.length) return;
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const chapter = target?.closest("details.chapter");
    if (!chapter) return;
    chapter.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => { // the same link again changes no address
    if (event.target.closest("a")?.hash === location.hash) reveal();
  });
  addEventListener("beforeprint", () => chapters.forEach((chapter) => { chapter.open = true; }));
  reveal();
}

/* Tables */

function setUpSorting(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const turned = { ascending: "descending", descending: "ascending" };
      const order = turned[head.getAttribute("aria-sort")] ?? first;
      for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", order);
      for (const body of table.tBodies) sortRows(body, column, head.classList.contains("number"), order);
    });
  });
}

/** Sort the rows of a group: rows without a value come last in both orders, the heading stays first. */
function sortRows(body, column, isNumber, order) {
  const sign = order === "ascending" ? 1 : -1;
  const key = (row) => row.cells[column].dataset.sort;
  const compare = (one, other) => (isNumber ? one - other : one.localeCompare(other));
  const rows = [...body.rows].filter((row) => !row.classList.contains("heading"));
  const known = rows.filter((row) => key(row) !== undefined);
  known.sort((one, other) => sign * compare(key(one), key(other)));
  body.append(...known, ...rows.filter((row) => key(row) === undefined));
}

/* Plots */

/** Draw a plot. It follows the width of its box; it is drawn again if its legend needs other columns. */
function setUpPlot(box) {
  const spec = data.plots[box.dataset.plot];
  const tooltip = { theme: "custom", disableDefaultStyle: true };
  const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, tooltip };
  let drawn = 0;
  new ResizeObserver(() => {
    const columns = Math.max(1, Math.floor((box.clientWidth - 50) / spec.usermeta.legend));
    if (columns === drawn || !box.clientWidth) return;
    drawn = columns;
    const config = { ...data.config, legend: { ...data.config.legend, columns } };
    vegaEmbed(box, spec, { ...options, config });
  }).observe(box);
}

/* Images, stored as bytes */

const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));

/** Fill a canvas; valueAt(i) is the i-th byte of the image, row by row, channel by channel. */
function paint(canvas, battle, valueAt) {
  const [height, width] = battle.size;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let channel = 0; channel < 3; channel++) {
      const own = battle.channels === 1 ? 0 : channel;
      image.data[4 * pixel + channel] = valueAt(pixel * battle.channels + own);
    }
    image.data[4 * pixel + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function paintImage(canvas, battle, image, frame) {
  const natural = bytesOf(image.natural);
  const delta = frame ? new Int8Array(bytesOf(frame.delta).buffer) : null;
  paint(canvas, battle, (i) => natural[i] + (delta ? (255 * frame.scale * delta[i]) / 127 : 0));
}

function paintDelta(canvas, battle, image, frame) {
  const delta = new Int8Array(bytesOf(frame.delta).buffer);
  const factor = magnification(image);
  paint(canvas, battle, (i) => 127.5 + (255 * factor * frame.scale * delta[i]) / 127);
}

/** Return a frame of one side. Images that both models were asked are stored at the static one. */
function frameOf(image, side, step) {
  const at = Math.min(step, image[side].frames.length - 1);
  const { delta, scale, size } = image.static.frames[Math.min(at, image.static.frames.length - 1)];
  return { delta, scale, size, ...image[side].frames[at] };
}

/** Return the factor for all frames of an image: its largest change becomes black or white. */
function magnification(image) {
  const scales = ["static", "defended"].flatMap((side) => image[side].frames.map((frame) => frame.scale ?? 0));
  const largest = Math.max(...scales);
  return largest > 0 ? 0.5 / largest : 1;
}

function paintGallery() {
  for (const canvas of document.querySelectorAll("canvas[data-battle]")) {
    const battle = data.battles[canvas.dataset.battle];
    const image = battle.images[canvas.dataset.image];
    const frame = canvas.dataset.side ? frameOf(image, canvas.dataset.side, Infinity) : null;
    (canvas.dataset.what === "delta" ? paintDelta : paintImage)(canvas, battle, image, frame);
  }
}

/* The battle */

const className = (battle, number) => battle.classes?.[number] ?? `class ${number}`;
const largestOf = (values) => values.indexOf(Math.max(...values));

function setUpBattle(box) {
  const records = JSON.parse(box.dataset.records).map((one) => (
    { ...one, battles: one.battles.map((number) => data.battles[number]) }));
  const at = { record: 0, attack: 0, image: 0, step: 0, timer: null };
  const choose = make("select", { "aria-label": "Model and defense" });
  records.forEach((one, number) => choose.append(make("option", { value: number }, one.name)));
  const chooseAttack = make("select", { "aria-label": "Attack" });
  const about = make("p", { class: "about" });
  const thumbs = make("div", { class: "thumbs", role: "group", "aria-label": "Image" });
  const slider = make("input", { type: "range", min: 0, step: 1, "aria-label": "Step of the attack" });
  const shown = make("output", { "aria-live": "off" });
  const play = make("button", { type: "button", class: "play" }, "play");
  const back = make("button", { type: "button", "aria-label": "One step back" }, "‹");
  const next = make("button", { type: "button", "aria-label": "One step on" }, "›");
  const stage = make("div", { class: "stage" });
  let views = [];

  const current = () => records[at.record].battles[at.attack];
  const last = () => current().images[at.image].defended.frames.length - 1;

  function show(step) {
    at.step = Math.min(Math.max(step, 0), last());
    slider.value = at.step;
    shown.textContent = `step ${at.step} of ${last()}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
    back.disabled = at.step === 0;
    next.disabled = at.step === last();
    views.forEach((view) => view(at.step));
  }

  function stop() {
    clearInterval(at.timer);
    at.timer = null;
    play.textContent = "play";
  }

  function start() {
    if (at.step === last()) show(0);
    play.textContent = "pause";
    at.timer = setInterval(() => {
      show(at.step + 1);
      if (at.step === last()) stop();
    }, 600);
  }

  function setStage() {
    const battle = current();
    const { defense } = records[at.record];
    const image = battle.images[at.image];
    [...thumbs.children].forEach((thumb, number) => thumb.setAttribute("aria-pressed", number === at.image));
    const sides = make("div", { class: "sides" });
    views = [];
    for (const side of ["static", "defended"]) {
      const [panel, view] = makeSide(battle, image, side, defense);
      sides.append(panel);
      views.push(view);
    }
    const lines = ["static", "defended"].map((side) => ({
      side, values: image[side].frames.map((frame) => frame.probabilities[image.label]),
    }));
    const chart = makeChart(8, 1);
    chart.draw(lines);
    const caption = make("p", { class: "legend" },
      `Probability of the true class*, ${className(battle, image.label)}, over the steps:`,
      make("i", { class: "static" }), "static", make("i"), "defended");
    stage.replaceChildren(sides, make("div", { class: "whole chart" }, caption, chart.area));
    views.push((step) => chart.mark(step));
    slider.max = last();
    show(last());
  }

  function setAttack() {
    const battle = current();
    about.textContent = records[at.record].captions[at.attack];
    thumbs.replaceChildren(...battle.images.map((image, number) => {
      const canvas = make("canvas");
      paintImage(canvas, battle, image, null);
      const label = `${className(battle, image.label)}, image ${image.point}`;
      const button = make("button", { type: "button", title: label, "aria-label": label }, canvas);
      button.addEventListener("click", () => { stop(); at.image = number; setStage(); });
      return button;
    }));
    at.image = Math.min(at.image, battle.images.length - 1);
    setStage();
  }

  function setRecord() {
    const { battles } = records[at.record];
    chooseAttack.replaceChildren(...battles.map((one, number) => make("option", { value: number }, one.attack)));
    chooseAttack.hidden = battles.length < 2;
    at.attack = 0;
    at.image = 0;
    setAttack();
  }

  choose.addEventListener("change", () => { stop(); at.record = Number(choose.value); setRecord(); });
  chooseAttack.addEventListener("change", () => { stop(); at.attack = Number(chooseAttack.value); setAttack(); });
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  back.addEventListener("click", () => { stop(); show(at.step - 1); });
  next.addEventListener("click", () => { stop(); show(at.step + 1); });
  play.addEventListener("click", () => (at.timer === null ? start() : stop()));
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "The battle; arrow keys step through the attack");
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || [choose, chooseAttack, slider].includes(event.target)) return; // which have keys of their own
    event.preventDefault();
    stop();
    show(at.step + move);
  });
  const choices = make("div", { class: "choices" }, ...(records.length > 1 ? [choose] : []), chooseAttack, thumbs);
  box.append(choices, about, make("div", { class: "transport" }, play, back, next, slider, shown), stage);
  setRecord();
}

/** Return the panel of one of the two models, and the function that shows a step in it. */
function makeSide(battle, image, side, defense) {
  const frames = image[side].frames;
  const adversarial = make("canvas", { role: "img", "aria-label": `image attacked, ${side} model` });
  const delta = make("canvas", { role: "img", "aria-label": "perturbation, magnified" });
  const says = make("p", { class: "says" });
  const measures = make("p", { class: "measures" });
  const classes = make("ul", { class: "classes" });
  const other = make("p", { class: "other" });
  const adaptation = make("div", { class: "adaptation" });
  const bars = shownClasses(battle, image).map((number) => {
    const fill = make("div", { class: "fill" });
    const share = make("span", { class: "share" });
    const truth = number === image.label;
    const label = className(battle, number) + (truth ? " *" : "");
    classes.append(make("li", truth ? { class: "truth" } : {},
      make("span", { class: "name", title: truth ? `${label} the true class` : label }, label),
      make("div", { class: "track" }, fill), share));
    return { number, fill, share };
  });
  const traces = makeTraces(frames, adaptation, side);
  const factor = Math.round(magnification(image));
  const panel = make("div", { class: `side ${side}` }, make("h3", {}, side === "static" ? "static" : defense),
    make("div", { class: "frames" },
      make("div", {}, adversarial, "attacked image"), make("div", {}, delta, `perturbation × ${factor}`)),
    says, measures, classes, other, adaptation);

  function view(step) {
    const frame = frameOf(image, side, step);
    paintImage(adversarial, battle, image, frame);
    paintDelta(delta, battle, image, frame);
    says.replaceChildren(...verdict(battle, image.label, frame.probabilities));
    says.className = `says ${largestOf(frame.probabilities) === image.label ? "right" : "wrong"}`;
    measures.textContent = `entropy ${frame.entropy.toFixed(2)} · ${battle.norm} ${frame.size.toFixed(3)}`;
    for (const { number, fill, share } of bars) {
      fill.style.width = `${100 * frame.probabilities[number]}%`;
      share.textContent = percent(frame.probabilities[number], 1);
    }
    const reader = side === "static" ? "defended" : "static";
    const answer = image[side].answers?.[reader];
    other.replaceChildren(...(step >= frames.length - 1 && answer && !battle.shared
      ? [`Given this image, the ${reader} model says `, ...verdict(battle, image.label, answer), "."] : []));
    traces(frame);
  }
  return [panel, view];
}

function verdict(battle, label, probabilities) {
  const answer = largestOf(probabilities);
  const said = `${className(battle, answer)} ${percent(probabilities[answer])} `;
  return [said, make("span", { class: "verdict" }, answer === label ? "✓ right" : "✗ wrong")];
}

/** Return at most ten classes: the true one, and those that are most probable at some step. */
function shownClasses(battle, image) {
  const frames = [...image.static.frames, ...image.defended.frames];
  const peak = (number) => Math.max(...frames.map((frame) => frame.probabilities[number]));
  const all = frames[0].probabilities.map((_, number) => number).filter((number) => number !== image.label);
  const most = all.sort((one, other) => peak(other) - peak(one)).slice(0, 9);
  return [image.label, ...most].sort((one, other) => one - other);
}

/** Add charts of the updates within a step; return the function that draws those of a frame. */
function makeTraces(frames, box, side) {
  const kinds = { entropies: "entropy", moves: "size of Delta", sigma: "Sigma" };
  const drawn = [];
  for (const [key, title] of Object.entries(kinds)) {
    const every = frames.flatMap((frame) => frame[key] ?? []);
    if (!every.length) continue;
    const largest = Math.max(...every) || 1;
    const caption = make("p");
    const chart = makeChart(3.2, largest);
    box.append(make("div", { class: "chart defended" }, caption, chart.area));
    drawn.push((frame) => {
      const values = frame[key] ?? [];
      const ends = values.length ? `${values[0].toFixed(2)} → ${values[values.length - 1].toFixed(2)}` : "";
      caption.textContent = `${title} over ${values.length - 1} updates: ${ends}`;
      chart.draw([{ side: "defended", values }]);
    });
  }
  if (!drawn.length) box.append(make("p", { class: "measures" }, side === "static" ? "It does not adapt." : "Its updates leave no trace."));
  return (frame) => drawn.forEach((draw) => draw(frame));
}

/** Return a small line chart from 0 to `largest`, as wide as its place. */
function makeChart(height, largest) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const area = make("div", { class: "area" }, svg);
  area.style.setProperty("--height", `${height}rem`);
  const place = (line, i) => [(100 * i) / Math.max(line.values.length - 1, 1), 100 - (100 * line.values[i]) / largest];
  let lines = [];
  return {
    area,
    draw(drawn) {
      lines = drawn;
      svg.replaceChildren(...lines.map((line) => {
        const polyline = document.createElementNS(space, "polyline");
        polyline.setAttribute("class", line.side);
        polyline.setAttribute("points", line.values.map((_, i) => place(line, i).join(",")).join(" "));
        return polyline;
      }));
    },
    mark(step) {
      area.querySelectorAll(".now, .dot").forEach((mark) => mark.remove());
      for (const line of lines) {
        const [left, top] = place(line, Math.min(step, line.values.length - 1));
        const dot = make("span", { class: `dot ${line.side}` });
        dot.style.left = `${left}%`;
        dot.style.top = `${top}%`;
        if (line === lines[0]) {
          const now = make("span", { class: "now" });
          now.style.left = `${left}%`;
          area.append(now);
        }
        area.append(dot);
      }
    },
  };
}

setUpTheme();
setUpContents();
setUpChapters();
document.querySelectorAll("main table").forEach(setUpSorting);
paintGallery();
document.querySelectorAll(".battle").forEach(setUpBattle);
document.querySelectorAll("[data-plot]").forEach(setUpPlot);
