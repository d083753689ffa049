// Draws the charts of page.html: memory and lanes on one axis of time, which zoom together. Canvas, since a step may have ten thousand actions.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const GUTTER = 120, RIGHT = 10, AXIS = 22, PHASES = 20, TIP_GAP = 14;
  const KINDS = [...data.kinds, "activations", "transients"];
  const WORDS = { returned: "returned activations" };
  const whole = Math.max(data.predicted.seconds, data.measured ? data.measured.seconds : 0) || 1e-9;
  let view = [0, whole];
  let colours = {};

  // Numbers for people, as base/units.py writes them.

  function threeDigits(value) {
    const size = Math.abs(value);
    return size >= 99.95 ? value.toFixed(0) : size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  }
  function showBytes(bytes) {
    if (Math.abs(bytes) < 1024) return `${Math.trunc(bytes)} B`;
    let value = bytes / 1024;
    for (const unit of ["KiB", "MiB", "GiB"]) {
      if (Math.abs(value) < 999.5) return `${threeDigits(value)} ${unit}`;
      value /= 1024;
    }
    return `${threeDigits(value)} TiB`;
  }
  const UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  function unitOf(seconds) { return UNITS.find(([, factor]) => Math.abs(seconds / factor) >= 0.9995); }
  function showSeconds(seconds) {
    const unit = unitOf(seconds);
    return unit ? `${Number((seconds / unit[1]).toPrecision(3))} ${unit[0]}` : "0 s";
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["card", "ink", "soft", "line", "faint", "budget", "forward", "backward", "phase", ...KINDS];
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  // Lanes: spans sorted by start, per lane.

  function byLane(source) {
    const lanes = data.lanes.map(() => []);
    for (const [lane, name, start, end, step] of source.spans) lanes[lane].push({ name: data.names[name][0], what: data.names[name][1], start, end, step, lane });
    return lanes;
  }

  // The index of the last item that starts at or before t; -1: none.
  function lastBefore(items, t, startOf) {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (startOf(items[middle]) <= t) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  class Chart {
    constructor(canvas) {
      this.canvas = canvas;
      this.focus = null;
      canvas.addEventListener("pointermove", (event) => this.move(event));
      canvas.addEventListener("pointerleave", () => { hover = null; hideTip(); redraw(); });
      canvas.addEventListener("pointerdown", (event) => this.press(event));
      canvas.addEventListener("pointerup", (event) => this.release(event));
      canvas.addEventListener("pointercancel", () => { drag = null; redraw(); });
      canvas.addEventListener("dblclick", () => zoomTo(0, whole));
      canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      canvas.addEventListener("keydown", (event) => this.key(event));
      canvas.addEventListener("blur", () => { this.focus = null; hideTip(); redraw(); });
    }
    size() {
      const ratio = window.devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
      const width = Math.max(1, Math.round(box.width * ratio)), height = Math.max(1, Math.round(box.height * ratio));
      if (this.canvas.width !== width || this.canvas.height !== height) { this.canvas.width = width; this.canvas.height = height; }
      this.width = box.width; this.height = box.height; this.ratio = ratio;
      const pen = this.canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, box.width, box.height);
      pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
      pen.textBaseline = "middle";
      return pen;
    }
    x(t) { return GUTTER + (t - view[0]) / (view[1] - view[0]) * (this.width - GUTTER - RIGHT); }
    t(x) { return view[0] + (x - GUTTER) / (this.width - GUTTER - RIGHT) * (view[1] - view[0]); }
    inside(pen, draw) {
      pen.save();
      pen.beginPath();
      pen.rect(GUTTER, 0, this.width - GUTTER - RIGHT, this.height);
      pen.clip();
      draw();
      pen.restore();
    }
    axis(pen, top) {
      const step = niceStep((view[1] - view[0]) / Math.max(2, (this.width - GUTTER) / 110));
      pen.strokeStyle = colours.line;
      pen.fillStyle = colours.soft;
      pen.lineWidth = 1;
      const [unit, factor] = unitOf(view[1]) || UNITS[3], digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
      for (let i = Math.ceil(view[0] / step - 1e-9); i * step <= view[1] * (1 + 1e-9); i++) {
        const x = Math.round(this.x(i * step)) + 0.5;
        pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + 4); pen.stroke();
        const text = `${(i * step / factor).toFixed(digits)} ${unit}`, half = pen.measureText(text).width / 2;
        pen.textAlign = "center";
        pen.fillText(text, Math.min(this.width - half, Math.max(half, x)), top + 13);
      }
    }
    overlay(pen, bottom) {
      this.inside(pen, () => {
        if (drag && drag.to !== drag.from) {
          const left = this.x(Math.min(drag.from, drag.to)), right = this.x(Math.max(drag.from, drag.to));
          pen.fillStyle = colours.ink; pen.globalAlpha = 0.12;
          pen.fillRect(left, 0, right - left, bottom);
          pen.globalAlpha = 1;
        } else if (hover !== null) {
          const x = Math.round(this.x(hover)) + 0.5;
          pen.strokeStyle = colours.ink; pen.globalAlpha = 0.55; pen.lineWidth = 1;
          pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, bottom); pen.stroke();
          pen.globalAlpha = 1;
        }
      });
    }
    at(event) {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }
    clampT(x) { return Math.min(view[1], Math.max(view[0], this.t(x))); }
    move(event) {
      const [x, y] = this.at(event);
      if (drag) { drag.to = this.clampT(x); hideTip(); redraw(); return; }
      hover = x >= GUTTER && x <= this.width - RIGHT ? this.t(x) : null;
      const item = hover === null ? null : this.find(hover, y, (view[1] - view[0]) / (this.width - GUTTER - RIGHT));
      if (item) showTip(this.tip(item), event.clientX, event.clientY); else hideTip();
      redraw();
    }
    press(event) {
      const [x] = this.at(event);
      if (event.button !== 0 || event.pointerType === "touch" || x < GUTTER) return;
      drag = { from: this.clampT(x), to: this.clampT(x) };
      this.canvas.setPointerCapture(event.pointerId);
    }
    release(event) {
      if (!drag) return;
      const { from, to } = drag;
      drag = null;
      if (Math.abs(this.x(to) - this.x(from)) > 4) zoomTo(Math.min(from, to), Math.max(from, to)); else this.move(event);
    }
    wheel(event) {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoomAt(this.clampT(this.at(event)[0]), Math.exp(Math.max(-50, Math.min(50, event.deltaY)) * 0.01));
      } else if (event.shiftKey) {
        event.preventDefault();
        const shift = (event.deltaY || event.deltaX) / this.width * (view[1] - view[0]);
        zoomTo(view[0] + shift, view[1] + shift);
      }
    }
    key(event) {
      const middle = (view[0] + view[1]) / 2;
      if (event.key === "+" || event.key === "=") zoomAt(middle, 0.5);
      else if (event.key === "-") zoomAt(middle, 2);
      else if (event.key === "0") zoomTo(0, whole);
      else if (event.key === "Escape") { this.focus = null; hideTip(); redraw(); return; }
      else if (event.key.startsWith("Arrow")) this.step(event.key);
      else return;
      event.preventDefault();
    }
    // Shows an item to those who came by keyboard.
    point(item, y) {
      this.focus = item;
      if (item.end < view[0] || item.start > view[1]) {
        const half = (view[1] - view[0]) / 2, middle = (item.start + item.end) / 2;
        zoomTo(middle - half, middle + half);
      }
      const box = this.canvas.getBoundingClientRect();
      const middle = (Math.max(item.start, view[0]) + Math.min(item.end, view[1])) / 2;
      hover = middle;
      showTip(this.tip(item), box.left + this.x(middle), box.top + y);
      redraw();
    }
  }

  class Memory extends Chart {
    constructor(canvas) {
      super(canvas);
      this.items = data.moments.map(([name, start, end, activations, transients]) => ({ name: name < 0 ? "" : data.names[name][0], what: name < 0 ? "the GPU waits" : data.names[name][1], start, end, activations, transients }));
      this.base = data.allocated.reduce((sum, bytes) => sum + bytes, 0);
      // A budget far above the peak would press everything into a corner.
      this.showFrom(0);
    }
    // 0: all of it; the base: only what comes and goes.
    showFrom(floor) {
      this.floor = floor;
      this.budgetShown = data.budget - floor <= (data.peak - floor) * 1.6;
      this.top = floor + (Math.max(this.budgetShown ? data.budget : 0, data.peak) - floor) * 1.1;
      if (this.top <= floor) this.top = floor + 1;
    }
    y(bytes) { return (this.height - AXIS) * (1 - Math.min(1, Math.max(0, (bytes - this.floor) / (this.top - this.floor)))); }
    // The fullest moment in every column of pixels, so that none is lost however many there are.
    columns() {
      const left = GUTTER, count = Math.max(1, Math.round((this.width - GUTTER - RIGHT) * this.ratio));
      const found = new Array(count).fill(null);
      const from = Math.max(0, lastBefore(this.items, view[0], (item) => item.start));
      for (let i = from; i < this.items.length && this.items[i].start <= view[1]; i++) {
        const item = this.items[i], total = item.activations + item.transients;
        const first = Math.max(0, Math.floor((this.x(item.start) - left) * this.ratio));
        const last = Math.min(count - 1, Math.max(first, Math.ceil((this.x(item.end) - left) * this.ratio) - 1));
        for (let c = first; c <= last; c++) if (!found[c] || total > found[c].activations + found[c].transients) found[c] = item;
      }
      return found;
    }
    draw() {
      const pen = this.size(), bottom = this.height - AXIS, right = this.width - RIGHT;
      const tick = niceBytes((this.top - this.floor) / 5);
      pen.textAlign = "right";
      for (let bytes = Math.ceil(this.floor / tick) * tick; bytes <= this.top; bytes += tick) {
        const y = Math.round(this.y(bytes)) + 0.5;
        pen.strokeStyle = colours.faint; pen.beginPath(); pen.moveTo(GUTTER, y); pen.lineTo(right, y); pen.stroke();
        pen.fillStyle = colours.soft; pen.fillText(showBytes(bytes), GUTTER - 8, Math.min(bottom - 6, Math.max(7, y)));
      }
      this.inside(pen, () => {
        let sum = 0;
        const end = Math.min(right, this.x(data.predicted.seconds));
        data.allocated.forEach((bytes, i) => {
          if (!bytes) return;
          pen.fillStyle = colours[data.kinds[i]];
          pen.fillRect(GUTTER, this.y(sum + bytes), end - GUTTER, this.y(sum) - this.y(sum + bytes));
          sum += bytes;
        });
        const width = 1 / this.ratio;
        this.columns().forEach((item, c) => {
          if (!item) return;
          const x = GUTTER + c * width, kept = this.y(this.base + item.activations), full = this.y(this.base + item.activations + item.transients);
          pen.fillStyle = colours.activations; pen.fillRect(x, kept, width, this.y(this.base) - kept);
          pen.fillStyle = colours.transients; pen.fillRect(x, full, width, kept - full);
        });
        pen.strokeStyle = colours.card; pen.lineWidth = 1;
        sum = 0;
        for (const bytes of data.allocated) {
          sum += bytes;
          const y = Math.round(this.y(sum)) + 0.5;
          if (bytes / (this.top - this.floor) * bottom > 3) { pen.beginPath(); pen.moveTo(GUTTER, y); pen.lineTo(end, y); pen.stroke(); }
        }
        this.labels(pen);
        if (this.focus) outline(pen, this.x(this.focus.start), 1, this.x(this.focus.end) - this.x(this.focus.start), bottom - 2);
      });
      this.budget(pen, right);
      this.axis(pen, bottom);
      this.overlay(pen, bottom);
    }
    // Kinds that are tall enough say their name where they are.
    labels(pen) {
      let sum = 0;
      pen.textAlign = "left";
      data.allocated.forEach((bytes, i) => {
        const high = this.y(sum) - this.y(sum + bytes), y = this.y(sum + bytes / 2);
        sum += bytes;
        if (high < 17) return;
        const text = `${WORDS[data.kinds[i]] || data.kinds[i]} ${showBytes(bytes)}`;
        const width = pen.measureText(text).width;
        pen.fillStyle = colours.card; pen.globalAlpha = 0.88;
        pen.beginPath(); pen.roundRect(GUTTER + 8, y - 8, width + 12, 16, 4); pen.fill();
        pen.globalAlpha = 1; pen.fillStyle = colours.ink;
        pen.fillText(text, GUTTER + 14, y + 0.5);
      });
    }
    budget(pen, right) {
      const text = `budget ${showBytes(data.budget)}`;
      const y = this.budgetShown ? Math.round(this.y(data.budget)) + 0.5 : 0;
      pen.fillStyle = colours.budget; pen.textAlign = "right";
      if (this.budgetShown) {
        pen.strokeStyle = colours.budget; pen.lineWidth = 1.5; pen.setLineDash([6, 4]);
        pen.beginPath(); pen.moveTo(GUTTER, y); pen.lineTo(right, y); pen.stroke();
        pen.setLineDash([]);
        pen.fillText(text, right - 4, y > 16 ? y - 8 : y + 9);
      } else pen.fillText(`${text}, above ↑`, right - 4, 9);
    }
    find(t) {
      const item = this.items[lastBefore(this.items, t, (item) => item.start)];
      return item && t <= data.predicted.seconds ? item : null;
    }
    step(key) {
      const last = this.items.length - 1;
      if (last < 0) return;
      const now = this.focus ? this.items.indexOf(this.focus) : Math.max(0, lastBefore(this.items, view[0], (item) => item.start)) - 1;
      const fullest = key === "ArrowUp" || key === "ArrowDown";
      const next = fullest ? this.items.reduce((best, item, i) => item.activations + item.transients > this.items[best].activations + this.items[best].transients ? i : best, 0) : Math.min(last, Math.max(0, now + (key === "ArrowRight" ? 1 : -1)));
      this.point(this.items[next], 60);
    }
    tip(item) {
      const rows = [...data.allocated, item.activations, item.transients].map((bytes, i) => [KINDS[i], bytes]).filter(([, bytes]) => bytes).reverse();
      const total = this.base + item.activations + item.transients;
      return [line("what", item.name ? `${item.name}: ${item.what}` : item.what), line("when", `${showSeconds(item.end - item.start)}, from ${showSeconds(item.start)}`), table(rows, total)];
    }
  }

  class Lanes extends Chart {
    constructor(canvas, source) {
      super(canvas);
      this.source = source;
      this.lanes = byLane(source);
    }
    row(lane) {
      const each = (this.height - AXIS - PHASES) / data.lanes.length;
      return [PHASES + lane * each + 3, each - 6];
    }
    draw() {
      const pen = this.size(), bottom = this.height - AXIS, right = this.width - RIGHT;
      data.lanes.forEach((name, lane) => {
        const [y, high] = this.row(lane);
        pen.textAlign = "right"; pen.fillStyle = colours.soft;
        pen.fillText(name, GUTTER - 8, y + high / 2);
        pen.fillStyle = colours.faint; pen.fillRect(GUTTER, y, right - GUTTER, high);
      });
      this.inside(pen, () => {
        this.phases(pen, bottom);
        this.lanes.forEach((spans, lane) => this.spans(pen, spans, ...this.row(lane)));
        const end = this.x(this.source.seconds);
        if (end < right) { pen.fillStyle = colours.soft; pen.fillRect(end, 0, 1, bottom); }
        if (this.focus) { const [y, high] = this.row(this.focus.lane); outline(pen, this.x(this.focus.start), y, this.x(this.focus.end) - this.x(this.focus.start), high); }
      });
      this.axis(pen, bottom);
      this.overlay(pen, bottom);
    }
    phases(pen, bottom) {
      this.source.phases.forEach(([name, start, end], i) => {
        const left = this.x(start), wide = this.x(end) - left;
        pen.fillStyle = colours[name === "update" ? "optimizer" : name];
        pen.fillRect(left, 14, lessGap(wide), 3);
        pen.fillStyle = colours.phase;
        if (name === "backward") pen.fillRect(left, PHASES, wide, bottom - PHASES);
        const from = Math.max(left, GUTTER), space = Math.min(left + wide, this.width - RIGHT) - from;
        pen.fillStyle = colours.soft; pen.textAlign = "left";
        if (space > pen.measureText(name).width + 4) pen.fillText(name, from + 1, 6);
      });
    }
    // Every column of pixels is filled as high as the share of its time that is worked in: thousands of spans narrower than a pixel are no full lane.
    spans(pen, spans, y, high) {
      const count = this.canvas.width, shares = {}, wide = [];
      const from = Math.max(0, lastBefore(spans, view[0], (span) => span.start));
      for (let i = from; i < spans.length && spans[i].start <= view[1]; i++) {
        const span = spans[i], found = shares[`${span.name[0]}${span.step === 0 ? "" : " pale"}`] ||= new Float64Array(count);
        let start = this.x(span.start) * this.ratio, end = this.x(span.end) * this.ratio;
        // Wide ones have sharp edges; to round is to be as often too wide as too narrow.
        if (end - start > 3) { start = Math.round(start); end = start + lessGap(Math.round(end) - start); }
        for (let c = Math.max(0, Math.floor(start)); c < Math.min(count, end); c++) found[c] += Math.min(end, c + 1) - Math.max(start, c);
        const left = Math.max(GUTTER, start / this.ratio), space = end / this.ratio - left;
        if (space > 22) wide.push([span, left, space]);
      }
      this.fill(pen, shares, y, high);
      pen.textAlign = "left";
      for (const [span, left, space] of wide) {
        if (pen.measureText(span.name).width + 8 >= space) continue;
        pen.fillStyle = data.colours[span.name[0]] === "backward" && span.step === 0 ? "#fff" : span.step === 0 ? "#10151c" : colours.ink;
        pen.fillText(span.name, left + 4, y + high / 2 + 0.5);
      }
    }
    // Kinds stand on each other, in the same order however far one zooms.
    fill(pen, shares, y, high) {
      const width = 1 / this.ratio, filled = new Float64Array(this.canvas.width);
      for (const kind of Object.keys(shares).sort()) {
        pen.globalAlpha = kind.endsWith("pale") ? 0.45 : 1;
        pen.fillStyle = colours[data.colours[kind[0]]];
        shares[kind].forEach((share, c) => {
          if (!share) return;
          const below = filled[c], above = Math.min(1, below + share);
          pen.fillRect(c * width, y + high * (1 - above), width, high * (above - below));
          filled[c] = above;
        });
      }
      pen.globalAlpha = 1;
    }
    find(t, y, second) {
      const each = (this.height - AXIS - PHASES) / data.lanes.length, lane = Math.floor((y - PHASES) / each);
      if (y < PHASES || lane >= data.lanes.length) return null;
      const spans = this.lanes[lane], i = lastBefore(spans, t, (span) => span.start);
      // A span of half a pixel is met by a pointer two pixels away.
      const near = [spans[i], spans[i + 1]].filter((span) => span && t >= span.start - 2 * second && t <= span.end + 2 * second);
      return near.sort((a, b) => Math.max(0, a.start - t, t - a.end) - Math.max(0, b.start - t, t - b.end))[0] || null;
    }
    step(key) {
      const filled = this.lanes.filter((spans) => spans.length);
      if (!filled.length) return;
      let item = this.focus, spans = item ? this.lanes[item.lane] : filled[0];
      if (!item) item = spans[Math.max(0, lastBefore(spans, view[0], (span) => span.start))];
      else if (key === "ArrowLeft" || key === "ArrowRight") item = spans[Math.min(spans.length - 1, Math.max(0, spans.indexOf(item) + (key === "ArrowRight" ? 1 : -1)))];
      else {
        const next = filled[Math.min(filled.length - 1, Math.max(0, filled.indexOf(spans) + (key === "ArrowDown" ? 1 : -1)))];
        item = next[Math.max(0, lastBefore(next, item.start, (span) => span.start))];
      }
      const [y, high] = this.row(item.lane);
      this.point(item, y + high);
    }
    tip(item) {
      const whose = item.step < 0 ? ", of the step before" : item.step > 0 ? ", of the next step" : "";
      return [line("what", `${item.name}: ${item.what}`), line("when", `${data.lanes[item.lane]}${whose}: ${showSeconds(item.end - item.start)}, from ${showSeconds(item.start)}`)];
    }
  }

  function outline(pen, x, y, width, height) {
    pen.strokeStyle = colours.ink; pen.lineWidth = 2;
    pen.strokeRect(x, y, Math.max(2, width), height);
  }
  // A pixel separates neighbours, if they are wide enough.
  function lessGap(width) { return width > 12 ? width - 1 : width; }
  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * ([1, 2, 5].find((factor) => factor * power >= least) || 10);
  }
  function niceBytes(least) {
    return 2 ** Math.ceil(Math.log2(Math.max(1, least)));
  }

  // The tooltip. Names come from models, so they are set as text.

  function line(kind, text) {
    const p = document.createElement("p");
    p.className = kind;
    p.textContent = text;
    return p;
  }
  function table(rows, total) {
    const made = document.createElement("table");
    for (const [kind, bytes] of [...rows, ["total", total]]) {
      const row = made.insertRow(), first = row.insertCell();
      if (kind === "total") row.className = "sum";
      first.textContent = WORDS[kind] || kind;
      row.insertCell().textContent = showBytes(bytes);
    }
    return made;
  }
  const tip = byId("tip");
  function showTip(nodes, x, y) {
    tip.replaceChildren(...nodes);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + TIP_GAP + box.width > innerWidth - 4 ? x - TIP_GAP - box.width : x + TIP_GAP;
    const top = y + TIP_GAP + box.height > innerHeight - 4 ? y - TIP_GAP - box.height : y + TIP_GAP;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }
  function hideTip() { tip.hidden = true; }

  // Time is one for all charts.

  let hover = null, drag = null, asked = false;
  function zoomTo(from, to) {
    const least = whole * 1e-5, wide = Math.min(whole, Math.max(least, to - from));
    const start = Math.min(whole - wide, Math.max(0, from));
    view = [start, start + wide];
    byId("reset").disabled = byId("farther").disabled = wide >= whole;
    redraw();
  }
  function zoomAt(t, factor) { zoomTo(t - (t - view[0]) * factor, t + (view[1] - t) * factor); }
  function redraw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; charts.forEach((chart) => chart.draw()); });
  }

  const charts = [new Memory(byId("memory")), new Lanes(byId("predicted"), data.predicted)];
  if (data.measured) {
    byId("predicted-words").textContent = "prediction";
    byId("measured-box").hidden = false;
    charts.push(new Lanes(byId("measured"), data.measured));
  }
  byId("changing").addEventListener("click", (event) => {
    const pressed = event.target.getAttribute("aria-pressed") !== "true";
    event.target.setAttribute("aria-pressed", pressed);
    charts[0].showFrom(pressed ? charts[0].base : 0);
    redraw();
  });
  byId("closer").addEventListener("click", () => zoomAt((view[0] + view[1]) / 2, 0.5));
  byId("farther").addEventListener("click", () => zoomAt((view[0] + view[1]) / 2, 2));
  byId("reset").addEventListener("click", () => zoomTo(0, whole));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  new ResizeObserver(redraw).observe(document.querySelector("main"));

  // The map of blocks: one tab stop, arrows move along it.

  const map = byId("map");
  let call = -1;
  function showCall(index, x, y) {
    call = index;
    map.querySelectorAll("i[data-call]").forEach((cell) => cell.classList.toggle("on", Number(cell.dataset.call) === index));
    if (index < 0) { hideTip(); return; }
    const [name, strategy, homes, bytes] = data.calls[index];
    showTip([line("what", name), line("", `activations: ${strategy}`), line("", homes || "no weights"), line("when", bytes ? `weights ${showBytes(bytes)}` : homes ? "weights shared with a block before" : "")], x, y);
  }
  map.addEventListener("pointermove", (event) => showCall(event.target.dataset.call === undefined ? -1 : Number(event.target.dataset.call), event.clientX, event.clientY));
  map.addEventListener("pointerleave", () => showCall(-1, 0, 0));
  map.addEventListener("blur", () => showCall(-1, 0, 0));
  map.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { showCall(-1, 0, 0); return; }
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = Math.min(data.calls.length - 1, Math.max(0, call + (event.key === "ArrowRight" ? 1 : -1)));
    const box = map.querySelector(`i[data-call="${next}"]`).getBoundingClientRect();
    showCall(next, box.left, box.bottom + 40);
    event.preventDefault();
  });

  readColours();
  zoomTo(0, whole);
})();
