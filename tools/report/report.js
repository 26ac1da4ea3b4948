"use strict";

// Invisible characters and those that change the direction of text (printable() in lib/base/text.cc); they are shown as the bytes of their UTF-8.
const unprintable = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/gu;
const hexBytes = (text) => Array.from(new TextEncoder().encode(text), (byte) => "\\x" + byte.toString(16).padStart(2, "0")).join("");
const page = JSON.parse(document.getElementById("data").textContent, (key, value) =>
  typeof value === "string" ? value.replace(unprintable, hexBytes) : value);
const data = page.data;
const dark = matchMedia("(prefers-color-scheme: dark)");

// ---- words

const { format: number } = new Intl.NumberFormat("en-US");
const counted = (n, what) => `${number(n)} ${what}${n === 1 ? "" : /[sx]$/.test(what) ? "es" : "s"}`;
const brief = (x) => (x === null ? "not finite" : x === 0 ? "0" : x >= 1e-3 && x < 1e5 ? String(+x.toPrecision(4)) : x.toExponential(2));
const percent = (x) => `${+(100 * x).toPrecision(3)}%`;
const signedPercent = (x) => `${x < 0 ? "\u2212" : "+"}${percent(Math.abs(x))}`;
const range = (begin, size) => (size === 1 ? number(begin) : `${number(begin)}..${number(begin + size - 1)}`);
const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let u = 0;
  for (; n >= 999.5 && u + 1 < units.length; ++u) n /= 1000;
  return `${u === 0 ? n : n.toPrecision(3)} ${units[u]}`;
}

// Replaces invisible characters, and those that change the direction of text, by their code points.
const visible = (text) => text.replace(/\p{C}/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

// Formats ascending numbers: "{0..3,7}".
function numbersText(numbers) {
  const runs = [];
  for (const n of numbers)
    if (runs.length && runs.at(-1)[1] === n - 1) runs.at(-1)[1] = n;
    else runs.push([n, n]);
  const text = runs.map(([a, b]) => (a === b ? `${a}` : `${a}..${b}`)).join(",");
  return numbers.length === 1 ? text : `{${text}}`;
}

// ---- elements

// Makes an element. String children become text nodes, so markup in them has no effect.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  for (const child of children.flat(Infinity)) element.append(child instanceof Node ? child : visible(String(child)));
  return element;
}

const section = (title, ...children) => h("section", {}, h("h2", {}, title), children);
const tiles = (facts) =>
  h("dl", { class: "tiles" }, facts.filter(([, v]) => v !== null && v !== undefined).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))));

// Appends `count` items to `parent`, `step` at a time. Returns the button that appends more.
function growing(parent, count, make, step = 100) {
  let shown = 0;
  const more = h("button", { class: "more", onclick: grow });
  function grow() {
    const end = Math.min(count, shown + step);
    for (; shown < end; ++shown) parent.append(make(shown));
    more.textContent = `${number(count - shown)} more`;
    more.hidden = shown === count;
  }
  grow();
  return more;
}

function lines(texts, kind) {
  const list = h("ul", { class: kind });
  return [list, growing(list, texts.length, (i) => h("li", {}, texts[i]), 30)];
}

// Makes a table. A head with a leading "#" is a column of numbers. `cells(item)` returns the cells of its row.
function table(heads, items, cells, step) {
  const body = h("tbody");
  const cell = (tag, at, content) => h(tag, { class: heads[at].startsWith("#") ? "number" : "text" }, content);
  const more = growing(body, items.length, (i) => h("tr", {}, cells(items[i]).map((c, at) => cell("td", at, c))), step);
  const head = h("thead", {}, h("tr", {}, heads.map((t, at) => cell("th", at, t.replace("#", "")))));
  return h("div", { class: "scroll", tabindex: 0 }, h("table", {}, head, body), more);
}

// Makes a bar of the parts of a whole: [class, size, text].
function stack(parts, scale = sum(parts.map((p) => p[1]))) {
  const bar = h("div", { class: "stack" });
  for (const [what, size, words] of parts.filter((p) => p[1] > 0)) {
    const part = h("span", { class: `part ${what}`, title: `${what}: ${words}` }, h("span", {}, words));
    part.style.flexGrow = size / scale;
    bar.append(part);
  }
  const rest = h("span");
  rest.style.flexGrow = Math.max(0, 1 - sum(parts.map((p) => p[1])) / scale);
  bar.append(rest);
  return bar;
}
const legend = (words) => h("p", { class: "legend" }, words.map((w) => h("span", {}, h("i", { class: `part ${w}` }), w)));

// ---- drawings

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const heat = (t) => (dark.matches ? `hsl(205 75% ${18 + 55 * t}%)` : `hsl(212 70% ${93 - 60 * t}%)`);
// Less than the mean is blue, more is orange; -1 to 1.
const difference = (t) => `hsl(${t < 0 ? 212 : 28} ${Math.round(75 * Math.min(1, Math.abs(t)))}% ${dark.matches ? 24 + 14 * Math.abs(t) : 94 - 24 * Math.abs(t)}%)`;
const hue = (i, n) => `oklch(${dark.matches ? 0.5 : 0.8} 0.1 ${(360 * i) / Math.max(n, 1) + 20})`;
const kSteps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// Returns the index of the nearest rectangle [x, y, width, height] in a direction.
function neighbour(rects, from, [dx, dy]) {
  const centre = ([x, y, w, height]) => [x + w / 2, y + height / 2];
  const [cx, cy] = centre(rects[from]);
  let best = from;
  let least = Infinity;
  rects.forEach((r, i) => {
    const [x, y] = centre(r);
    const along = (x - cx) * dx + (y - cy) * dy;
    const far = along + 4 * Math.abs((x - cx) * dy + (y - cy) * dx);
    if (along > 0.1 && far < least) [best, least] = [i, far];
  });
  return best;
}

