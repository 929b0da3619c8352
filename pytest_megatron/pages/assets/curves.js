"use strict";
// Draws the charts of a page from the data in it. Texts of the data only ever become text nodes.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const TOP = 16, MAIN = 200, GAP = 14, STRIP = 64, BOTTOM = 34, LEFT = 66, RIGHT = 12;
  const footOf = (chart) => TOP + MAIN + (chart.golden ? GAP + STRIP : 0);
  const state = { x0: 0, x1: 1, isLog: false, hidden: new Set(), step: null, active: null };
  const isDrawn = (value) => value === value && Math.abs(value) !== Infinity;

  function make(name, attributes, parent, text) {
    const isHtml = /^(div|span|p|h3|header|button|label|input|table|tr|td|section|details|summary)$/.test(name);
    const node = isHtml ? document.createElement(name) : document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // --- data ---------------------------------------------------------------------------------------

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;

  function readSteps(s) {
    if (s.list) return Float64Array.from(s.list);
    const gaps = s.d1 ? new Uint8Array(bytes(s.d1)) : s.d2 ? new Uint16Array(bytes(s.d2)) : s.d4 ? new Uint32Array(bytes(s.d4)) : null;
    const steps = new Float64Array(s.n);
    for (let i = 0, at = s.first; i < s.n; at += gaps ? gaps[i] : s.every, i++) steps[i] = at;
    return steps;
  }

  function readValues(v, n, curves) {
    if ("as" in v) return curves[v.as].y;
    if ("all" in v) return new Float64Array(n).fill(v.all);
    return v.f8 ? new Float64Array(bytes(v.f8)) : Float64Array.from(new Float32Array(bytes(v.f4)));
  }

  function readChart(data) {
    const x = readSteps(data.s), curves = [];
    let runs = 0, failures = 0;
    for (const c of data.c) {
      const paint = c.r === "golden" ? "golden" : c.r === "failed" ? `gone f${failures++ % 3}` : `c${runs++ % 6}`;
      const odd = new Map();
      for (const [from, count, kind] of c.o || []) for (let i = 0; i < count; i++) odd.set(from + i, kind);
      curves.push({ name: c.n, role: c.r, paint, odd, oddRuns: c.o || [], y: readValues(c.v, x.length, curves) });
    }
    const golden = curves.length && curves[0].role === "golden" ? curves[0] : null;
    const allowed = data.b ? readValues(data.b, x.length, []) : null;
    for (const c of curves) {
      if (!golden || c === golden) continue;
      c.off = c.y.map((value, i) => {
        const g = golden.y[i];
        return value === g ? 0 : g === 0 ? NaN : (value - g) / Math.abs(g);
      });
    }
    return { data, x, curves, golden, allowed, first: data.f };
  }

  // --- numbers ------------------------------------------------------------------------------------

  function shown(value) {
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(4) : String(Number(value.toPrecision(7)));
  }

  const relative = (value) => (value === 0 ? "0" : (value > 0 ? "+" : "\u2212") + Math.abs(value).toExponential(1));

  function tickText(value, gap) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) {
      const digits = Math.max(0, Math.floor(Math.log10(size)) - Math.floor(Math.log10(gap)));
      return digits > 5 && size >= 1e6 ? value.toFixed(0) : value.toExponential(Math.min(digits, 5)).replace("e+", "e");
    }
    return value.toFixed(Math.min(8, Math.max(0, -Math.floor(Math.log10(gap) + 1e-9))));
  }

  function ticks(low, high, about) {
    const raw = (high - low) / about;
    if (!(raw > 0) || !isDrawn(raw)) return { at: [low], gap: Math.abs(low) || 1 };
    const power = 10 ** Math.floor(Math.log10(raw));
    const gap = [1, 2, 5, 10].map((m) => m * power).find((g) => g >= raw * 0.999);
    const at = [];
    for (let k = Math.ceil(low / gap - 1e-9); k * gap <= high + gap * 1e-9 && at.length < 40; k++) at.push(k * gap);
    return { at, gap };
  }

  // --- drawing ------------------------------------------------------------------------------------

  const charts = page.charts.map(readChart).filter((chart) => chart.x.length);
  const whole = [
    charts.reduce((low, c) => Math.min(low, c.x[0]), Infinity),
    charts.reduce((high, c) => Math.max(high, c.x[c.x.length - 1]), -Infinity),
  ];
  if (whole[0] === whole[1]) { whole[0] -= 0.5; whole[1] += 0.5; }
  [state.x0, state.x1] = whole;

  // The first index whose step is not below `step`.
  function indexOf(x, step) {
    let low = 0, high = x.length;
    while (low < high) { const mid = (low + high) >> 1; if (x[mid] < step) low = mid + 1; else high = mid; }
    return low;
  }

  function range(chart) {
    return [Math.max(0, indexOf(chart.x, state.x0) - 1), Math.min(chart.x.length - 1, indexOf(chart.x, state.x1))];
  }

  // Whether a line is interrupted where a curve has no number: not where nobody expects one.
  function isGap(chart, curve, at) {
    if (curve.odd.get(at) !== "missing") return true;
    return Boolean(chart.golden) && curve !== chart.golden && isDrawn(chart.golden.y[at]);
  }

  // A path through the numbers; where there are more than pixels, through the extremes of each.
  function path(chart, curve, ys, [from, to], sx, sy) {
    const parts = [];
    const few = to - from < 2 * chart.width;
    let isOpen = false;
    const point = (i) => {
      parts.push((isOpen ? "L" : "M") + sx(chart.x[i]).toFixed(1) + " " + sy(ys[i]).toFixed(1));
      isOpen = true;
    };
    const end = () => {
      if (isOpen && parts[parts.length - 1][0] === "M") parts.push("m-2 0a2 2 0 1 0 4 0a2 2 0 1 0 -4 0"); // a dot
      isOpen = false;
    };
    for (let i = from; i <= to;) {
      if (!isDrawn(ys[i]) || !isDrawn(sy(ys[i]))) {
        if (isDrawn(curve.y[i]) ? chart.golden && chart.golden.odd.get(i) !== "missing" : isGap(chart, curve, i)) end();
        i++;
        continue;
      }
      if (few) {
        point(i++);
        continue;
      }
      const pixel = Math.floor(sx(chart.x[i]));
      let low = i, high = i, last = i;
      while (last <= to && Math.floor(sx(chart.x[last])) === pixel && isDrawn(ys[last])) {
        if (ys[last] < ys[low]) low = last;
        if (ys[last] > ys[high]) high = last;
        last++;
      }
      point(Math.min(low, high));
      if (low !== high) point(Math.max(low, high));
      i = last;
    }
    end();
    return parts.join("");
  }

  function area(chart, [from, to], low, high, sx, sy) {
    const up = [], down = [];
    const gap = Math.max(1, Math.floor((to - from) / chart.width));
    for (let i = from; i <= to; i += gap) {
      const a = sy(low(i)), b = sy(high(i));
      if (!isDrawn(a) || !isDrawn(b)) continue;
      const at = sx(chart.x[i]).toFixed(1);
      up.push(`${at} ${b.toFixed(1)}`);
      down.push(`${at} ${a.toFixed(1)}`);
    }
    return up.length ? `M${up.join("L")}L${down.reverse().join("L")}Z` : "";
  }

  function extent(chart, curves, key, [from, to]) {
    let low = Infinity, high = -Infinity;
    for (const c of curves) for (let i = from; i <= to; i++) {
      const value = c[key][i];
      if (!isDrawn(value) || (key === "y" && state.isLog && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low > high ? null : [low, high];
  }

  function mainScale(chart, curves, visible) {
    let [low, high] = extent(chart, curves, "y", visible) || [0, 1];
    if (state.isLog && low > 0) {
      const top = Math.log10(high), bottom = Math.log10(low), pad = Math.max((top - bottom) * 0.06, 0.01);
      const [a, b] = [bottom - pad, top + pad];
      const decades = b - a < 1.2 ? ticks(10 ** a, 10 ** b, 5) : { at: [], gap: 0 };
      for (let k = Math.ceil(a); !decades.gap && k <= b; k++) decades.at.push(10 ** k);
      return { sy: (v) => (v > 0 ? TOP + MAIN * (1 - (Math.log10(v) - a) / (b - a)) : NaN), ...decades };
    }
    const span = high - low || Math.abs(high) * 1e-3 || 1;
    if (chart.allowed && chart.golden && !state.hidden.has(chart.golden.name)) {
      const [from, to] = visible, most = span;
      for (let i = from; i <= to; i++) {
        const g = chart.golden.y[i], a = chart.allowed[i];
        if (!isDrawn(g + a)) continue;
        low = Math.max(Math.min(low, g - a), low - most);
        high = Math.min(Math.max(high, g + a), high + most);
      }
    }
    const pad = (high - low || span) * 0.05;
    low -= pad; high += pad;
    return { sy: (v) => TOP + MAIN * (1 - (v - low) / (high - low)), ...ticks(low, high, 5) };
  }

  function stripScale(chart, curves, visible) {
    const [low, high] = extent(chart, curves, "off", visible) || [0, 0];
    const largest = Math.max(Math.abs(low), Math.abs(high));
    let limit = largest * 1.15;
    if (chart.allowed && chart.golden) {
      let most = 0;
      for (let i = visible[0]; i <= visible[1]; i++) {
        const share = chart.allowed[i] / Math.abs(chart.golden.y[i]);
        if (isDrawn(share) && share > most) most = share;
      }
      limit = Math.max(limit, largest ? Math.min(most * 1.1, largest * 4) : most * 1.1);
    }
    limit = limit || 1e-6;
    const middle = TOP + MAIN + GAP + STRIP / 2;
    return { limit, sy: (v) => middle - (Math.max(-limit, Math.min(limit, v)) / limit) * (STRIP / 2) };
  }

  function axes(chart, main, strip, sx) {
    const right = chart.width - RIGHT, foot = footOf(chart), g = make("g", {}, chart.svg);
    for (const value of main.at) {
      const y = main.sy(value);
      if (!(y >= TOP - 1 && y <= TOP + MAIN + 1)) continue;
      make("path", { class: "grid", d: `M${LEFT} ${y.toFixed(1)}H${right}` }, g);
      make("text", { x: LEFT - 6, y: (y + 4).toFixed(1), "text-anchor": "end" }, g, tickText(value, main.gap || value));
    }
    const steps = ticks(state.x0, state.x1, Math.max(2, Math.floor((right - LEFT) / 90)));
    for (const value of steps.at) {
      if (!Number.isInteger(Number(value.toFixed(6)))) continue;
      const x = sx(value).toFixed(1);
      make("path", { class: "grid", d: `M${x} ${TOP}V${TOP + MAIN}` + (strip ? `M${x} ${TOP + MAIN + GAP}V${foot}` : "") }, g);
      make("text", { x, y: foot + 14, "text-anchor": "middle" }, g, String(Math.round(value)));
    }
    make("text", { x: right, y: foot + 28, "text-anchor": "end" }, g, "step");
    make("path", { class: "frame", d: `M${LEFT} ${TOP}H${right}V${TOP + MAIN}H${LEFT}Z` }, g);
    if (!strip) return;
    const high = TOP + MAIN + GAP;
    make("path", { class: "frame", d: `M${LEFT} ${high}H${right}V${foot}H${LEFT}Z` }, g);
    for (const [value, y] of [[strip.limit, high + 9], [0, high + STRIP / 2 + 4], [-strip.limit, foot]])
      make("text", { x: LEFT - 6, y, "text-anchor": "end" }, g, relative(value));
    make("text", { x: LEFT, y: foot + 28 }, g, "below: deviation from the golden, relative");
  }

  function bands(chart, clip, visible, main, strip, sx) {
    if (!chart.allowed || !chart.golden || state.hidden.has(chart.golden.name)) return;
    const g = chart.golden.y, a = chart.allowed;
    make("path", { class: "band", d: area(chart, visible, (i) => g[i] - a[i], (i) => g[i] + a[i], sx, main.sy) }, clip);
    const share = (i) => a[i] / Math.abs(g[i]);
    make("path", { class: "band", d: area(chart, visible, (i) => -share(i), share, sx, strip.sy) }, clip);
  }

  // What is no finite number: a bar at the top, at the bottom where the run has no such step.
  function oddities(chart, clip, curve, visible, sx) {
    for (const [from, count, kind] of curve.oddRuns) {
      const to = from + count - 1;
      if (to < visible[0] || from > visible[1] || kind === "before") continue;
      if (kind === "missing" && !(chart.golden && curve !== chart.golden && isDrawn(chart.golden.y[from]))) continue;
      const x0 = sx(chart.x[from]) - 3, x1 = Math.max(sx(chart.x[to]) + 3, x0 + 6);
      const y = kind === "missing" ? TOP + MAIN - 3 : TOP + 3;
      const mark = make("path", { class: `odd ${curve.paint.replace("gone ", "")}`, d: `M${x0.toFixed(1)} ${y}H${x1.toFixed(1)}` }, clip);
      const where = count > 1 ? `steps ${chart.x[from]} to ${chart.x[to]}` : `step ${chart.x[from]}`;
      make("title", {}, mark, `${curve.name}, ${where}: ${kind}`);
      const word = kind === "missing" ? "no value" : kind, isLate = x0 > chart.width - 90;
      const at = { x: (isLate ? x1 : x0).toFixed(1), y: kind === "missing" ? y - 6 : y + 13, "text-anchor": isLate ? "end" : "start" };
      make("text", { class: "first", ...at }, clip, word);
    }
  }

  function draw(chart) {
    chart.width = Math.max(300, Math.round(chart.svg.clientWidth || chart.section.clientWidth - 24 || 640));
    chart.svg.setAttribute("viewBox", `0 0 ${chart.width} ${footOf(chart) + BOTTOM}`);
    chart.svg.replaceChildren();
    const inner = chart.width - LEFT - RIGHT;
    const sx = (step) => LEFT + (inner * (step - state.x0)) / (state.x1 - state.x0);
    const curves = chart.curves.filter((c) => !state.hidden.has(c.name)), visible = range(chart);
    const main = mainScale(chart, curves, visible);
    const compared = curves.filter((c) => c.off);
    const strip = chart.golden ? stripScale(chart, compared, visible) : null;
    chart.place = { sx, main, strip };
    axes(chart, main, strip, sx);
    const id = `clip${charts.indexOf(chart)}`;
    make("rect", { x: LEFT, y: TOP - 1, width: inner, height: MAIN + GAP + STRIP + 2 }, make("clipPath", { id }, chart.svg));
    const clip = make("g", { "clip-path": `url(#${id})` }, chart.svg);
    bands(chart, clip, visible, main, strip, sx);
    for (const c of curves) {
      make("path", { class: `curve ${c.paint}`, d: path(chart, c, c.y, visible, sx, main.sy), "data-curve": c.name }, clip);
      if (c.off) make("path", { class: `curve ${c.paint}`, d: path(chart, c, c.off, visible, sx, strip.sy), "data-off": c.name }, clip);
      oddities(chart, clip, c, visible, sx);
    }
    if (chart.first !== undefined) {
      const x = sx(chart.first), isLate = x > chart.width - 110;
      make("path", { class: "first", d: `M${x.toFixed(1)} ${TOP}V${footOf(chart)}` }, clip);
      if (x >= LEFT && x <= chart.width - RIGHT)
        make("text", { class: "first", x: (x + (isLate ? -4 : 4)).toFixed(1), y: TOP - 4, "text-anchor": isLate ? "end" : "start" }, chart.svg, `first off: step ${chart.first}`);
    }
    chart.over = make("g", {}, chart.svg);
    cross(chart);
  }

  function drawAll() { charts.forEach(draw); }

  // --- reading values -----------------------------------------------------------------------------

  function nearest(chart, step) {
    const at = indexOf(chart.x, step);
    if (at === 0) return 0;
    if (at >= chart.x.length) return chart.x.length - 1;
    return step - chart.x[at - 1] < chart.x[at] - step ? at - 1 : at;
  }

  function cross(chart) {
    chart.over.replaceChildren();
    chart.readout.hidden = true;
    if (state.step === null || state.step < state.x0 || state.step > state.x1) return;
    const at = nearest(chart, state.step), { sx, main, strip } = chart.place, x = sx(chart.x[at]).toFixed(1);
    make("path", { class: "cross", d: `M${x} ${TOP}V${footOf(chart)}` }, chart.over);
    for (const c of chart.curves) {
      if (state.hidden.has(c.name)) continue;
      for (const [value, scale] of [[c.y[at], main], [c.off ? c.off[at] : NaN, strip]]) {
        const y = isDrawn(value) ? scale.sy(value) : NaN;
        if (isDrawn(y)) make("circle", { class: c.paint.replace("gone ", ""), cx: x, cy: y.toFixed(1), r: 3.5, fill: "var(--card)", "stroke-width": 2 }, chart.over);
      }
    }
    if (state.active === chart) tell(chart, at, Number(x));
  }

  function tell(chart, at, x) {
    const box = chart.readout, table = make("table", {});
    box.replaceChildren(make("div", {}, null, `step ${chart.x[at]}`), table);
    for (const c of chart.curves) {
      if (state.hidden.has(c.name)) continue;
      const row = make("tr", {}, table);
      make("td", {}, row).append(sample(c));
      make("td", {}, row, c.name);
      make("td", {}, row, c.odd.has(at) ? c.odd.get(at) : shown(c.y[at]));
      const off = c.off ? c.off[at] : NaN;
      make("td", {}, row, isDrawn(off) ? relative(off) : "");
    }
    if (chart.allowed && isDrawn(chart.allowed[at])) {
      const row = make("tr", {}, table), g = Math.abs(chart.golden.y[at]);
      make("td", {}, row); make("td", {}, row, "allowed"); make("td", {}, row, `\u00b1${shown(Number(chart.allowed[at].toPrecision(2)))}`);
      make("td", {}, row, g ? `\u00b1${(chart.allowed[at] / g).toExponential(1)}` : "");
    }
    box.hidden = false;
    const picture = chart.svg.getBoundingClientRect(), around = chart.section.getBoundingClientRect();
    const at0 = picture.left - around.left + (x * picture.width) / chart.width;
    const isLeft = at0 + 24 + box.offsetWidth > around.width;
    box.style.left = `${Math.max(4, isLeft ? at0 - box.offsetWidth - 14 : at0 + 12)}px`;
    box.style.top = `${picture.top - around.top + TOP + 6}px`;
  }

  function look(chart, step) {
    state.active = chart;
    state.step = step;
    charts.forEach(cross);
  }

  // --- zoom and pan -------------------------------------------------------------------------------

  const isWhole = () => state.x0 <= whole[0] && state.x1 >= whole[1];

  function view(x0, x1) {
    const least = Math.min(2, whole[1] - whole[0]), span = Math.max(least, Math.min(x1 - x0, whole[1] - whole[0]));
    const start = Math.max(whole[0], Math.min((x0 + x1 - span) / 2, whole[1] - span));
    [state.x0, state.x1] = [start, start + span];
    drawAll();
  }

  function zoom(factor, around) {
    view(around - (around - state.x0) * factor, around + (state.x1 - around) * factor);
  }

  function stepAt(chart, event) {
    const box = chart.svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * chart.width;
    const share = Math.max(0, Math.min(1, (x - LEFT) / (chart.width - LEFT - RIGHT)));
    return state.x0 + share * (state.x1 - state.x0);
  }

  function listen(chart) {
    const svg = chart.svg;
    let drag = null;
    svg.addEventListener("wheel", (event) => {
      if (document.activeElement !== svg && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, stepAt(chart, event));
    }, { passive: false });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      svg.focus({ preventScroll: true });
      svg.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, from: stepAt(chart, event), x0: state.x0, x1: state.x1, isPick: isWhole() || event.shiftKey };
    });
    svg.addEventListener("pointermove", (event) => {
      const step = stepAt(chart, event);
      if (!drag || Math.abs(event.clientX - drag.x) < 4) { look(chart, chart.x[nearest(chart, step)]); return; }
      if (drag.isPick) {
        drag.to = step;
        const { sx } = chart.place, [a, b] = [sx(drag.from), sx(step)].sort((p, q) => p - q);
        look(chart, null);
        make("rect", { class: "pick", x: a, y: TOP, width: b - a, height: footOf(chart) - TOP }, chart.over);
        return;
      }
      const moved = ((event.clientX - drag.x) / svg.clientWidth) * (chart.width / (chart.width - LEFT - RIGHT)) * (drag.x1 - drag.x0);
      view(drag.x0 - moved, drag.x1 - moved);
    });
    svg.addEventListener("pointerup", () => {
      if (drag && drag.to !== undefined) view(Math.min(drag.from, drag.to), Math.max(drag.from, drag.to));
      drag = null;
    });
    svg.addEventListener("pointercancel", () => { drag = null; });
    svg.addEventListener("pointerleave", () => { if (!drag) look(null, null); });
    svg.addEventListener("blur", () => look(null, null));
    svg.addEventListener("dblclick", () => view(...whole));
    svg.addEventListener("keydown", (event) => key(chart, event));
  }

  function key(chart, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = nearest(chart, state.step === null ? (state.x0 + state.x1) / 2 : state.step);
    const go = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (go !== undefined) {
      const to = Math.max(0, Math.min(chart.x.length - 1, at + go * (event.shiftKey ? 10 : 1))), step = chart.x[to];
      if (step < state.x0 || step > state.x1) view(step - (state.x1 - state.x0) / 2, step + (state.x1 - state.x0) / 2);
      look(chart, step);
    } else if (event.key === "+" || event.key === "=") zoom(0.6, chart.x[at]);
    else if (event.key === "-") zoom(1 / 0.6, chart.x[at]);
    else if (event.key === "0" || event.key === "Escape") view(...whole);
    else if (event.key === "l") document.getElementById("log").click();
    else return;
    event.preventDefault();
  }

  // --- the page -----------------------------------------------------------------------------------

  function sample(curve) {
    const svg = make("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
    make("path", { class: `curve ${curve.paint}`, d: "M1 4H23" }, svg);
    return svg;
  }

  function legend() {
    const names = new Map();
    for (const chart of charts) for (const c of chart.curves) if (!names.has(c.name)) names.set(c.name, c);
    const place = document.getElementById("legend");
    for (const [name, curve] of names) {
      const label = make("label", { class: "toggle" }, place);
      const box = make("input", { type: "checkbox", checked: "" }, label);
      label.append(sample(curve), name);
      box.addEventListener("change", () => { state.hidden[box.checked ? "delete" : "add"](name); drawAll(); });
    }
    document.getElementById("whole").addEventListener("click", () => view(...whole));
    document.getElementById("log").addEventListener("change", (event) => { state.isLog = event.target.checked; drawAll(); });
  }

  function card(chart, number) {
    const data = chart.data, place = document.getElementById("charts");
    const section = make("section", { class: data.ok === false ? "chart failed-chart" : "chart" }, place);
    const header = make("header", {}, section);
    make("h3", { id: `title${number}` }, header, data.m);
    if (data.ok !== undefined) make("span", { class: `verdict ${data.ok ? "passed" : "failed"}` }, header, (data.ok ? "passed" : "failed") + (data.rule ? `: ${data.rule}` : ""));
    if (chart.first !== undefined) {
      const span = Math.max(10, (whole[1] - whole[0]) / 100);
      const button = make("button", { type: "button" }, header, `show step ${chart.first}`);
      button.addEventListener("click", () => { view(chart.first - span, chart.first + span); look(chart, chart.first); });
    }
    for (const text of data.t || []) make("p", {}, section, text);
    if (data.l && data.l.length) {
      const bad = data.l.filter(([ok]) => !ok).length, details = make("details", {}, section);
      make("summary", {}, details, `${data.l.length} layer${data.l.length > 1 ? "s" : ""}${bad ? `, ${bad} failed` : ", all passed"}`);
      for (const [ok, words] of data.l) make("p", ok ? {} : { class: "failed" }, details, `${ok ? "passed" : "failed"}: ${words}`);
    }
    if (data.of) make("p", {}, section, `${chart.x.length} of ${data.of} steps are drawn, every extreme among them; metrics.json has all`);
    const label = `${data.m}: ${chart.curves.map((c) => c.name).join(", ")}; steps ${chart.x[0]} to ${chart.x[chart.x.length - 1]}`;
    Object.assign(chart, {
      section,
      svg: make("svg", { class: "plot", tabindex: "0", role: "application", "aria-label": label, height: footOf(chart) + BOTTOM }, section),
      readout: make("div", { class: "readout", role: "status", hidden: "" }, section),
    });
    listen(chart);
  }

  if (!charts.length) return;
  legend();
  charts.forEach(card);
  drawAll();
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
  addEventListener("beforeprint", () => look(null, null));
})();