function hatch(context, [x, y, w, height]) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, height);
  context.clip();
  context.strokeStyle = style("--ink");
  context.globalAlpha = 0.5;
  context.beginPath();
  for (let d = -height; d < w; d += 7) {
    context.moveTo(x + d, y + height);
    context.lineTo(x + d + height, y);
  }
  context.stroke();
  context.restore();
}

// Draws rectangles. The one that is selected by pointer or keys is described below the drawing.
//   place(width)      {rects, height, labels: [text, x, y, room]}
//   fill(i), text(i)  colour and label of each; hatched(i); level(i): the share that is filled, from below
//   tell(i)           its description: text or elements
function plot({ label, place, fill, text, hatched, level = () => 1, tell }) {
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `${label}. Use the arrow keys to select a cell.` });
  const told = h("p", { class: "told", "aria-live": "polite" }, "Hover over a cell, or use the arrow keys.");
  let placed = { rects: [] };
  let chosen = -1;
  const choose = (i) => {
    if (i < 0 || i === chosen || i >= placed.rects.length) return;
    chosen = i;
    told.replaceChildren(...[tell(i)].flat(Infinity).map((t) => (t instanceof Node ? t : visible(t))));
    draw();
  };
  function draw() {
    const width = canvas.parentElement?.clientWidth ?? 0;
    if (width === 0) return;
    placed = place(width);
    const scale = devicePixelRatio;
    canvas.width = width * scale;
    canvas.height = placed.height * scale;
    canvas.style.height = `${placed.height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = `12px ${style("--mono")}`;
    placed.rects.forEach((r, i) => {
      const [x, y, w, height] = r;
      const gap = Math.min(w, height) > 5 ? 1 : 0;
      context.fillStyle = fill(i);
      const filled = Math.max(height - gap, 0.7) * level(i);
      context.fillRect(x, y + height - gap - filled, Math.max(w - gap, 0.7), filled);
      if (hatched?.(i)) hatch(context, r);
      if (text && w > 54 && height > 28) words(context, text(i), x + 5, y + height / 2 + 4, w - 8);
    });
    for (const [t, x, y, room] of placed.labels ?? []) words(context, t, x, y, room);
    if (chosen < 0) return;
    const [x, y, w, height] = placed.rects[chosen];
    context.strokeStyle = style("--accent");
    context.lineWidth = 2.5;
    context.strokeRect(x - 1, y - 1, Math.max(w, 3) + 1, Math.max(height, 3) + 1);
  }
  function words(context, t, x, y, room) {
    let shown = visible(t);
    const all = shown.length;
    while (shown.length > 1 && context.measureText(shown).width > room) shown = `…${t.slice(t.length - shown.length + 2)}`;
    context.fillStyle = style(all === shown.length ? "--ink" : "--soft");
    context.fillText(shown, x, y);
  }
  canvas.addEventListener("pointermove", (e) => e.buttons === 0 && e.pointerType !== "touch" && choose(under(e)));
  canvas.addEventListener("pointerdown", (e) => choose(under(e)));
  canvas.addEventListener("redraw", draw);
  canvas.addEventListener("keydown", (e) => {
    const last = placed.rects.length - 1;
    const target = e.key === "Home" ? 0 : e.key === "End" ? last : kSteps[e.key] && (chosen < 0 ? 0 : neighbour(placed.rects, chosen, kSteps[e.key]));
    if (target === undefined) return;
    e.preventDefault();
    choose(target);
  });
  function under({ offsetX, offsetY }) {
    return placed.rects.findIndex(([x, y, w, height]) => offsetX >= x && offsetX < x + w && offsetY >= y && offsetY < y + height);
  }
  const figure = h("figure", {}, canvas, told);
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(figure);
  return figure;
}
dark.addEventListener("change", () => document.querySelectorAll("canvas").forEach((c) => c.dispatchEvent(new Event("redraw"))));

// Draws a heat map. `cells`: {row, column, value, tell()}; a value that is not finite is red. The scale is logarithmic if the
// values span several orders of magnitude. `show` formats a value for the legend.
function heatMap(label, rows, columns, cells, show = brief) {
  const values = cells.map((c) => c.value).filter((v) => Number.isFinite(v) && v > 0);
  const [least, most] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, 0]);
  const isLogarithmic = most / least > 50;
  const share = (v) => (v <= 0 || most === least ? (v > 0 ? 0.7 : 0) : isLogarithmic ? 0.08 + (0.92 * Math.log(v / least)) / Math.log(most / least) : v / most);
  const place = (width) => {
    const gutter = Math.min(0.44 * width, 8 + 7.4 * Math.max(...rows.map((r) => r.length)));
    const cw = Math.min((width - gutter) / columns.length, 60);
    const every = Math.ceil((7.4 * Math.max(...columns.map((c) => Math.min(c.length, 12))) + 6) / cw);
    const height = 20;
    const labels = rows.map((r, i) => [r, 0, 16 + height * (i + 1) - 6, gutter - 8]);
    columns.forEach((c, i) => i % every === 0 && labels.push([c, gutter + i * cw, 11, every * cw]));
    return { rects: cells.map((c) => [gutter + c.column * cw, 16 + c.row * height, cw, height]), labels, height: 18 + rows.length * height };
  };
  const isBad = cells.some((c) => !Number.isFinite(c.value));
  const key = values.length === 0 ? "" : scale(heat, share(least), share(most), show(least), show(most), isLogarithmic ? "logarithmic" : "linear");
  return [plot({ label, place, fill: (i) => (Number.isFinite(cells[i].value) ? heat(share(cells[i].value)) : style("--bad")), tell: (i) => cells[i].tell() }),
    key, isBad ? h("p", { class: "legend" }, h("span", {}, h("i", { class: "notFinite" }), "not finite")) : ""];
}

// Makes the legend of a map: its colours between two values.
function scale(colour, from, to, least, most, kind) {
  const bar = h("span", { class: "ramp" });
  const paint = () => bar.replaceChildren(...Array.from({ length: 16 }, (_, i) => {
    const step = h("i");
    step.style.background = colour(from + ((to - from) * i) / 15);
    return step;
  }));
  paint();
  dark.addEventListener("change", paint);
  return h("p", { class: "scale" }, h("span", {}, least), bar, h("span", {}, most), h("span", {}, `(${kind} scale)`));
}

// Draws the tensors of a model as modules x layers. `value(tensor)`: null if it is not finite; `more(tensor)`: further
// elements for its description.
function layerMap(label, tensors, value, tell, more = () => "") {
  const modules = new Map();
  const cells = new Map();
  const layerOf = (name) => name.match(/(?:^|\.)(\d+)(?=\.|$)/)?.[1] ?? "";
  const moduleOf = (name, layer) => name.replace(layer === "" ? /$^/ : /(?:^|\.)\d+(?=\.|$)/, "").replace(/\.\d+(?=\.|$)/g, ".*");
  const layers = [...new Set(tensors.map((t) => layerOf(t.name)))].sort((a, b) => (a === "" ? -1 : b === "" ? 1 : a - b));
  const order = new Map(layers.map((l, i) => [l, i]));
  for (const t of tensors) {
    const layer = layerOf(t.name);
    const module = moduleOf(t.name, layer);
    if (!modules.has(module)) modules.set(module, modules.size);
    const key = `${module}\n${layer}`;
    const v = value(t) ?? Infinity;
    const cell = cells.get(key) ?? { row: modules.get(module), column: order.get(layer), value: -1, count: 0 };
    if (v > cell.value) Object.assign(cell, { value: v, tensor: t });
    ++cell.count;
    cells.set(key, cell);
  }
  const all = [...cells.values()];
  for (const c of all) c.tell = () => [`${c.tensor.name}: ${tell(c.tensor)}${c.count > 1 ? `; the largest of ${number(c.count)}` : ""} `, more(c.tensor)];
  return heatMap(label, [...modules.keys()], layers.map((l) => l || "–"), all);
}

// ---- inspect

const expand = (runs) => {
  const out = [];
  for (let i = 0; i < runs.length; i += 3) for (let k = 0; k < runs[i + 2]; ++k) out.push(runs[i] + k * runs[i + 1]);
  return out;
};
const cached = (make) => {
  const made = [];
  return (i) => (made[i] ??= make(i));
};

function inspectPage() {
  const tensors = data.tensors.map(([name, kind, layout, files, copies]) => ({ name, kind, layout, files, copies }));
  const files = data.files.list.map(([path, size, writer]) => ({ path, size, writer }));
  const ranked = files.some((f) => f.writer >= 0);
  const owners = ranked ? 1 + files.reduce((a, f) => Math.max(a, f.writer), 0) : files.length;
  const ownerOf = (file) => (ranked ? files[file].writer : file);
  const numbersOf = cached((i) => expand(data.lists[i]));
  const layoutOf = cached((i) => {
    const { shape, bytes: total, boxes, copies, ...rest } = data.layouts[i];
    const columns = (c) => ({ origins: c.slice(0, shape.length).map(expand), shapes: c.slice(shape.length).map(expand) });
    return { ...rest, shape, total, size: total / Math.max(1, product(shape)), boxes: columns(boxes), copies: columns(copies) };
  });
  // Bytes of box k. A scalar has no columns.
  const boxBytes = (layout, { shapes }, k) => layout.size * product(shapes.map((s) => s[k]));
  const sizesOf = cached((i) => {
    const layout = layoutOf(i);
    return [layout.boxes, layout.copies].map((b) => (b.shapes[0] ?? [0]).map((_, k) => boxBytes(layout, b, k)));
  });

  const held = new Float64Array(files.length);
  for (const t of tensors)
    [t.files, t.copies].forEach((list, which) => numbersOf(list).forEach((f, k) => (held[f] += sizesOf(t.layout)[which][k])));

  const detail = h("div", { id: "detail", "aria-live": "polite" }, h("p", { class: "hint" }, "Select a tensor, a rank or a file."));
  const put = (...content) => detail.replaceChildren(h("div", {}, content));
  const show = (...content) => {
    put(...content);
    if (detail.getBoundingClientRect().top > innerHeight * 0.8) detail.scrollIntoView({ behavior: "smooth" });
  };

  // Lists the tensors that are stored in some files, with their number of shards.
  function showFiles(title, wanted) {
    const rows = [];
    for (const t of tensors) {
      let count = 0;
      let size = 0;
      [t.files, t.copies].forEach((list, which) =>
        numbersOf(list).forEach((f, k) => wanted.has(f) && (++count, (size += sizesOf(t.layout)[which][k]))));
      if (count) rows.push({ t, count, size });
    }
    const paths = [...wanted].map((f) => `${files[f].path}: ${files[f].size < 0 ? "missing" : `${bytes(files[f].size)} on disk`}, ${bytes(held[f])} of tensors`);
    show(h("h3", {}, title), lines(paths), table(["tensor", "#shards", "#bytes"], rows, ({ t, count, size }) => [tensorButton(t, t.name), number(count), bytes(size)]));
  }
  const tensorButton = (t, text) => h("button", { class: "link", onclick: () => showTensor([t], 0) }, text);
  const fileButton = (f) => h("button", { class: "link", onclick: () => showFiles(files[f].path, new Set([f])) }, files[f].path);

  // The two dimensions that are drawn: the sharded ones, otherwise the first and the last.
  function drawnDimensions({ shape, boxes }) {
    const cut = shape.map((_, d) => d).filter((d) => new Set(boxes.origins[d]).size > 1);
    const two = [...new Set([...cut.slice(0, 2), 0, shape.length - 1])].slice(0, 2).sort((a, b) => a - b);
    return { rows: shape.length > 1 ? two[0] : -1, columns: shape.length > 1 ? two[1] : 0, others: cut.filter((d) => !two.includes(d)) };
  }

  function boxMap(t) {
    const layout = layoutOf(t.layout);
    const { shape } = layout;
    const { rows, columns, others } = drawnDimensions(layout);
    const found = new Map();  // a box and its copies are one rectangle
    for (const [boxes, list] of [[layout.boxes, t.files], [layout.copies, t.copies]])
      numbersOf(list).forEach((file, k) => {
        const origin = boxes.origins.map((o) => o[k]);
        const size = boxes.shapes.map((s) => s[k]);
        if (others.some((d) => origin[d] > 0)) return;
        const key = `${origin} ${size}`;
        if (!found.has(key)) found.set(key, { origin, size, files: [] });
        found.get(key).files.push(file);
      });
    const items = [...found.values()];
    const ownerOfItem = (i) => ownerOf(items[i].files[0]);
    const colors = new Map([...new Set(items.map((_, i) => ownerOfItem(i)))].sort((a, b) => a - b).map((o, i) => [o, i]));
    const extent = (d) => (d < 0 || shape.length === 0 ? 1 : Math.max(1, shape[d]));
    const place = (width) => {
      const height = Math.max(48, Math.min(420, (width * extent(rows)) / extent(columns), rows < 0 ? 48 : 420));
      const along = (box, d, room) => (d < 0 || shape.length === 0 ? [0, room] : [(box.origin[d] / extent(d)) * room, (box.size[d] / extent(d)) * room]);
      const rects = items.map((b) => {
        const [x, w] = along(b, columns, width);
        const [y, tall] = along(b, rows, height);
        return [x, y, w, tall];
      });
      return { rects, height };
    };
    const tell = (i) => {
      const b = items[i];
      const where = b.origin.map((o, d) => (d === rows ? "rows " : d === columns ? "columns " : "") + range(o, b.size[d])).join(", ");
      const size = bytes(layout.size * product(b.size));
      const stored = b.files.map((f, n) => [n > 0 ? ", copy in " : " in ", fileButton(f), ranked ? ` of rank ${number(ownerOf(f))}` : ""]);
      return [`shard ${number(i + 1)} of ${number(items.length)}: ${where || "a scalar"}; ${size}`, stored];
    };
    const figure = plot({
      label: `Shards of ${visible(t.name)}`,
      place, tell,
      fill: (i) => hue(colors.get(ownerOfItem(i)), colors.size),
      hatched: (i) => items[i].files.length > 1,
      text: (i) => (ranked ? `rank ${number(ownerOfItem(i))}` : files[items[i].files[0]].path),
    });
    const axis = [`dimension ${Math.max(rows, 0)} downwards`, `dimension ${columns} to the right`].slice(rows < 0 ? 1 : 0).join(", ");
    const note = others.length ? `; only the first shards along dimension ${others.join(", ")}, which is sharded too, are shown` : "";
    const copied = items.some((b) => b.files.length > 1) ? "; hatched: several copies" : "";
    return [figure, h("p", { class: "hint" }, `${shape.length ? axis : "one number"}; colour: ${ranked ? "rank" : "file"}${copied}${note}`)];
  }

  // Returns what is to be seen of one of the tensors that share a row of the tree.
  function aboutTensor(members, at) {
    const t = members[at];
    const layout = layoutOf(t.layout);
    const boxes = numbersOf(t.files).length;
    const copies = numbersOf(t.copies).length;
    const choice = h("select", { "aria-label": "Tensor", onchange: (e) => showTensor(members, +e.target.value) },
      members.map((m, i) => h("option", { value: i, selected: i === at ? "" : undefined }, m.name)));
    return [h("h3", { class: "name" }, t.name), members.length > 1 ? choice : "",
      tiles([["dtype", layout.dtype], ["shape", `[${layout.shape.map(number).join(", ")}]`], ["placement", layout.placement], ["bytes", bytes(layout.total)],
        ["shards", number(boxes) + (copies ? ` and ${number(copies)} ${copies === 1 ? "copy" : "copies"}` : "")]]),
      boxMap(t)];
  }
  function showTensor(members, at) {
    show(...aboutTensor(members, at));
    detail.querySelector("select")?.focus();
  }
  // Until something is selected, the largest tensor of the model.
  const first = largestOf(tensors.some((t) => t.kind === "model") ? tensors.filter((t) => t.kind === "model") : tensors, layoutOf);
  if (first) put(...aboutTensor([first], 0));

  return [
    inspectHead(tensors, layoutOf),
    h("div", { class: "halves" }, h("div", {}, tensorTree(tensors, layoutOf, showTensor)), h("section", { class: "sticky" }, detail)),
    ranked ? rankGrid(files, held, owners, showFiles) : "",
    section("Files", tiles([["files", number(files.length)], ["bytes", bytes(data.files.bytes)], ["largest", bytes(Math.max(0, ...files.slice(0, 1e5).map((f, i) => Math.max(f.size, held[i]))))], ["stale", number(data.files.stale.length)]]),
      table(["file", ...(ranked ? ["#rank"] : []), "#bytes of tensors", "#on disk"],
        inOrder(files), (i) => [fileButton(i), ...(ranked ? [files[i].writer < 0 ? "" : number(files[i].writer)] : []), bytes(held[i]), files[i].size < 0 ? "missing" : bytes(files[i].size)], 20)),
  ];
}

// Sorts by rank, then naturally: file 2 before file 10.
function inOrder(files) {
  const { compare } = new Intl.Collator("en", { numeric: true });
  return files.map((_, i) => i).sort((a, b) => files[a].writer - files[b].writer || compare(files[a].path, files[b].path));
}

const largestOf = (tensors, layoutOf) => tensors.reduce((a, t) => (a && layoutOf(a.layout).total >= layoutOf(t.layout).total ? a : t), null);

function inspectHead(tensors, layoutOf) {
  const { state, objects } = data;
  const largest = largestOf(tensors, layoutOf);
  return tiles([["format", data.format.title], [state.model.parameters === null ? "stored elements" : "parameters", number(state.model.parameters ?? state.model.elements)], ["objects", objects.count ? number(objects.count) : null],
    ["largest", largest && `${largest.name}, ${bytes(layoutOf(largest.layout).total)}`]]);
}

// Draws the ranks in mesh order: the last two axes form a block, and each position on the other axes has a block.
function rankGrid(files, held, ranks, showFiles) {
  const sizes = new Float64Array(ranks);
  files.forEach((f, i) => f.writer >= 0 && (sizes[f.writer] += held[i]));
  const mean = sum([...sizes]) / ranks;
  const off = (rank) => (mean ? sizes[rank] / mean - 1 : 0);
  const furthest = Math.max(0.01, ...Array.from(sizes, (_, rank) => Math.abs(off(rank))));
  let axes = (data.mesh.hypotheses[0] ?? "").split(/, */).map((a) => a.split("=")).map(([name, size]) => [name, +size]).filter(([, n]) => n > 1);
  if (product(axes.map((a) => a[1])) !== ranks) axes = [["rank", ranks]];
  const inner = axes.slice(-2);
  const outer = axes.slice(0, -2);
  const block = product(inner.map((a) => a[1]));
  const last = inner.at(-1)[1];
  const isWide = block / last > last;  // the longer axis goes to the right
  const columns = Math.max(last, block / last);
  const coordinates = (rank) => axes.map(([name, n], i) => `${name} ${Math.floor(rank / product(axes.slice(i + 1).map((a) => a[1]))) % n}`).join(", ");
  const place = (width) => {
    const fit = Math.max(4, Math.min(96, Math.floor(width / columns)));
    const perLine = Math.min(columns, Math.floor(width / fit));
    const chunks = Math.ceil(columns / perLine);
    const tall = fit > 54 ? 40 : Math.min(fit, 18);
    const title = outer.length ? 18 : 0;
    const [bw, bh] = [perLine * fit + 12, (block / columns) * chunks * tall + title + 8];
    const across = Math.max(1, Math.floor((width + 12) / bw));
    const corner = (b) => [(b % across) * bw, Math.floor(b / across) * bh];
    const rects = Array.from(sizes, (_, rank) => {
      const [bx, by] = corner(Math.floor(rank / block));
      const i = rank % block;
      const [u, v] = isWide ? [Math.floor(i / last), i % last] : [i % last, Math.floor(i / last)];
      return [bx + (u % perLine) * fit, by + title + (Math.floor(u / perLine) * (block / columns) + v) * tall, fit, tall];
    });
    const blocks = ranks / block;
    const labels = outer.length ? Array.from({ length: blocks }, (_, b) => [coordinates(b * block).split(", ").slice(0, outer.length).join(", "), corner(b)[0], corner(b)[1] + 13, bw - 12]) : [];
    return { rects, labels, height: Math.ceil(blocks / across) * bh };
  };
  const ofRank = (rank) => new Set(files.map((f, i) => (f.writer === rank ? i : -1)).filter((i) => i >= 0));
  return section("Ranks", h("p", { class: "hint" }, `Bytes of tensors written by each rank, as difference from the mean of ${bytes(mean)}; ${bytes(sum([...sizes]))} in total.`),
    plot({
      label: "Bytes written by each rank", place,
      fill: (i) => difference(off(i) / furthest),
      text: (i) => `${number(i)}: ${signedPercent(off(i))}`,
      tell: (i) => [`rank ${number(i)} (${coordinates(i)}): ${bytes(sizes[i])}, ${signedPercent(off(i))} of the mean. `, h("button", { class: "link", onclick: () => showFiles(`Rank ${number(i)}`, ofRank(i)) }, "list its tensors")],
    }), scale(difference, -1, 1, signedPercent(-furthest), signedPercent(furthest), "linear"));
}

// ---- the tree of tensors

// Groups tensors of one layout whose names differ only in numbers. A number belongs to the word before it:
// `parts` are "layers.3", "attention", ...; `path` is "layers.#", "attention", ...
function foldTensors(tensors) {
  const folds = new Map();
  for (const t of tensors) {
    t.parts ??= t.name.split(/\.(?!\d+(?:\.|$))/);
    t.path ??= t.parts.map((p) => p.replace(/\.\d+(?=\.|$)/g, ".#"));
    const key = `${t.path.join(".")}\n${t.layout}`;
    if (!folds.has(key)) folds.set(key, []);
    folds.get(key).push(t);
  }
  return [...folds.values()];
}

// "layers.#" -> "layers.{0..3}"
function partLabel(folds, depth) {
  const words = folds[0][0].path[depth].split(".");
  const numbers = words.map(() => new Set());
  for (const t of folds.flat()) t.parts[depth].split(".").forEach((text, i) => numbers[i].add(+text));
  return words.map((w, i) => (w === "#" ? numbersText([...numbers[i]].sort((a, b) => a - b)) : w)).join(".");
}

function tensorTree(tensors, layoutOf, choose) {
  const tree = h("div", { class: "tree", id: "tree" });
  const found = h("output", { id: "found" });
  const search = h("input", { type: "search", id: "search", placeholder: "Search names: wq, layers.*.w1", "aria-label": "Search names", oninput: render, autocomplete: "off", spellcheck: "false" });
  const kinds = [...new Set(tensors.map((t) => t.kind))];
  const kind = h("select", { "aria-label": "Kind", onchange: render }, ["all", ...kinds].map((k) => h("option", { value: k }, k)));

  const leaf = (fold, from) => {
    const layout = layoutOf(fold[0].layout);
    const name = fold[0].path.slice(from).map((_, d) => partLabel([fold], from + d)).join(".");
    return h("button", { class: "leaf", onclick: () => choose(fold, 0) }, h("b", {}, name), h("span", {}, layout.dtype), h("span", {}, `[${layout.shape.join(", ")}]`),
      h("span", {}, layout.placement), h("span", { class: "number" }, `${fold.length > 1 ? `${number(fold.length)} × ` : ""}${bytes(layout.total)}`));
  };
  function node(folds, from, depth, isOpen) {
    if (folds.length === 1) return leaf(folds[0], from);
    const children = new Map();
    for (const f of folds) {
      const part = f[0].path[depth] ?? "";
      if (!children.has(part)) children.set(part, []);
      children.get(part).push(f);
    }
    if (children.has("") || folds.every((f) => f[0].path.length === depth)) return h("div", {}, folds.map((f) => leaf(f, from)));
    if (children.size === 1) return node(folds, from, depth + 1, isOpen);
    const inside = () => [...children.values()].map((c) => node(c, depth, depth + 1, isOpen));
    if (depth === 0) return h("div", {}, inside());
    const title = Array.from({ length: depth - from }, (_, d) => partLabel(folds, from + d)).join(".");
    const size = sum(folds.map((f) => f.length * layoutOf(f[0].layout).total));
    const body = h("div", { class: "inside" });
    const fill = () => body.childElementCount || body.append(...inside());
    const details = h("details", { ontoggle: fill, open: isOpen ? "" : undefined }, h("summary", {}, h("b", {}, title), h("span", { class: "number" }, bytes(size))), body);
    if (isOpen) fill();
    return details;
  }
  function render() {
    const query = search.value.trim().toLowerCase();
    const glob = /[*?]/.test(query) && new RegExp(query.replace(/[^\w*?]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, "."));
    const wanted = tensors.filter((t) => (kind.value === "all" || t.kind === kind.value) && (glob ? glob.test(t.name.toLowerCase()) : t.name.toLowerCase().includes(query)));
    const folds = foldTensors(wanted);
    found.textContent = wanted.length === tensors.length ? counted(wanted.length, "tensor") : `${number(wanted.length)} of ${counted(tensors.length, "tensor")}`;
    tree.replaceChildren(folds.length ? node(folds, 0, 0, folds.length <= 60) : h("p", { class: "hint" }, "No tensor matches."));
  }
  render();
  document.addEventListener("keydown", (e) => {
    if (e.key !== "/" || ["INPUT", "SELECT"].includes(document.activeElement.tagName)) return;
    e.preventDefault();
    search.focus();
  });
  return section("Tensors", h("div", { class: "tools" }, search, kinds.length > 1 ? kind : "", found), tree);
}

// ---- verify, check

// Draws the rows of a vocabulary that a finding is about into the finding.
function drawFindings() {
  data.findings.forEach((f, i) => {
    const heading = document.querySelector(`#finding-${i} h3`);
    if (heading && f.rows.length) heading.after(stack(f.rows.map((r) => [r.what, r.rows, `${number(r.rows)} ${r.what}`])), legend(f.rows.map((r) => r.what)));
  });
}

const kMetrics = {
  "largest value": [(t) => t.absmax, (t) => `absmax ${brief(t.absmax)}`],
  "share of zeros": [(t) => t.zeros / Math.max(1, product(t.shape)), (t) => `${percent(t.zeros / Math.max(1, product(t.shape)))} zeros`],
  "NaN and infinities": [(t) => (t.nan + t.inf ? null : 0), (t) => `${counted(t.nan, "NaN")}, ${number(t.inf)} infinite`],
};

// The exponent under which a dtype's subnormal numbers are counted, if it is not float32's.
const kSubnormal = { float16: -15, complex32: -15, float8_e4m3fn: -7, float8_e4m3fnuz: -8, float8_e5m2: -15, float8_e5m2fnuz: -16 };

// Draws the distribution of a tensor's magnitudes, a bar for each power of two.
function exponentBars({ name, dtype, exponents: { first, counts } }) {
  const most = Math.max(...counts);
  const all = sum(counts);
  const tall = 120;
  const place = (width) => {
    const step = Math.min(36, width / counts.length);
    const every = Math.ceil(44 / step);
    const rects = counts.map((_, i) => [i * step, 0, step, tall]);
    const labels = counts.map((_, i) => [`2^${first + i}`, i * step, tall + 14, every * step]).filter((_, i) => i % every === 0);
    return { rects, labels, height: tall + 20 };
  };
  const size = (e) => (e === (kSubnormal[dtype] ?? -127) ? `below 2^${e + 1} (${brief(2 ** (e + 1))})` : e === 128 ? "2^128 and above" : `2^${e} to 2^${e + 1} (${brief(2 ** e)} to ${brief(2 ** (e + 1))})`);
  return plot({
    label: `Elements of ${visible(name)} by exponent`, place, fill: () => heat(0.5),
    level: (i) => (counts[i] ? Math.max(0.02, counts[i] / most) : 0),
    tell: (i) => `magnitude ${size(first + i)}: ${number(counts[i])} of ${counted(all, "element")} that are finite and not zero, ${percent(counts[i] / all)}`,
  });
}

function valuesSection() {
  const kinds = [...new Set(["weights", ...data.tensors.map((t) => t.kind)])];
  const order = (t) => kinds.indexOf(t.kind);
  const tensors = data.tensors.filter((t) => "absmax" in t);
  if (!tensors.length) return "";
  const body = h("div");
  const exponents = h("div", { id: "exponents" });
  const show = (t) => exponents.replaceChildren(h("h3", {}, "Exponents of ", h("code", {}, t.name)),
    t.exponents ? exponentBars(t) : h("p", { class: "hint" }, `None: ${t.dtype}, ${counted(t.zeros, "zero")}.`));
  const jump = (t) => (show(t), exponents.scrollIntoView({ block: "nearest" }));
  // Weights, moments and steps differ by orders of magnitude, so each kind has a map with its own scale.
  const shown = { metric: "largest value", kind: kinds.find((k) => tensors.some((t) => t.kind === k)) };
  const draw = () => body.replaceChildren(...[layerMap(`${shown.metric} by module and layer`, tensors.filter((t) => t.kind === shown.kind), ...kMetrics[shown.metric],
    (t) => h("button", { class: "link", onclick: () => jump(t) }, "its exponents"))].flat(3));
  draw();
  const select = (label, member, words) => h("select", { "aria-label": label, onchange: (e) => ((shown[member] = e.target.value), draw()) }, words.map((w) => h("option", {}, w)));
  const choice = [select("Metric", "metric", Object.keys(kMetrics)), select("Kind of tensors", "kind", kinds.filter((k) => tensors.some((t) => t.kind === k)))];
  const rows = [...tensors].sort((a, b) => b.nan + b.inf - a.nan - a.inf || order(a) - order(b) || b.absmax - a.absmax);
  show(rows.find((t) => t.exponents) ?? rows[0]);
  // The names in the table of tensors show the exponents too.
  data.tensors.forEach((t, i) => "absmax" in t && document.querySelector(`#tensor-${i} a`)?.addEventListener("click", (e) => (e.preventDefault(), jump(t))));
  return section("Values", h("div", { class: "tools" }, choice), body, exponents);
}

function verifyPage() {
  drawFindings();
  return [valuesSection()];
}

function memorySection() {
  if (!data.ranks) return "";
  const { stages, largest, smallest } = data.ranks;
  const most = largest.total;
  const bar = (label, m) => h("div", { class: "bar" }, h("span", {}, label), stack(["weights", "gradients", "optimizer"].map((p) => [p, m[p], bytes(m[p])]), most), h("b", { class: "number" }, bytes(m.total)));
  const layers = (s) => (s.layers === 0 ? "no layers" : `layer${s.layers === 1 ? "" : "s"} ${range(s.first_layer, s.layers)}`);
  return section("Memory per rank", legend(["weights", "gradients", "optimizer"]),
    h("div", { class: "bars" }, stages.map((s) => bar(`stage ${s.stage}: ${layers(s)}`, s.largest))),
    h("p", { class: "hint" }, `The bars show the largest rank of each stage. Largest of all: rank ${number(largest.rank)} with ${bytes(most)}; smallest: rank ${number(smallest.rank)} with ${bytes(smallest.total)}.`));
}

function checkPage() {
  drawFindings();
  return [memorySection()];
}

// ---- diff

function diffPage() {
  const moved = (t) => t.relative_l2 ?? (t.different_elements ? (t.max_abs === undefined ? t.different_elements / Math.max(1, t.elements) : null) : 0);
  const words = (t) => `relative change ${brief(moved(t))}${t.max_abs === undefined ? "" : `, at most ${brief(t.max_abs)}`}`;
  const map = (tensors) => layerMap("Relative change by module and layer", tensors, moved, words);
  const show = (...content) => [section("Change by module and layer", content)];
  const hasMoved = (tensors) => tensors.some((t) => moved(t) !== 0);
  if (!(data.steps ?? [data]).some((step) => hasMoved(step.tensors))) return [];
  if (!data.steps) return show(map(data.tensors));
  const body = h("div");
  const draw = (i) => body.replaceChildren(...(hasMoved(data.steps[i].tensors) ? map(data.steps[i].tensors).flat(3) : [h("p", {}, "Nothing moved.")]));
  draw(0);
  const steps = data.steps.map(({ a, b }, i) => h("option", { value: i }, `${a} \u2192 ${b}`));
  return show(h("div", { class: "tools" }, h("select", { "aria-label": "Step", onchange: (e) => draw(+e.target.value) }, steps)), body);
}

// ---- watch

function watchPage() {
  const names = data.steps.map((s) => s.name);
  const cells = data.moved.map(([layer, step, value]) => ({
    row: layer, column: step, value: value ?? Infinity,
    tell: () => `${data.layers[layer]} in ${names[step]}: relative change ${brief(value)} since ${data.steps[step].since}`,
  }));
  // Columns are named by the number of their step, where each has one.
  const columns = data.steps.map((s) => (s.number < 0 ? s.name : String(s.number)));
  return cells.length ? [section("Change by layer and step", heatMap("Relative change of each layer since the step before", data.layers, columns, cells))] : [];
}

// ---- plan

function planPage() {
  const label = (g) => (g.count === 1 ? g.first : `${g.first} and ${g.count - 1} more`);
  const cells = data.flows.map(([row, column, size, moves]) => ({
    row, column, value: size, tell: () => `${label(data.targets[row])} reads ${bytes(size)} in ${counted(moves, "piece")} from ${label(data.sources[column])}`,
  }));
  const strategy = data.strategy ? [["strategy", `${data.strategy} on ${counted(data.ranks, "rank")}: ${data.strategy_reason}`]] : [];
  const most = Math.max(1, ...data.rank_bytes);
  return [
    tiles([["from", `${data.source_format}: ${data.source}`], ["to", data.target_format], ["mesh", data.mesh || null], ["tensors", number(data.tensors)], ["pieces moved", number(data.moves)],
      ["disk free", data.disk_free === undefined ? null : bytes(data.disk_free)],
      ["memory", data.peak_memory === undefined ? "more than --memory" : bytes(data.peak_memory)], ["converted", data.converted_tensors ? counted(data.converted_tensors, "tensor") : null], ...strategy]),
    cells.length ? section("Data flow between files", h("p", { class: "hint" }, "Rows: files that are written; columns: files that are read; colour: bytes."),
      heatMap("Bytes read from each file for each file", data.targets.map(label), data.sources.map((_, i) => String(i)), cells, bytes)) : "",
    data.rank_bytes.length > 1 ? section("Data per rank", h("div", { class: "bars" }, data.rank_bytes.slice(0, 64).map((b, i) =>
      h("div", { class: "bar" }, h("span", {}, `rank ${i}`), stack([["weights", b, bytes(b)]], most), h("b", { class: "number" }, bytes(b)))))) : "",
  ];
}

// ---- tables: sorted by a click on a heading, and exported as CSV

const cellValue = (cell) => cell.dataset.value ?? cell.innerText;

function sortTable(table, column, isDescending) {
  const { compare } = new Intl.Collator("en", { numeric: true });
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, value: cellValue(row.cells[column]) }));
  const areNumbers = table.tHead.rows[0].cells[column].className === "number";
  rows.sort((a, b) => (areNumbers ? a.value - b.value || 0 : compare(a.value, b.value)));
  if (isDescending) rows.reverse();
  table.tBodies[0].append(...rows.map((r) => r.row));
}

// A text that a spreadsheet would take for a formula gets an apostrophe in front.
const csvField = (text) => `"${(/^[=+@\t\r-]/.test(text) && isNaN(text) ? `'${text}` : text).replace(/"/g, '""')}"`;
const csvText = (table) => [...table.rows].map((row) => [...row.cells].map((c) => csvField(c.tagName === "TH" ? c.innerText : cellValue(c))).join(",")).join("\r\n") + "\r\n";

function saveCsv(table) {
  const link = h("a", { href: URL.createObjectURL(new Blob([csvText(table)], { type: "text/csv" })), download: `${table.dataset.name.replace(/ /g, "-")}.csv` });
  link.click();
  URL.revokeObjectURL(link.href);
}

function enhance(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = h("button", { class: "sort", title: "Sort by this column" }, head.textContent);
    button.addEventListener("click", () => {
      const isDescending = head.getAttribute("aria-sort") === "ascending";
      [...table.tHead.rows[0].cells].forEach((c) => c.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      sortTable(table, column, isDescending);
    });
    head.replaceChildren(button);
  });
  const save = h("button", { class: "csv", onclick: () => saveCsv(table), "aria-label": `Save ${table.dataset.name} as CSV` }, "CSV");
  table.closest(".scroll").before(save);
}

// ---- the page

const kPages = { inspect: inspectPage, verify: verifyPage, diff: diffPage, check: checkPage, plan: planPage, watch: watchPage };
document.title = `${document.querySelector("h1").innerText.replace(/\s+/g, " ")}`;
document.body.classList.add("live");
document.querySelectorAll("table[data-name]").forEach(enhance);
document.getElementById("maps").append(...kPages[page.command]().flat(3));
